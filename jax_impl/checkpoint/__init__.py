"""Save and load sharded train states without gathering them."""
