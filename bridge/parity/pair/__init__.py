"""A PyTorch model and a JAX model of the same weights, side by side: see ``bridge.parity.pair.parity``."""
