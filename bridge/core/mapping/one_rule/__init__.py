"""One rule, applied to the tensors of a checkpoint: its instances, sizes, open axes and scales."""
