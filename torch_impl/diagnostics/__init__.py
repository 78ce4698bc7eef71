"""What a user looks at when something is odd: collectives, memory, layouts, norms, non-finite values."""
