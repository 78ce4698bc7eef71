"""Gathering weights, in the dtype of the computation or in float8."""
