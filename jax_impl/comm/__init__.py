"""Meshes, collectives, and agreement between processes."""
