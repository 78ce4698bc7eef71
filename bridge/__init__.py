"""Moves checkpoints between PyTorch (DCP) and JAX (Orbax), compares them, and runs both stacks side by side.

Reading, converting and comparing need neither PyTorch nor JAX; only `bridge.parity` starts the runtimes.
"""

__version__ = "0.1.0"
