"""Tensors as every format has them: boxes, dtypes, chunks, names of leaves, checksums."""
