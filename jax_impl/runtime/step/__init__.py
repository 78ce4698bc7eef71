"""A step: forward, gradients, losses and their divisors."""
