"""The ``twinshard`` command: one file a subcommand, and what they print."""
