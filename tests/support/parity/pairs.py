"""Small pairs of one model in PyTorch and JAX, for tests that compare them."""
