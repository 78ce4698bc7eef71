"""Adapters for flax nnx, linen and plain pytrees, and the stand-ins for the parameters of units in their models."""
