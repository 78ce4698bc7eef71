"""``twinshard map``: proposes a mapping from two checkpoints, and says where it is unsure."""
