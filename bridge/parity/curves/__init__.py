"""Are two training runs the same experiment? ``read_metrics`` reads their curves, ``compare_runs`` compares them."""
