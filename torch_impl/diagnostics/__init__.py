"""Tools to investigate unexpected behaviour: collectives, memory, layouts, norms, non-finite values."""
