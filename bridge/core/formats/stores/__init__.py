"""Checkpoints at URLs: read by ranges, and sent part by part as they are written."""
