"""Reads a whole checkpoint and says which tensors are whole."""
