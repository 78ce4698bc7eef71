"""Checkpoints hold whole parameters: a run moves between sizes of its model axes and engines, and goes on as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from bridge.core.formats import open_checkpoint
from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    init_sharded,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_eval_step,
    make_train_step,
    plan_sharding,
    save_checkpoint,
    unshard,
)
from jax_impl.modules.module_tree import parameter_leaves
from tests.support.jax_impl import cut_models
from tests.support.jax_impl.cut_models import expert_loss, expert_rows

# Experts over one axis, and then features over another.
WIDE = {"dp": 2, "ep": 2, "tp": 2}
RUNS: list[tuple[str, dict[str, int], Any]] = [
    ("shard_map", {"dp": 2, "ep": 2}, cut_models.EXPERTS),
    ("shard_map", {"dp": 2, "ep": 4}, cut_models.EXPERTS),
    ("pjit", WIDE, cut_models.EXPERTS_AND_TENSORS),
    ("shard_map", {"dp": 2}, None),
    ("shard_map", WIDE, cut_models.EXPERTS_AND_TENSORS),
    ("pjit", {"dp": 1, "ep": 4}, cut_models.EXPERTS),
    ("shard_map", {"outer": 2, "dp": 2, "tp": 2}, {"layers/*/w_in": PartitionSpec(None, None, "tp")}),
]


def optimizer() -> Any:
    c = cut_models
    return main_weight_adamw(c.LR, c.B1, c.B2, c.EPS, c.DECAY)


def options(engine: str, parallel: Any) -> Any:
    return {"engine": engine} if parallel is None else {"engine": engine, "parallel": parallel}


@pytest.mark.slow
def test_a_run_goes_on_with_other_sizes_of_its_model_axes(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        batches = [expert_rows(seed) for seed in range(len(RUNS))]
        losses, _, last = cut_models.trained(cut_models.expert_net(), expert_loss, batches)
        state = None
        for number, (engine, sizes, parallel) in enumerate(RUNS):
            plan, weights = fully_shard(
                cut_models.expert_net(), data_parallel_mesh(sizes), **options(engine, parallel)
            )
            if number:
                loaded = load_checkpoint(tmp_path / str(number - 1), plan, optimizer())
                state = loaded.state
                assert loaded.train["step"] == number - 1
            else:
                state = init_state(plan, weights, optimizer())
            # Forward and one step after each load.
            evaluated = make_eval_step(plan, expert_loss)(state, batches[number])
            np.testing.assert_allclose(float(evaluated["loss"]), losses[number], rtol=1e-12)
            state, metrics = make_train_step(plan, expert_loss, optimizer())(state, batches[number])
            np.testing.assert_allclose(float(metrics["loss"]), losses[number], rtol=1e-12)
            save_checkpoint(tmp_path / str(number), plan, state, {"step": number})
        unsharded = unshard(plan, state.weights)
        for path, value in last.items():
            np.testing.assert_allclose(unsharded[path], value, rtol=0, atol=1e-12)


def test_what_is_stored_is_whole_and_bit_for_bit_the_same(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        plan, weights = fully_shard(
            cut_models.decoder(stacked=True),
            data_parallel_mesh({"outer": 2, "dp": 2, "tp": 2}),
            strategy="hfsdp",
            stacked=["layers"],
            parallel=cut_models.DECODER,
        )
        state = init_state(plan, weights, optimizer())
        save_checkpoint(tmp_path / "saved", plan, state)
        expected = unshard(plan, state.weights)
        with open_checkpoint(tmp_path / "saved") as reader:
            stored = {name: reader.read(name) for name in reader.tensors if name.startswith("params/")}
        assert stored.keys() == {f"params/{path}" for path in expected}
        for path, value in expected.items():
            np.testing.assert_array_equal(stored[f"params/{path}"], value, err_msg=path)
        other = plan_sharding(
            cut_models.decoder(stacked=True),
            data_parallel_mesh({"dp": 1, "tp": 4}),
            stacked=["layers"],
            parallel=cut_models.DECODER,
        )
        loaded = load_checkpoint(tmp_path / "saved", other, optimizer())
        for path, value in unshard(other, loaded.state.weights).items():
            np.testing.assert_array_equal(value, expected[path], err_msg=path)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_initial_weights_are_born_cut(engine: str) -> None:
    with jax.enable_x64(True):
        expected = parameter_leaves(cut_models.expert_net())
        plan, weights, _ = init_sharded(
            cut_models.expert_net,
            data_parallel_mesh(WIDE),
            engine=engine,
            parallel=cut_models.EXPERTS_AND_TENSORS,
        )
        for key, array in weights.items():
            plan.check_array(key, array)
        for path, value in unshard(plan, weights).items():
            np.testing.assert_array_equal(value, expected[path], err_msg=path)
