"""The time of a compiled program on a device."""
