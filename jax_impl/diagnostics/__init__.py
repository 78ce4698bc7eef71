"""What a user looks at when something is odd: collectives and memory."""
