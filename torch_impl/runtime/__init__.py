"""A unit's life: flat buffers, gather, reduce, and the schedule that overlaps them."""
