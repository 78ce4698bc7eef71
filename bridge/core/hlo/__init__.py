"""Compiled XLA programs, read from their text; no JAX is needed."""
