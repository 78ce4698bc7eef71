"""What a checkpoint holds: a summary, its tree of tensors, a picture of its layout."""
