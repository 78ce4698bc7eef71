"""Tests that the JAX benchmark computes its tables correctly. They do not judge speed."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_impl import data_parallel_mesh
from tests.bench.bench_jax import main
from tests.bench.costs import ratio
from tests.bench.jax_baseline import build_baseline
from tests.bench.jax_bytes import weigh
from tests.bench.jax_contestants import ADAMW, build_step, loss, model_of, plan_of, tokens_of
from tests.bench.jax_leg import run, times
from tests.bench.jax_rounds import interleaved, unequal_losses
from tests.bench.jax_setting import BASELINE, BASELINE_XLA, PJIT, SHARD_MAP, Setting
from tests.bench.jax_tables import MARK, Answer, broken_promises, bytes_table, limit_of, times_table

ROOT = Path(__file__).parents[2]
TINY = Setting(4, size="tiny", length=8)


def answer(walls: dict[str, float], setting: Setting = TINY) -> Answer:
    """Three rounds, with a cost of ``walls`` for each contestant."""
    cost = {name: [{"wall": wall, "cpu": 2 * wall}] * 3 for name, wall in walls.items()}
    return {"setting": setting.to_json(), "costs": cost, "losses": {name: [3.0, 2.0] for name in walls}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "expected numbers of devices from 1 to 64, got '0'"),
        (["--devices", "4,x"], "expected numbers of devices from 1 to 64, got '4,x'"),
        (["--devices", "3"], "--rows: expected a multiple of 3 devices, got 8"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
        (["--contestants", "baseline,fsdp"], "expected different names among baseline, shard_map, pjit"),
        (["--contestants", "pjit,pjit"], "expected different names among"),
        (["--strategy", "zero3"], "invalid choice: 'zero3'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--platform", "cpu", *arguments])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_the_help_shows_examples() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_jax", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "python -m tests.bench.bench_jax --quick" in shown.stdout


def test_contestants_take_turns_and_each_round_begins_with_another() -> None:
    order: list[str] = []

    def step(name: str) -> float:
        order.append(name)
        return float(len(order))

    costs, losses = interleaved({name: (lambda name=name: step(name)) for name in "abc"}, rounds=3, repeat=2)
    assert "".join(order) == "aabbcc" + "bbccaa" + "ccaabb"
    assert {name: len(per_round) for name, per_round in costs.items()} == {"a": 3, "b": 3, "c": 3}
    assert losses["a"] == [1, 2, 11, 12, 15, 16]


def test_a_ratio_is_taken_within_each_round() -> None:
    spread = ratio([1.0, 9.0, 4.0], [2.0, 3.0, 4.0])
    assert (spread.least, spread.median, spread.most) == (0.5, 1.0, 3.0)
    assert str(spread) == "1.00 (0.50-3.00)"
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize("wrong", [1.00002, math.nan, math.inf])
def test_a_loss_that_differs_in_one_step_is_named(wrong: float) -> None:
    losses = {BASELINE: [3.0, 1.0], PJIT: [3.0, 1.0]}
    assert unequal_losses(losses, 1e-5, BASELINE) == []
    losses[PJIT][1] = wrong
    (sentence,) = unequal_losses(losses, 1e-5, BASELINE)
    assert sentence.startswith("pjit, step 2: expected the loss of baseline, 1.0000000, within 1e-05")


def test_contestants_that_do_not_train_are_named() -> None:
    (sentence,) = unequal_losses({BASELINE: [3.0, 3.0]}, 1e-5, BASELINE)
    assert "expected a falling loss" in sentence


def test_ratios_above_their_limit_are_marked() -> None:
    rows = list(times_table([answer({BASELINE: 1.0, SHARD_MAP: 1.09, PJIT: 1.06})]))
    assert [MARK in row for row in rows if row.startswith("| 4 |")] == [False, False, True]
    assert any("| 1.06 (1.06-1.06) **above** |" in row for row in rows)


@pytest.mark.slow
def test_the_hand_written_step_equals_one_on_a_single_device_without_shardings() -> None:
    model = model_of(TINY)
    optimizer = optax.adamw(**ADAMW)
    graphdef, params = nnx.split(model)
    opt_state = optimizer.init(params)
    tokens = jnp.asarray(tokens_of(TINY))

    @jax.jit
    def step(params: Any, opt_state: Any) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(lambda p: loss(nnx.merge(graphdef, p), tokens))(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    steps = {stacked: _losses(dataclasses.replace(TINY, stacked=stacked)) for stacked in (True, False)}
    for k in range(3):
        params, opt_state, value = step(params, opt_state)
        for weights in steps.values():
            np.testing.assert_allclose(weights[k], value, rtol=1e-6)


def _losses(setting: Setting) -> list[float]:
    step = build_step(BASELINE, setting, model_of(setting), data_parallel_mesh(setting.devices))
    return [step() for _ in range(3)]


def test_the_baseline_cuts_weights_and_moments_and_is_donated() -> None:
    model, mesh = model_of(TINY), data_parallel_mesh(4)
    baseline = build_baseline(model, mesh, optax.adamw(**ADAMW))
    state = baseline.state()
    large = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert all(4 * leaf.addressable_shards[0].data.size == leaf.size for leaf in large)
    # Layers are scanned, so none of them may lie on one device only.
    assert all(leaf.sharding.spec[0] is None for leaf in jax.tree.leaves(state[0]["layers"]))
    rows = jax.device_put(tokens_of(TINY), baseline.rows)
    jax.block_until_ready(baseline.step(state, rows))
    assert all(leaf.is_deleted() for leaf in large)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_contestants_train_the_same(dtype: str) -> None:
    setting = dataclasses.replace(TINY, dtype=dtype, recompute=dtype == "bfloat16")
    answer = times(setting, [BASELINE, SHARD_MAP, PJIT], rounds=2, repeat=1)
    assert broken_promises([answer]) == []
    assert all(len(costs) == 2 for costs in answer["costs"].values())
    assert all(cost["wall"] > 0 and cost["cpu"] > 0 for costs in answer["costs"].values() for cost in costs)
    assert [len(losses) for losses in answer["losses"].values()] == [4, 4, 4]
    other = {**answer, "losses": {**answer["losses"], PJIT: [1.03 * x for x in answer["losses"][PJIT]]}}
    assert len(broken_promises([other])) == 1


@pytest.mark.slow
def test_a_contestant_that_trains_on_other_weights_is_reported() -> None:
    mesh = data_parallel_mesh(4)
    model, other = model_of(TINY), model_of(TINY)
    other.norm.scale.set_value(1.5 * other.norm.scale[...])
    steps = {
        name: build_step(name, TINY, which, mesh) for name, which in ((BASELINE, model), (SHARD_MAP, other))
    }
    _, losses = interleaved(steps, 1, 2)
    (sentence,) = broken_promises([{**answer({}), "losses": losses}])
    assert sentence.startswith("4 devices, float32, scan: shard_map, step 1: expected the loss of baseline")


def test_unknown_contestants_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of baseline, shard_map, .*, got 'fsdp'"):
        build_step("fsdp", TINY, model_of(TINY), data_parallel_mesh(4))
    with pytest.raises(ValueError, match="rows: expected a multiple of the number of devices, 3, got 8"):
        Setting(3)


@pytest.mark.slow
def test_bytes_of_a_step_are_those_of_its_state_and_programs() -> None:
    model, mesh = model_of(TINY), data_parallel_mesh(4)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    for name in (BASELINE, BASELINE_XLA, SHARD_MAP, PJIT):
        footprint = weigh(name, TINY, model, mesh)
        # Weights and two moments, 4 bytes an element, on 4 devices; and the step count, 4 bytes.
        padded = parameters
        if name in (SHARD_MAP, PJIT):
            padded = sum(math.prod(array.shape) for array in plan_of(name, TINY, model, mesh).arrays.values())
        assert parameters <= padded < 1.1 * parameters
        assert footprint.state == 3 * 4 * padded // 4 + 4
        assert footprint.peak > footprint.state + footprint.gradients + footprint.temporary // 2
        assert footprint.compiled["all_gather"][0] > 0
        assert footprint.gradients == (
            0 if name in (BASELINE, BASELINE_XLA) else footprint.state // 3 // 4 * 4
        )
    # Two units are gathered twice and reduced once; the layers' unit each layer, and the loss is one number.
    footprint = weigh(SHARD_MAP, TINY, model, mesh)
    assert {collective: calls for collective, (calls, _) in footprint.traced.items()} == {
        "all_gather": 6,
        "reduce_scatter": 3,
        "psum": 1,
    }
    whole = weigh(SHARD_MAP, dataclasses.replace(TINY, strategy="no_shard"), model, mesh)
    assert whole.state >= 12 * parameters
    with pytest.raises(ValueError, match="baseline: expected one microbatch, got 2"):
        weigh(BASELINE, TINY, model, mesh, microbatches=2)


def test_bytes_above_what_the_prototype_had_are_marked() -> None:
    setting = Setting(8, size="26M", length=32)
    footprint: dict[str, Any] = {"contestant": SHARD_MAP, "strategy": "optim_grads_params"}
    footprint |= {
        "state": 1,
        "gradients": 1,
        "temporary": 1,
        "peak": 109e6,
        "compiled": {"psum": (1, 4)},
        "traced": {},
    }
    answers = [
        {
            "setting": setting.to_json(),
            "found": [footprint, {**footprint, "peak": 107e6}, {**footprint, "contestant": BASELINE}],
        }
    ]
    rows = [row for row in bytes_table(answers) if row.startswith("| scan")]
    assert [MARK in row for row in rows] == [True, False, False]
    assert limit_of(setting, footprint) == 108
    recomputed = dataclasses.replace(setting, recompute=True)
    assert limit_of(recomputed, footprint) == 94
    assert limit_of(recomputed, {**footprint, "strategy": "optim"}) == 493
    for other in ({"devices": 4}, {"size": "5M"}, {"stacked": False}):
        assert limit_of(dataclasses.replace(setting, **other), footprint) is None


@pytest.mark.slow
def test_a_process_of_its_own_answers_with_sane_numbers(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--quick", "--platform", "cpu", "--devices", "2", "--dtype", "float32", "--layers", "scan"]
    subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_jax", *options, "--only", "times", "--json", str(report)],
        cwd=ROOT,
        check=True,
        timeout=500,
    )
    (answer,) = json.loads(report.read_text())["times"]
    assert answer["setting"]["devices"] == 2
    assert all(0 < cost["wall"] < 60 for costs in answer["costs"].values() for cost in costs)
    assert broken_promises([answer]) == []


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"got exit status 1: [\s\S]*'sizes'"):
        run({"what": "times", "setting": {"devices": 1, "sizes": "tiny"}})
