"""Parity of the two runtimes: the relay that hops between them, its references and its report.

Only the ``*_leg`` and ``torch_reference`` modules import a runtime; each runs in processes of its own.
"""
