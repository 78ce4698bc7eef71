"""Recordings of a side, in memory and in traces, and distances between two recordings."""
