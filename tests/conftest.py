"""Settings that must be made before a test imports a framework, and the rank processes that tests share."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Generator, Iterator

# Strategies need barriers, which XLA's CPU compiler deletes by default: see simulate_devices in
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

# Workers of pytest-xdist inherit the seed.
os.environ.setdefault("TWINSHARD_SEED", str(random.randrange(10**6)))

# Child processes must not use JAX's cache: only this process keeps programs out that load back wrong.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import pytest

import tests.support.examples  # noqa: F401  # profiles are registered before hypothesis is told which one to load
from tests.support import compilation_cache, compiler_effort
from tests.support.pairwise import mark_covered_slow, mark_slow
from tests.support.ranks import RankGroup


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    # Collection makes a million objects that stay. The garbage collector took a third of the time to scan them.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects the slow tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow(items)
    # The covered cases are chosen from a record of all cases.
    if not config.pluginmanager.hasplugin("tests.support.mutants.reached"):
        mark_covered_slow(items, config.args)
    # The relay takes more than a minute. If it began last, the other workers would wait for its worker.
    items.sort(key=lambda item: item.path.name != "test_relay.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        compiler_effort.save_effort()


def pytest_report_header() -> str:
    seed = os.environ["TWINSHARD_SEED"]
    return f"new random programs: seed {seed} (TWINSHARD_SEED={seed} repeats them)"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Here, not at the start: the import of JAX takes a second, and most tests do not need JAX.
    compilation_cache.start()
    compiler_effort.use_full_effort(item.get_closest_marker("optimized") is not None)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankGroup]:
    """Four rank processes shared by all torch tests; started by the first test that runs something on them."""
    group = RankGroup()
    yield group
    group.close()
