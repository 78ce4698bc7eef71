"""Saving again and again: directories of steps, which of them stay, and saves that run behind training."""
