"""Checkpoints at URLs: read by ranges, and uploaded part by part as they are written."""
