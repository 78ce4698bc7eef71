"""One conversion by several processes or machines."""
