"""How long a compiled program takes on a device."""
