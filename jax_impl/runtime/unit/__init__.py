"""A unit's call: gather, run, drop."""
