"""Compiles a step for devices that do not exist here, and reads memory and time from the compiled program."""
