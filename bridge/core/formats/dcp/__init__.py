"""PyTorch's distributed checkpoints (DCP): archives, metadata pickles, reader and writer."""
