"""Every warning points at the line of the program that calls, whatever lies between."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_impl import (
    ShardingPolicy,
    data_parallel_mesh,
    fully_shard,
    init_sharded,
    init_state,
    load_checkpoint,
    plan_sharding,
    save_checkpoint,
    unshard,
    watch_nonfinite_outputs,
)


def odd_sizes() -> dict[str, Any]:
    return {"layers": [{"w": jnp.ones((5, 7)), "b": jnp.ones(8)}], "head": jnp.ones((3, 7))}


def files(call: Callable[[], object], message: str) -> list[str]:
    """The files that the warnings of ``call`` with this message point at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [warning.filename for warning in caught if message in str(warning.message)]


PJIT: dict[str, Any] = {"engine": "pjit", "units": []}
PLANS: dict[str, Callable[[], object]] = {
    "fully_shard": lambda: fully_shard(odd_sizes(), data_parallel_mesh(4), **PJIT),
    "plan_sharding": lambda: plan_sharding(odd_sizes(), data_parallel_mesh(4), **PJIT),
    "init_sharded": lambda: init_sharded(odd_sizes, data_parallel_mesh(4), **PJIT),
}


@pytest.mark.parametrize("name", PLANS)
def test_of_whole_parameters_where_a_plan_is_made(name: str) -> None:
    assert files(PLANS[name], "have no dimension that the number") == [__file__]


def test_of_whole_parameters_where_a_policy_is_applied() -> None:
    policy = ShardingPolicy.load("fsdp")
    assert files(lambda: policy.apply(odd_sizes(), **PJIT), "have no dimension that the number") == [__file__]


@pytest.mark.parametrize("name", PLANS)
def test_of_simulated_devices_without_flags(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert files(PLANS[name], "without the XLA flags of simulate_devices") == [__file__]


@pytest.mark.parametrize("strict", [True, False])
def test_of_whole_moments(tmp_path: Path, *, strict: bool) -> None:
    plan, weights = fully_shard(odd_sizes(), data_parallel_mesh(4), units=["layers/*"])
    message = "moments are whole on every device"
    optimizer = optax.lamb(0.1)
    assert files(lambda: init_state(plan, weights, optimizer), message) == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Of another optimizer: not strict, the moments are fresh.
        saved = optimizer if strict else optax.sgd(0.1)
        save_checkpoint(tmp_path / "c", plan, init_state(plan, weights, saved))
    assert files(lambda: load_checkpoint(tmp_path / "c", plan, optimizer, strict=strict), message) == [
        __file__
    ]


def test_of_variables_that_training_changes() -> None:
    plan, weights = fully_shard(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), data_parallel_mesh(2), units=[])
    parameters = unshard(plan, weights)
    assert files(lambda: plan.merge(parameters), "plan.merge") == [__file__]


def test_of_a_context_in_which_no_step_ran() -> None:
    plan, _ = fully_shard(odd_sizes(), data_parallel_mesh(2))

    def watch() -> None:
        with watch_nonfinite_outputs(plan):
            pass

    assert files(watch, "saw none") == [__file__]


def test_of_a_checkpoint_without_commit_file(tmp_path: Path) -> None:
    plan, weights = fully_shard(odd_sizes(), data_parallel_mesh(2))
    save_checkpoint(tmp_path / "c", plan, init_state(plan, weights, optax.sgd(0.1)))
    (tmp_path / "c" / "commit_success.txt").unlink()
    assert files(lambda: load_checkpoint(tmp_path / "c", plan), "commit_success") == [__file__]
