"""Compares two checkpoints tensor by tensor, in units in the last place."""
