"""Which tensors a rule can be meant for, and why a checkpoint does not fit a mapping."""
