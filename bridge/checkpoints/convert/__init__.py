"""Converts checkpoints between formats and models."""
