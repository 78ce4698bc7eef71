"""Asynchronous saves: the files of a synchronous one, of the state as it was, and errors that reach every rank."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.verify.verification import verify
from tests.support.torch_impl import async_jobs as jobs

CASES = [
    (2, "decoder", "optim_grads_params"),
    (2, "stock", "no_shard"),
    (1, "zoo", "optim"),
    pytest.param(3, "zoo", "optim_grads_params", marks=pytest.mark.slow),
    pytest.param(4, "decoder", "optim_grads", marks=pytest.mark.slow),
]


@pytest.mark.fast_cases("2-stock-no_shard", "1-zoo-optim")
@pytest.mark.parametrize(("world", "run_name", "strategy"), CASES)
def test_an_asynchronous_save_writes_the_files_of_a_synchronous_one_while_steps_go_on(
    ranks, tmp_path, world, run_name, strategy
):
    ranks.run(world, jobs.save_both_ways, run_name, strategy, str(tmp_path))
    now, later = tmp_path / "now" / "1", tmp_path / "later" / "1"
    names = sorted(path.name for path in now.iterdir())
    assert names == sorted(path.name for path in later.iterdir())
    assert [name for name in names if name.endswith(".distcp")]
    for name in names:
        if name not in (".metadata", "twinshard_manifest.json"):
            assert (now / name).read_bytes() == (later / name).read_bytes(), name
    # PyTorch gives every save an identity of its own.
    mine, theirs = (pickle.loads((path / ".metadata").read_bytes()) for path in (now, later))
    mine.storage_meta.save_id = theirs.storage_meta.save_id
    assert dataclasses.astuple(mine) == dataclasses.astuple(theirs)
    assert verify(now).good
    assert verify(later).good
    from_now, from_later = (
        ranks.run(2, jobs.resume, run_name, "optim_grads", str(path.parent), 1)[0] for path in (now, later)
    )
    assert from_now[:2] == from_later[:2]
    assert all(np.array_equal(from_now[2][name], from_later[2][name]) for name in from_now[2])


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_the_copy_is_of_the_rows_that_a_rank_writes_and_of_nothing_else(ranks, tmp_path, strategy):
    sizes = ranks.run(2, jobs.copied, "decoder", strategy, str(tmp_path / "a"))
    whole = sizes[0][2]
    # Every element on one rank, and evenly: of replicated tensors each rank has a share.
    assert sum(copied for copied, _, _ in sizes) == whole
    for copied, held, _ in sizes:
        assert held == copied
        assert copied <= 0.6 * whole


@pytest.mark.parametrize(("where", "rank"), [("write", 1), ("commit", 0)])
def test_an_error_in_the_background_is_raised_on_all_ranks_by_wait_or_the_next_save(
    ranks, tmp_path, where, rank
):
    runs = ranks.run(2, jobs.failing, where, rank, str(tmp_path / "run"))
    assert runs[0]["losses"] == runs[1]["losses"]
    for outcome in runs:
        assert f"rank {rank} of 2: OSError: [Errno 28] No space left on device" in outcome["wait"]
        if where == "write":
            assert str(tmp_path / "run" / "1") in outcome["wait"]
        assert "the asynchronous save of" in outcome["next"]
        assert str(tmp_path / "run" / "2") in outcome["next"]
        assert "No space left on device" in outcome["next"]
        assert (outcome["left"], outcome["after"]) == ([], ["4"])


def test_a_second_save_waits_for_the_first(ranks, tmp_path):
    assert ranks.run(2, jobs.second_save_waits, str(tmp_path / "run")) == [[True, True]] * 2


@pytest.mark.parametrize("world", [1, 2])
def test_a_process_group_that_is_destroyed_too_early_is_an_error_and_never_half_a_checkpoint(
    ranks, tmp_path, world
):
    errors = ranks.run(world, jobs.destroyed_too_early, str(tmp_path / "run"))
    if world == 1:
        # One rank has nobody to agree with.
        assert errors == [""]
        assert verify(tmp_path / "run" / "1").good
        return
    assert all("wait()" in error and "destroy_process_group" in error for error in errors), errors
    assert not (tmp_path / "run" / "1").exists()


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("flips")
    ranks.run(3, jobs.save_both_ways, "zoo", "optim_grads_params", str(path))
    return path / "later" / "1"


def test_any_flipped_byte_is_found(saved):
    report = verify(saved)
    assert report.good, report.problems
    assert report.manifest
    assert report.protected == report.bytes
    random = np.random.default_rng(0)
    files = [path for path in saved.iterdir() if path.stat().st_size]
    assert len(files) == 5
    for path in files:
        original = path.read_bytes()
        for position in random.integers(0, len(original), 25):
            data = bytearray(original)
            data[position] ^= 1 << int(random.integers(8))
            path.write_bytes(data)
            assert not verify(saved).good, (path.name, position)
        path.write_bytes(original)
    assert verify(saved).good
