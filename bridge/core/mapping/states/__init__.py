"""Optimizer states of both frameworks: moments, steps, numbered states, tied weights, hyperparameters."""
