"""DTensors over uneven rows: the placement, the operators, and what is refused."""
