"""The PyTorch side of a pair of models."""
