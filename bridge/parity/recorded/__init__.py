"""What a side records, in memory and in traces, and distances between two recordings."""
