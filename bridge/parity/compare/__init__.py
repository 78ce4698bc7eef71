"""Two recorded runs compared, from the models to the report."""
