"""Models that are planned for: shapes, activations, traces."""
