"""Stages of a comparison: forward, single modules, backward, buffers, order, precision."""
