"""The contents of a checkpoint: a summary, the tree of tensors, a picture of the layout."""
