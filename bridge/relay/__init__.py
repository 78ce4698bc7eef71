"""The relay: one training run that hops between the two runtimes."""
