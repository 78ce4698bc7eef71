"""The correspondence of tensors, modules and weights between the two sides."""
