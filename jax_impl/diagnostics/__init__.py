"""What a user looks at when something is odd: layouts, norms, values that are not finite, collectives, memory."""
