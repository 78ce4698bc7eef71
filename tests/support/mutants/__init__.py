"""Random mutants of the product, drawn from a seed and given to the tests. See ``__main__``."""
