"""Gradients of a group, from the hook of a weight to the reduced shard."""
