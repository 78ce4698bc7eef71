"""The relay: one training run that alternates between the two runtimes."""
