"""Saved by N ranks under one strategy, loaded by M under another: the run goes on as if never interrupted."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.ranks import RankGroup
from tests.support.torch_impl import checkpoint_jobs as jobs
from torch_impl.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from torch_impl.models import Decoder, next_token_loss

WORLDS = (1, 2, 3, 4)
# Each pair of worlds takes one of the 16 pairs of strategies, so that all pairs of both kinds occur.
CASES = [
    (n, jobs.STRATEGIES[(n + m) % 4], m, jobs.STRATEGIES[(n + 2 * m) % 4]) for n, m in product(WORLDS, WORLDS)
]


@pytest.fixture(scope="module")
def originals(ranks: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, tuple[str, Any]]:
    """Path and results of each uninterrupted run, made when first asked for."""
    base = tmp_path_factory.mktemp("matrix")

    class Runs(dict):
        def __missing__(self, key: tuple[str, int, str]) -> tuple[str, Any]:
            model, world, strategy = key
            path = str(base / f"{model}-{world}-{strategy}")
            results = ranks.run(world, jobs.interrupted, model, strategy, path, {})
            self[key] = path, results[0]
            return self[key]

    return Runs()


def _assert_bitwise(state: jobs.State, expected: jobs.State) -> None:
    assert state.keys() == expected.keys()
    for name in expected:
        assert state[name].dtype == expected[name].dtype, name
        assert state[name].tobytes() == expected[name].tobytes(), name


def _assert_continues(result: dict[str, Any], original: dict[str, Any], bitwise: bool) -> None:
    _assert_bitwise(result["loaded"], original["saved"])
    if bitwise:
        assert result["losses"] == original["losses"]
        _assert_bitwise(result["final"], original["final"])
        return
    # Gradients are summed over the ranks in another order.
    np.testing.assert_allclose(result["losses"], original["losses"], rtol=1e-6)
    for name, expected in original["final"].items():
        scale = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(result["final"][name], expected, rtol=0, atol=2e-6 * scale, err_msg=name)


def test_all_pairs_of_worlds_and_all_pairs_of_strategies_are_tried():
    assert len({(n, m) for n, _, m, _ in CASES}) == 16
    assert len({(s, t) for _, s, _, t in CASES}) == 16


@pytest.mark.fast_cases("3-no_shard-1-optim", "4-optim_grads_params-3-optim_grads")
@pytest.mark.parametrize(("saver", "saved_as", "loader", "loaded_as"), CASES)
def test_a_decoder_continues_on_other_ranks_under_another_strategy(
    ranks, originals, saver, saved_as, loader, loaded_as
):
    path, original = originals["decoder", saver, saved_as]
    for result in ranks.run(loader, jobs.resumed, "decoder", loaded_as, path, {}):
        _assert_continues(result, original, bitwise=(saver, saved_as) == (loader, loaded_as))
        assert result["group"] == jobs.HYPERPARAMETERS
        assert result["train"]["step"] == 2
        assert result["train"]["sha"].tolist() == [0, 1, 2, 3]
        assert all(v == 4 for name, v in result["final"].items() if name.endswith(".step"))


@pytest.mark.fast_cases("2-optim")
@pytest.mark.parametrize("strategy", jobs.STRATEGIES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_run_continues_bitwise_on_as_many_ranks_under_its_own_strategy(ranks, originals, world, strategy):
    path, original = originals["decoder", world, strategy]
    for result in ranks.run(world, jobs.resumed, "decoder", strategy, path, {}):
        _assert_continues(result, original, bitwise=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_run_in_bfloat16_continues_bitwise_from_its_float32_main_weights(ranks, tmp_path, strategy):
    options = {"param_dtype": torch.bfloat16}
    original = ranks.run(3, jobs.interrupted, "decoder", strategy, str(tmp_path / "a"), options)[0]
    assert original["saved"]["model.embed.weight"].dtype == np.float32
    for result in ranks.run(3, jobs.resumed, "decoder", strategy, str(tmp_path / "a"), options):
        _assert_continues(result, original, bitwise=True)


@pytest.mark.fast_cases("3-4")
@pytest.mark.parametrize(("saver", "loader"), [(3, 4), (4, 3), (4, 1), (2, 2)])
def test_stacks_scalars_and_empty_tensors_continue_too(ranks, originals, saver, loader):
    saved_as, loaded_as = jobs.STRATEGIES[saver % 3 + 1], jobs.STRATEGIES[loader % 3 + 1]
    path, original = originals["zoo", saver, saved_as]
    assert original["saved"]["model.hollow"].shape == (3, 0, 2)
    for result in ranks.run(loader, jobs.resumed, "zoo", loaded_as, path, {}):
        _assert_continues(result, original, bitwise=saver == loader)


@pytest.mark.fast_cases("stock-stock")
@pytest.mark.parametrize(
    ("saver", "loader"), [("decoder", "stock"), ("stock", "decoder"), ("stock", "stock")]
)
def test_a_run_moves_between_main_weight_adamw_and_stock_adamw(ranks, originals, saver, loader):
    path, original = originals[saver, 3, "optim_grads_params"]
    for result in ranks.run(2, jobs.resumed, loader, "optim", path, {}):
        _assert_continues(result, original, bitwise=False)


def test_an_unsharded_module_without_a_process_group_continues_a_sharded_run_and_back(
    ranks, originals, tmp_path
):
    path, original = originals["decoder", 3, "optim"]
    model = Decoder(jobs.TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
    load_checkpoint(path, model, optimizer)
    save_checkpoint(tmp_path / "a", model, optimizer, {"step": 2, "sha": np.arange(4, dtype=np.uint8)})
    losses = []
    for index in (2, 3):
        tokens = torch.from_numpy(np.random.default_rng(index).integers(0, jobs.TINY.vocab_size, (12, 8)))
        loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    np.testing.assert_allclose(losses, original["losses"][1:], rtol=1e-6)
    for result in ranks.run(3, jobs.resumed, "decoder", "optim", str(tmp_path / "a"), {}):
        _assert_continues(result, original, bitwise=True)


def test_plain_dcp_load_sees_the_same_tensors(ranks, originals):
    path, original = originals["zoo", 4, "optim_grads"]
    shapes = {name: (value.shape, value.dtype.name) for name, value in original["saved"].items()}
    for world in (1, 2):
        for state in ranks.run(world, jobs.plain_load, path, shapes):
            _assert_bitwise(state, original["saved"])
    assert (Path(path) / "__3_0.distcp").exists()
