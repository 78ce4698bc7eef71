"""Mutants of the product that no one chose: drawn from a seed, and given to the tests. See ``__main__``."""
