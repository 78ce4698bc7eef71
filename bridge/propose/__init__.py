"""``twinshard map``: proposes a mapping from two checkpoints, and marks uncertain rules."""
