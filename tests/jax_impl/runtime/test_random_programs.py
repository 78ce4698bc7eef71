"""Random programs train as plain JAX and optax do on one device, with the whole batch."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

import jax
import pytest

from tests.support.jax_impl.program_player import play

# Shapes of which something is whole on every device are meant.
pytestmark = pytest.mark.filterwarnings("ignore:(pjit|shard_map) engine:RuntimeWarning")
SECONDS = 20


@pytest.fixture(autouse=True)
def _leave_no_programs() -> Iterator[None]:
    """New programs would fill the cache of compiled ones, and no run would meet them again."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600.0)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(first, first + 5) for first in range(0, 20, 5)], ids=str)
def test_random_programs_equal_plain_jax(seeds: range) -> None:
    for seed in seeds:
        play(seed)


def test_new_programs_equal_plain_jax() -> None:
    """Programs that no run had before; ``TWINSHARD_SEED=N`` begins with the program of seed N."""
    end = time.monotonic() + SECONDS
    for seed in itertools.count(int(os.environ["TWINSHARD_SEED"])):
        play(seed)
        if time.monotonic() > end:
            break
