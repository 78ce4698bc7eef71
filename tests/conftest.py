"""Settings every test module needs before the frameworks are imported, and the shared rank processes."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Generator, Iterator

# Barriers carry the meaning of the strategies; by default the CPU compiler deletes them: see simulate_devices in
# jax_impl/comm/mesh.py.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_disable_hlo_passes=cse_barrier_expander,small-while-loop-hoisting",
        "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    ]
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Workers of pytest-xdist inherit it.
os.environ.setdefault("TWINSHARD_SEED", str(random.randrange(10**6)))

# Processes that tests start compile for themselves: only this one leaves out what cannot be loaded back right.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import pytest

import tests.support.examples  # noqa: F401  # profiles are registered before hypothesis is told which one to load
from tests.support import compilation_cache, compiler_effort
from tests.support.pairwise import mark_covered_slow, mark_slow
from tests.support.ranks import RankGroup


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # A million objects are made that stay. To look through them again and again took a third of the time.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what is marked slow
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow(items)
    # The record from which covered cases are chosen has them all.
    if not config.pluginmanager.hasplugin("tests.support.mutants.reached"):
        mark_covered_slow(items)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        compiler_effort.save_effort()


def pytest_report_header() -> str:
    seed = os.environ["TWINSHARD_SEED"]
    return f"new random programs: seed {seed} (TWINSHARD_SEED={seed} repeats them)"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Not at the start: most tests do without JAX, whose import takes a second.
    compilation_cache.start()
    compiler_effort.use_full_effort(item.get_closest_marker("optimized") is not None)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankGroup]:
    """Four rank processes shared by all torch tests; started by the first test that runs something on them."""
    group = RankGroup()
    yield group
    group.close()
