"""Saving and loading train states that are sharded, without gathering them."""
