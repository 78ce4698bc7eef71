"""Checkpoints at URLs: mirrored before they are read, uploaded after they are written."""
