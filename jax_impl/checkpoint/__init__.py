"""Saving and loading of train states, sharded, without gathering."""
