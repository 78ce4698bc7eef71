"""Checkpoints as a whole: several parts read as one, steps, pipelines, companions, what may be replaced."""
