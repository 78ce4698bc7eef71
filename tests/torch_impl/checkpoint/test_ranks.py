"""Checkpoints of sharded runs on several ranks: what is written, by whom, and failing together."""

from __future__ import annotations

import errno
import os
from itertools import pairwise

import numpy as np
import pytest

from bridge.core.sharding import plan_layout, row_boxes
from tests.support.torch_impl import checkpoint_jobs as jobs

SHARDED = ("optim", "optim_grads", "optim_grads_params")


@pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 4])
def test_stored_chunks_are_the_row_boxes_of_the_layout_and_none_for_empty_shards(ranks, tmp_path, world):
    layout = plan_layout(jobs.ZOO, world)
    for strategy in SHARDED:
        chunks = ranks.run(world, jobs.stored_rows, "zoo", strategy, str(tmp_path / strategy))[0]
        for name, shape in jobs.ZOO.items():
            bounds = layout.row_bounds(name)
            boxes = [box for k in range(world) for box in row_boxes(shape, bounds[k], bounds[k + 1])]
            expected = sorted((*box.offsets, *box.sizes) for box in boxes) or [(0, 0, 0, *shape)]
            for prefix, suffix in (
                ("model.", ""),
                ("optimizer.state.", ".exp_avg"),
                ("optimizer.state.", ".exp_avg_sq"),
            ):
                assert chunks[f"{prefix}{name}{suffix}"] == expected, (name, strategy)
            assert chunks[f"optimizer.state.{name}.step"] == [()]
    if world == 4:
        assert any(len(boxes) > world for boxes in chunks.values()), (
            "expected several boxes of a stack on a rank"
        )
        assert any(a == b for name in jobs.ZOO for a, b in pairwise(layout.row_bounds(name))), (
            "expected empty shards"
        )


def test_a_replicated_run_is_written_once_and_by_all_ranks_together(ranks, tmp_path):
    chunks = ranks.run(3, jobs.stored_rows, "decoder", "no_shard", str(tmp_path / "a"))[0]
    assert all(len(boxes) <= 1 for boxes in chunks.values())
    alone = sum(ranks.run(1, jobs.bytes_written, "no_shard", str(tmp_path / "one"))[0].values())
    together = ranks.run(3, jobs.bytes_written, "no_shard", str(tmp_path / "three"))[0]
    assert len(together) == 3
    assert sum(together.values()) == pytest.approx(alone, rel=0.05)
    assert max(together.values()) < 0.6 * alone


@pytest.mark.fast_cases("no_shard-1")
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("strategy", jobs.STRATEGIES)
def test_saving_before_the_first_step_changes_nothing_and_loads_as_zero_moments(
    ranks, tmp_path, strategy, world
):
    path = str(tmp_path / "a")
    for before, after, loaded, losses, untouched in ranks.run(
        world, jobs.save_before_any_step, strategy, path
    ):
        assert losses == untouched
        for name, value in before.items():
            assert np.array_equal(after[name], value)
            assert np.array_equal(loaded[name], value)
        moments = [value for name, value in loaded.items() if name.startswith("optimizer.")]
        assert len(moments) == 3 * len(before)
        assert not any(value.any() for value in moments)


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", jobs.STRATEGIES)
@pytest.mark.parametrize("world", [3, 4])
def test_a_rank_that_holds_no_row_of_a_unit_joins_the_refresh_after_a_load(ranks, tmp_path, strategy, world):
    path = str(tmp_path / "a")
    results = ranks.run(world, jobs.forward_after_load_where_ranks_hold_nothing, strategy, path, timeout=60)
    assert results == [[2.0, 3.0]] * world


def test_gathered_weights_do_not_get_into_a_checkpoint_nor_shield_a_model_from_a_load(ranks, tmp_path):
    for before, loaded in ranks.run(2, jobs.save_while_unsharded, str(tmp_path / "a")):
        assert loaded.keys() == before.keys()
        assert all(np.array_equal(loaded[name], before[name]) for name in before)


def test_hyperparameters_follow_the_parameters_into_groups_of_another_order(ranks, tmp_path):
    for saved, loaded in ranks.run(2, jobs.two_groups, str(tmp_path / "a")):
        assert loaded == saved[::-1]
        assert [group["lr"] for group in loaded] == [0.125, 0.5]
        assert [group["weight_decay"] for group in loaded] == [0.25, 0.01]


def test_an_existing_destination_is_refused_by_all_ranks_with_one_error(ranks, tmp_path):
    (tmp_path / "a").mkdir()
    errors = ranks.run(3, jobs.save_onto_existing, str(tmp_path / "a"))
    assert len(set(errors)) == 1
    assert errors[0][0] == "FileExistsError"
    assert f"{tmp_path / 'a'} exists already" in errors[0][1]
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(tmp_path / "a") == []


@pytest.mark.fast_cases("write-1", "commit-0")
@pytest.mark.parametrize(("where", "rank"), [("write", 1), ("write", 0), ("plan", 2), ("commit", 0)])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(ranks, tmp_path, where, rank):
    results = ranks.run(3, jobs.failing_save, str(tmp_path / "a"), where, rank)
    for error_name, text, left in results:
        assert error_name == "CheckpointError"
        assert f"rank {rank}" in text
        assert os.strerror(errno.ENOSPC) in text
        assert left == []
    assert len({text for _, text, _ in results}) == 1
    assert os.listdir(tmp_path) == ["a-again"]


def test_train_state_that_one_rank_cannot_save_is_an_error_on_all_and_nothing_is_written(ranks, tmp_path):
    for error_name, text in ranks.run(2, jobs.save_of_unequal_train_state, str(tmp_path / "a")):
        assert error_name == "ValueError"
        assert "rank 1 of 2" in text
        assert "train.step: expected an int" in text
    assert os.listdir(tmp_path) == []


def test_a_load_that_fails_on_one_rank_fails_on_all_and_changes_nothing(ranks, tmp_path):
    path = str(tmp_path / "a")
    ranks.run(2, jobs.save_only, "decoder", "optim", path)
    for error_name, text, unchanged, loss in ranks.run(3, jobs.failing_load, path, "read", 1):
        assert error_name == "CheckpointError"
        assert "rank 1 of 3" in text
        assert os.strerror(errno.ENOSPC) in text
        assert unchanged
        assert np.isfinite(loss)


def test_a_truncated_file_fails_on_all_ranks_and_changes_nothing(ranks, tmp_path):
    path = tmp_path / "a"
    ranks.run(3, jobs.save_only, "decoder", "optim_grads_params", str(path))
    file = path / "__1_0.distcp"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    for error_name, text, unchanged, _ in ranks.run(2, jobs.failing_load, str(path), "read", -1):
        assert error_name == "CheckpointError"
        assert "__1_0.distcp is truncated" in text
        assert unchanged


def test_a_missing_directory_is_one_error_on_all_ranks(ranks, tmp_path):
    for error_name, text, unchanged, _ in ranks.run(
        2, jobs.failing_load, str(tmp_path / "missing"), "read", -1
    ):
        assert (error_name, unchanged) == ("FileNotFoundError", True)
        assert "does not exist: expected a checkpoint there" in text


def test_the_checkpoint_of_another_model_is_refused_with_the_names_that_differ(ranks, tmp_path):
    path = str(tmp_path / "a")
    ranks.run(2, jobs.save_only, "decoder", "no_shard", path)
    for error_name, text, unchanged in ranks.run(2, jobs.load_of_other_model, path):
        assert (error_name, unchanged) == ("CheckpointError", True)
        assert "25 missing: model.hollow, model.kernel" in text
        assert "unexpected: model.embed.weight, model.layers.0." in text
        assert "another model?" in text


@pytest.mark.parametrize("strategy", jobs.STRATEGIES)
def test_stock_save_and_load_keep_tensors_without_elements(ranks, tmp_path, strategy):
    for world in (1, 3):
        path = str(tmp_path / f"{world}")
        assert ranks.run(world, jobs.plain_round_trip, strategy, path) == [[(0, 0, 0, 3, 0, 2)]] * world


@pytest.mark.parametrize("strategy", jobs.STRATEGIES)
def test_a_save_finds_its_rows_without_communicating_tensors(ranks, tmp_path, strategy):
    counts = ranks.run(3, jobs.collectives_of_a_save, strategy, str(tmp_path / "a"))
    assert counts == [{"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}] * 3
