"""A process group of one rank, and processes in which JAX has the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.gpu.devices import ON_GPU
from tests.gpu.jax_process import JaxProcess


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """With NCCL for the GPU, and gloo for what lies in the host's memory."""
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def jax_process() -> Iterator[JaxProcess]:
    """For all tests that do not measure its memory."""
    process = JaxProcess(ON_GPU)
    yield process
    process.close()


@pytest.fixture(scope="session")
def exact_jax_process() -> Iterator[JaxProcess]:
    """For tests that compare bits of two runs."""
    process = JaxProcess(ON_GPU, exact=True)
    yield process
    process.close()
