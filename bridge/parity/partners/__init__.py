"""Which tensor, module and weight of one side belongs to which of the other."""
