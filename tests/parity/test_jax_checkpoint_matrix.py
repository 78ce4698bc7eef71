"""Saved on N devices under one strategy, loaded on M under another: the run goes on as if never interrupted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_impl import load_checkpoint, save_checkpoint
from tests.support.jax_impl import checkpoint_runs as runs

COUNTS = (1, 2, 3, 4)
# Each pair of counts takes one of the 16 pairs of strategies, so that all pairs of both kinds occur.
CASES = [
    (n, runs.STRATEGIES[(n + m) % 4], m, runs.STRATEGIES[(n + 2 * m) % 4]) for n, m in product(COUNTS, COUNTS)
]
TRAIN = {"step": 2, "data": {"seed": 2**40, "sha": np.arange(4, dtype=np.uint8)}}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    """Each run of four steps, saved after the second, made when first asked for."""
    base = tmp_path_factory.mktemp("matrix")

    class Runs(dict):
        def __missing__(self, key: tuple[int, str]) -> dict[str, Any]:
            devices, strategy = key
            plan, path = runs.plan_of(devices, strategy), base / f"{devices}-{strategy}"
            state, _ = runs.train(runs.fresh(devices, strategy), devices, strategy, first=0, count=2)
            saved, logits = runs.logical(plan, state), runs.forward(plan, state)
            with pytest.MonkeyPatch.context() as patch:
                # Chunks of a few rows: some inside one device's shard, some over two or three.
                patch.setattr("bridge.core.formats.orbax.zarr.chunks._CHUNK", 300)
                save_checkpoint(path, plan, state, TRAIN)
            state, losses = runs.train(state, devices, strategy, first=2, count=2)
            self[key] = {
                "path": path,
                "saved": saved,
                "logits": logits,
                "losses": losses,
                "final": runs.logical(plan, state),
            }
            return self[key]

    return Runs()


def _continue(path: Path, devices: int, strategy: str, original: dict[str, Any], *, bitwise: bool) -> None:
    plan = runs.plan_of(devices, strategy)
    loaded = load_checkpoint(path, plan, runs.OPTIMIZER)
    runs.assert_same_bits(runs.logical(plan, loaded.state), original["saved"])
    np.testing.assert_array_equal(runs.forward(plan, loaded.state), original["logits"])
    state, losses = runs.train(loaded.state, devices, strategy, first=2, count=2)
    final = runs.logical(plan, state)
    assert loaded.train["data"]["seed"] == 2**40
    assert final["opt_state/count"] == 4
    if bitwise:
        assert losses == original["losses"]
        runs.assert_same_bits(final, original["final"])
        return
    # Gradients are summed over the devices in another order.
    np.testing.assert_allclose(losses, original["losses"], rtol=1e-6)
    for name, expected in original["final"].items():
        scale = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(final[name], expected, rtol=0, atol=1e-5 * scale, err_msg=name)


def test_all_pairs_of_counts_and_all_pairs_of_strategies_are_tried() -> None:
    assert len({(n, m) for n, _, m, _ in CASES}) == 16
    assert len({(s, t) for _, s, _, t in CASES}) == 16


@pytest.mark.fast_cases("4-optim_grads_params-3-optim_grads")
@pytest.mark.parametrize(("saver", "saved_as", "loader", "loaded_as"), CASES)
def test_a_run_continues_on_other_devices_under_another_strategy(
    originals: dict[Any, dict[str, Any]], saver: int, saved_as: str, loader: int, loaded_as: str
) -> None:
    original = originals[saver, saved_as]
    _continue(original["path"], loader, loaded_as, original, bitwise=(saver, saved_as) == (loader, loaded_as))


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", runs.STRATEGIES)
@pytest.mark.parametrize("devices", COUNTS)
def test_a_run_continues_bitwise_on_as_many_devices_under_its_own_strategy(
    originals: dict[Any, dict[str, Any]], devices: int, strategy: str
) -> None:
    original = originals[devices, strategy]
    _continue(original["path"], devices, strategy, original, bitwise=True)


# Every engine, strategy and mesh, for models with stacks, frozen parameters and variables.
KINDS = {
    model: [
        runs.Case(4, "no_shard", "shard_map", model),
        runs.Case(3, "optim", "pjit", model),
        runs.Case(2, "optim_grads", "shard_map", model),
        runs.Case(4, "optim_grads_params", "pjit", model),
        runs.Case((2, 2), "hfsdp", "shard_map", model),
        runs.Case((2, 2), "hsdp", "pjit", model),
    ]
    for model in ("decoder", "stacked", "mixed")
}
# Each loads what the one before saved, so that no two neighbours are alike; the first loads the last one's.
CHAINS = [
    pytest.param(model, i, marks=() if model == "mixed" and i % 3 == 1 else pytest.mark.slow)
    for model, cases in KINDS.items()
    for i in range(len(cases))
]


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[runs.Case], dict[str, Any]]:
    """A run of one step, its save in small chunks, and what was saved."""
    base = tmp_path_factory.mktemp("chained")

    @functools.cache
    def make(case: runs.Case) -> dict[str, Any]:
        path, plan = base / str(hash(case)), runs.plan_of(*case)
        state, _ = runs.train(runs.fresh(*case), *case, first=0, count=1)
        saved, outputs = runs.logical(plan, state), runs.forward(plan, state)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bridge.core.formats.orbax.zarr.chunks._CHUNK", 300)
            patch.setattr("jax_impl.checkpoint.chunks._HELD", 1000)
            save_checkpoint(path, plan, state, TRAIN)
        state, losses = runs.train(state, *case, first=1, count=1)
        return {"path": path, "saved": saved, "outputs": outputs, "losses": losses}

    return make


@pytest.mark.slow
@pytest.mark.fast_cases("mixed-1")
@pytest.mark.parametrize(("model", "position"), CHAINS)
def test_any_engine_strategy_and_mesh_goes_on_with_the_save_of_any_other(
    chained: Callable[[runs.Case], dict[str, Any]], model: str, position: int
) -> None:
    saver, loader = KINDS[model][position - 1], KINDS[model][position]
    original, plan = chained(saver), runs.plan_of(*loader)
    loaded = load_checkpoint(original["path"], plan, runs.OPTIMIZER)
    runs.assert_same_bits(runs.logical(plan, loaded.state), original["saved"])
    assert loaded.state.variables.keys() == plan.variables.keys()
    np.testing.assert_array_equal(runs.forward(plan, loaded.state), original["outputs"])
    _, losses = runs.train(loaded.state, *loader, first=1, count=1)
    if model == "mixed":
        # Each device has statistics of its own rows and random numbers of its own, or all have them in common.
        assert np.isfinite(losses).all()
    else:
        np.testing.assert_allclose(losses, original["losses"], rtol=1e-6)


@pytest.mark.slow
def test_mixed_models_go_on_bitwise_as_they_were(chained: Callable[[runs.Case], dict[str, Any]]) -> None:
    for case in KINDS["mixed"][3:5]:
        original = chained(case)
        loaded = load_checkpoint(original["path"], runs.plan_of(*case), runs.OPTIMIZER)
        assert runs.train(loaded.state, *case, first=1, count=1)[1] == original["losses"]


def test_all_engines_and_strategies_are_in_the_chain() -> None:
    for cases in KINDS.values():
        assert {case.strategy for case in cases} == {*runs.STRATEGIES, "hsdp", "hfsdp"}
        assert {case.engine for case in cases} == {"shard_map", "pjit"}
        for before, after in zip([cases[-1], *cases], cases, strict=False):
            assert before.engine != after.engine
            assert before.strategy != after.strategy
