"""Models to plan for: shapes, activations, traces."""
