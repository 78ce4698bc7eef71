"""The JAX side of a pair of models."""
