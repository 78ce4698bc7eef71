"""A whole mapping applied to a whole checkpoint: the plan, and the reader that executes it."""
