"""Saving repeatedly: directories of steps, which steps are kept, and saves in the background of training."""
