"""Main weights and whole weights, and the order in which they are gathered and freed."""
