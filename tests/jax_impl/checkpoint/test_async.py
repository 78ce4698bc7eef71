"""Asynchronous saves: the files of a synchronous one, of the state as it was, and errors that reach every process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError
from bridge.core.formats.orbax.writer import OrbaxPart
from bridge.core.formats.saving import pending
from jax_impl import load_checkpoint, save_checkpoint, save_checkpoint_async
from jax_impl.checkpoint.contents import Contents
from tests.support.jax_impl import async_jobs as jobs
from tests.support.jax_impl import checkpoint_runs as runs
from tests.support.jax_impl.process_job import Group, small_chunks


@pytest.fixture(autouse=True)
def _nothing_pending() -> Iterator[None]:
    yield
    pending.start(Path("none"), lambda: None).wait()


@pytest.fixture(scope="module")
def group() -> Iterator[Group]:
    with Group(2, 1) as group:
        yield group


def assert_same_files(now: Path, later: Path) -> None:
    """All but times of day and random numbers of tensorstore, in which two synchronous saves differ as well."""
    (files, sizes, rest), (files_later, sizes_later, rest_later) = _content(now), _content(later)
    assert (files, rest) == (files_later, rest_later)
    # Random names are compressed, so two saves differ by some bytes.
    assert sizes == pytest.approx(sizes_later, abs=64)
    assert verify(now).good
    assert verify(later).good


def _content(path: Path) -> tuple[dict[str, bytes], list[int], list[Any]]:
    """Files; sizes of those that have random numbers; what is left of those that have times, and every checksum."""
    files = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    times = json.loads(files.pop("_CHECKPOINT_METADATA").read_bytes())
    manifest = json.loads(files.pop("twinshard_manifest.json").read_bytes())
    random = {name for name in files if "d/" in name or name.endswith("manifest.ocdbt")}
    return (
        {name: file.read_bytes() for name, file in files.items() if name not in random},
        sorted(files[name].stat().st_size for name in random),
        [
            {name: value for name, value in times.items() if "timestamp" not in name},
            manifest["tensors"],
            manifest["objects"],
        ],
    )


CASES = [
    (2,),
    (2, "no_shard"),
    (2, "optim_grads_params", "shard_map", "mixed"),
    pytest.param((4, "optim_grads_params", "shard_map", "stacked"), marks=pytest.mark.slow),
    pytest.param((2, "optim_grads_params", "pjit"), marks=pytest.mark.slow),
    pytest.param(((2, 2), "hfsdp"), marks=pytest.mark.slow),
]


@pytest.mark.fast_cases("(2,)", "(2, 'no_shard')")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_asynchronous_save_writes_the_files_of_a_synchronous_one_while_steps_go_on(
    tmp_path: Path, case: tuple
) -> None:
    plan, state = runs.plan_of(*case), runs.fresh(*case)
    state, _ = runs.train(state, *case, first=0, count=1)
    train, objects = {"step": 1, "sha": np.arange(4, dtype=np.uint8)}, {("note",): ["a", 1]}
    with small_chunks():
        save_checkpoint(tmp_path / "now" / "1", plan, state, train, objects=objects)
        with jobs.held_back() as release:
            save = save_checkpoint_async(tmp_path / "later" / "1", plan, state, train, objects=objects)
            # Steps donate the state, and the caller's own values change.
            state, _ = runs.train(state, *case, first=1, count=2)
            train["sha"][:] = 9
            objects["note",].append(2)
            assert not save.done()
            assert not (tmp_path / "later" / "1").exists()
            release()
            save.wait()
    assert_same_files(tmp_path / "now" / "1", tmp_path / "later" / "1")
    now, later = (load_checkpoint(tmp_path / name, plan, runs.OPTIMIZER).state for name in ("now", "later"))
    assert np.array_equal(runs.forward(plan, now), runs.forward(plan, later))
    steps = [runs.train(loaded, *case, first=1, count=1) for loaded in (now, later)]
    assert steps[0][1] == steps[1][1]
    runs.assert_same_bits(runs.logical(plan, steps[0][0]), runs.logical(plan, steps[1][0]))


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_the_copy_is_of_the_rows_that_a_process_writes_and_shares_no_memory(strategy: str) -> None:
    plan, state = runs.plan_of(2, strategy), runs.fresh(2, strategy)
    contents = Contents.of(plan, state)
    copies = contents.on_host(first=True)
    # Each element once, however many devices have it; padding is up to a shard's alignment.
    elements = sum(array.nbytes for array in jax.tree.leaves(state))
    assert runs.host_bytes(copies) == elements
    for name, by_key in copies.arrays.items():
        for key, copy in by_key.items():
            live = contents.arrays[name][key]
            for shard in live.addressable_shards:  # type: ignore[union-attr]  # not a copy
                for held in copy.shards:  # type: ignore[union-attr]  # a copy
                    assert held.data.flags.owndata
                    assert not np.shares_memory(held.data, np.asarray(shard.data))
    # Other processes copy none of what all have.
    assert runs.host_bytes(copies) - runs.host_bytes(contents.on_host(first=False)) >= 0


def test_a_full_disk_is_raised_by_wait_or_by_the_next_save_with_path_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, state = runs.plan_of(2), runs.fresh(2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "1.tmp-0" / "d" / "0"))

    with monkeypatch.context() as patch:
        patch.setattr(OrbaxPart, "write", full)
        save = save_checkpoint_async(tmp_path / "1", plan, state)
        with pytest.raises(OSError, match=r"No space left on device: .*1\.tmp-0"):
            save.wait()
        save_checkpoint_async(tmp_path / "2", plan, state)
        with pytest.raises(CheckpointError, match=r"asynchronous save of .*2 failed: OSError.*No space"):
            save_checkpoint(tmp_path / "3", plan, state)
    assert list(tmp_path.iterdir()) == []
    save_checkpoint_async(tmp_path / "4", plan, state).wait()
    assert verify(tmp_path / "4").good


def test_what_cannot_be_saved_is_an_error_at_once(tmp_path: Path) -> None:
    plan, state = runs.plan_of(2), runs.fresh(2)
    with pytest.raises(ValueError, match="train/note"):
        save_checkpoint_async(tmp_path / "1", plan, state, {"note": "text"})
    (tmp_path / "2").mkdir()
    with pytest.raises(FileExistsError):
        save_checkpoint_async(tmp_path / "2", plan, state)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    plan, state = runs.plan_of(2), runs.fresh(2)
    with jobs.held_back() as release:
        first = save_checkpoint_async(tmp_path / "1", plan, state)
        threading.Timer(0.3, release).start()
        second = save_checkpoint_async(tmp_path / "2", plan, state)
        assert first.done()
        assert (tmp_path / "1").is_dir()
        second.wait()


def test_two_processes_write_the_files_of_a_synchronous_save_while_steps_go_on(
    group: Group, tmp_path: Path
) -> None:
    answers = group.run(jobs.save_both_ways, path=str(tmp_path))
    assert answers[0] == answers[1]
    assert answers[0]["done"] is False
    assert_same_files(tmp_path / "now" / "1", tmp_path / "later" / "1")
    state = load_checkpoint(tmp_path / "later", runs.plan_of(2), runs.OPTIMIZER).state
    state, losses = runs.train(state, 2, first=1, count=3)
    np.testing.assert_allclose(losses[-1:], answers[0]["losses"], rtol=1e-5)


def test_an_error_in_the_background_is_raised_on_all_processes(group: Group, tmp_path: Path) -> None:
    answers = group.run(jobs.fail, path=str(tmp_path / "run"), process=1)
    for answer in answers:
        assert "No space left on device" in answer["wait"]
        assert "the asynchronous save of" in answer["next"]
        assert str(tmp_path / "run" / "2") in answer["next"]
        assert (answer["left"], answer["steps"]) == ([], [4])
    assert "process 1: OSError" in answers[0]["wait"]


def test_two_processes_go_on_from_the_latest_step(group: Group, tmp_path: Path) -> None:
    whole = group.run(jobs.managed_run, path=str(tmp_path / "a"), first=0, last=5)[0]
    first = group.run(jobs.managed_run, path=str(tmp_path / "b"), first=0, last=3)[0]
    rest = group.run(jobs.managed_run, path=str(tmp_path / "b"), first=3, last=5)
    assert first["losses"] + rest[0]["losses"] == whole["losses"]
    assert [(answer["steps"], answer["best"]) for answer in rest] == [([1, 4, 5], 1)] * 2
