"""Compiled programs of XLA, read from their text; no JAX is needed."""
