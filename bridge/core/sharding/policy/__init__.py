"""Policies: strategies, precision, units, mesh axes, and the TOML files that contain them."""
