"""Compiles a step for devices that are not there, and reads memory and time from the compiled program."""
