"""Where the tests of this folder run: on a GPU, or on the CPU where ``TWINSHARD_GPU_TESTS=cpu`` asks for a rehearsal.

A rehearsal runs the tests that ask for ``needs_device``, so that mistakes in the tests themselves cost no time on a
device. It says nothing about GPUs: copies, streams, kernels and the memory of a device are played by the CPU.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
REHEARSED = not ON_GPU and os.environ.get("TWINSHARD_GPU_TESTS") == "cpu"
DEVICE = "cuda" if ON_GPU else "cpu"

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
needs_device = pytest.mark.skipif(not (ON_GPU or REHEARSED), reason="needs a GPU")


_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_JAX_ON_GPU = ON_GPU and any(importlib.util.find_spec(name) for name in _PLUGINS)
needs_jax_gpu = pytest.mark.skipif(not _JAX_ON_GPU, reason="needs a GPU and JAX's CUDA plugin")
needs_jax_device = pytest.mark.skipif(
    not (_JAX_ON_GPU or REHEARSED), reason="needs a GPU and JAX's CUDA plugin"
)


def busy(milliseconds: float) -> None:
    """Keep the current stream busy."""
    if ON_GPU:
        torch.cuda._sleep(int(milliseconds * 1_000_000))
