"""Parity of the two runtimes: the relay that hops between them, its references and its report.

Only the ``*_leg`` and ``torch_reference`` modules, each of which runs in processes of its own, and the ``torch_*`` and
``jax_*`` modules of ``pair`` import a runtime.
"""
