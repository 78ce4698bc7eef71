"""Whole checkpoints: several parts read as one, steps, pipelines, companions, and which paths may be replaced."""
