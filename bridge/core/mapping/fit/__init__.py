"""Which tensors a rule can apply to, and why a checkpoint does not fit a mapping."""
