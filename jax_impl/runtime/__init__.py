"""A unit's life: flat buffers, gather, reduce, and the programs that are traced from them."""
