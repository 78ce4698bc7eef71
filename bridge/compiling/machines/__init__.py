"""Devices, their links and their compilers."""
