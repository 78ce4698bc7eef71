"""Saved on N devices under one strategy, loaded on M under another: the run goes on as if never interrupted."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_impl import load_checkpoint, save_checkpoint
from tests.jax_impl import checkpoint_runs as runs

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
            state, _ = runs.train(runs.fresh(devices, strategy), devices, strategy, 0, 2)
            saved, logits = runs.logical(plan, state), runs.forward(plan, state)
            with pytest.MonkeyPatch.context() as patch:
                # Chunks of a few rows: some inside one device's shard, some over two or three.
                patch.setattr("bridge.formats.orbax_writer._CHUNK", 300)
                save_checkpoint(path, plan, state, TRAIN)
            state, losses = runs.train(state, devices, strategy, 2, 2)
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
    state, losses = runs.train(loaded.state, devices, strategy, 2, 2)
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


@pytest.mark.parametrize(("saver", "saved_as", "loader", "loaded_as"), CASES)
def test_a_run_continues_on_other_devices_under_another_strategy(
    originals: dict[Any, dict[str, Any]], saver: int, saved_as: str, loader: int, loaded_as: str
) -> None:
    original = originals[saver, saved_as]
    _continue(original["path"], loader, loaded_as, original, bitwise=(saver, saved_as) == (loader, loaded_as))


@pytest.mark.parametrize("strategy", runs.STRATEGIES)
@pytest.mark.parametrize("devices", COUNTS)
def test_a_run_continues_bitwise_on_as_many_devices_under_its_own_strategy(
    originals: dict[Any, dict[str, Any]], devices: int, strategy: str
) -> None:
    original = originals[devices, strategy]
    _continue(original["path"], devices, strategy, original, bitwise=True)
