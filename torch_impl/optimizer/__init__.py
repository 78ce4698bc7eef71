"""Optimizers over main weights, and the location of their state."""
