"""Optimizers of main weights, the formats of their moments, and the memory of their state."""
