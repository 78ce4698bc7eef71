"""A unit: its groups, its forward and its backward."""
