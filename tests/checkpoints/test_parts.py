"""Conversions in parts: what single-process conversions give, for stock readers too; one of two runs of a part wins."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors import safe_open

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.convert.plan import ConvertOptions
from bridge.checkpoints.ground.outputs import Output
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.jobs import array_jobs as parts_module
from bridge.checkpoints.jobs import pieces
from bridge.checkpoints.jobs.array_jobs import PartReport, commit_parts, convert_part
from bridge.checkpoints.jobs.pieces import ConversionPiece, PartPlan, estimate_parts, make_part_plan
from bridge.checkpoints.jobs.stage import Stage, stages_at
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.files import journal
from bridge.core.formats.orbax.zarr import chunks
from bridge.core.formats.tensors.base import Box, CheckpointError
from bridge.core.formats.whole.replaceable import require_replaceable
from bridge.core.mapping.language.relation import identity
from bridge.core.mapping.plan.plan import PlannedTensor
from tests.support.bridge.bits import same_bits
from tests.support.bridge.dcp_files import array_of, stock_load_all
from tests.support.bridge.decoder_trees import dcp_arrays
from tests.support.bridge.orbax_helpers import leaves, stock_restore_v0

FORMATS = ("dcp", "orbax", "safetensors")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and pieces in a tensor of the decoder, the largest of which have 480 bytes."""
    monkeypatch.setattr("bridge.core.formats.tensors.boxes.CHUNK_BYTES", 160)
    monkeypatch.setattr(chunks, "_CHUNK", 96)
    monkeypatch.setattr(chunks, "_MAX_CHUNK", 160)
    monkeypatch.setattr(pieces, "PIECE_BYTES", 320)
    monkeypatch.setattr(pieces, "_SMALLEST_PIECE", 160)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts") / "source"
    with create_checkpoint(path, "dcp") as writer:
        arrays = dcp_arrays()
        for name, array in arrays.items():
            writer.add_tensor((name,), array.shape, array.dtype)
        writer.add_object(("train.note",), "a text")
        for name, array in arrays.items():
            for box in writer.chunks(name):
                writer.write(name, box, array[box.slices()])
    return path


def in_parts(
    source: Path, destination: Path, options: ConvertOptions, count: int, **more: Any
) -> list[PartReport]:
    """All parts, in any order."""
    numbers = list(range(1, count + 1))
    random.Random(count).shuffle(numbers)
    return [convert_part(source, destination, options, number, count, **more) for number in numbers]


def stock_values(path: Path, format: str, scratch: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor as the format's own library reads it."""
    if format == "safetensors":
        index = path / "model.safetensors.index.json"
        files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else None
        for file in files or ["model.safetensors"]:
            with safe_open(path / file, "np") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    yield name, opened.get_tensor(name)
    elif format == "dcp":
        for key, value in leaves(stock_load_all(path, scratch)):
            if hasattr(value, "numpy"):
                yield ".".join(map(str, key)), array_of(value)
    else:
        for key, value in leaves(stock_restore_v0(path)):
            if isinstance(value, np.ndarray | jax.Array):
                yield "/".join(map(str, key)), np.asarray(value)


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "mapped": {"mapping": "decoder", "axes": {"d": 5}},
    "cast, selected": {
        "casts": ("*=bfloat16",),
        "selection": Selection(drop=("*.step", "*attention.wk*")),
    },
}


# Each format and each choice once in the fast tier.
FAST = {("dcp", "as it is"), ("orbax", "mapped"), ("safetensors", "cast, selected")}


@pytest.mark.parametrize(
    ("format", "name"),
    [
        pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow)
        for pair in itertools.product(FORMATS, OPTIONS)
    ],
)
def test_parts_are_what_one_process_writes(format: str, name: str, source: Path, tmp_path: Path) -> None:
    options = ConvertOptions(to=format, **OPTIONS[name])
    if format != "orbax" and name == "mapped":
        options = ConvertOptions(to=format, into="jax", **OPTIONS[name])
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    reports = in_parts(source, parts, options, 3)
    assert [report.committed for report in reports] == [False, False, True]
    assert all(report.pieces > 1 for report in reports)
    fields = ("to", "mapping", "into", "axes", "selection", "casts")
    convert(source, whole, **{field: getattr(options, field) for field in fields})
    assert diff(whole, parts).max_ulp == 0
    assert verify(parts).good
    from_parts = dict(stock_values(parts, format, tmp_path / "found.pt"))
    expected = dict(stock_values(whole, format, tmp_path / "expected.pt"))
    assert from_parts.keys() == expected.keys()
    assert len(from_parts) > 50
    assert all(same_bits(from_parts[n], expected[n]) for n in expected)
    with open_checkpoint(parts) as reader, open_checkpoint(whole) as other:
        assert {n: reader.objects[n] for n in reader.objects} == {n: other.objects[n] for n in other.objects}
    # Nothing else is left, and files are the parts' own.
    assert sorted(os.listdir(tmp_path))[-2:] == ["parts", "whole"]
    names = {path.relative_to(parts).parts[0] for path in parts.rglob("*")}
    own = {
        "dcp": {"__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata"},
        "orbax": {"ocdbt.process_1", "ocdbt.process_2", "ocdbt.process_3", "manifest.ocdbt"},
        "safetensors": {f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)},
    }
    assert own[format] <= names
    assert not any("part" in name for name in names)
    require_replaceable(parts)


@pytest.mark.parametrize("format", FORMATS)
def test_more_parts_than_pieces(format: str, tmp_path: Path) -> None:
    """Parts without pieces are complete, too; a checkpoint of objects and empty tensors alone is one."""
    with create_checkpoint(tmp_path / "a", "dcp") as writer:
        writer.add_tensor(("none",), (0, 3), np.dtype(np.float32))
        writer.add_tensor(("one",), (), np.dtype(np.float32))
        writer.write("one", Box.whole(()), np.asarray(7, np.float32))
        writer.add_object(("note",), [1, None, "x"])
    in_parts(tmp_path / "a", tmp_path / "b", ConvertOptions(to=format), 5)
    assert verify(tmp_path / "b").good
    assert diff(tmp_path / "a", tmp_path / "b").max_ulp == 0
    with open_checkpoint(tmp_path / "b") as reader:
        assert set(reader.tensors) == {"none", "one"}
        assert reader.objects["note"] == [1, None, "x"]


def test_the_plan_is_a_list_of_pieces_that_covers_everything_once(source: Path) -> None:
    with parts_module.planned(source, ConvertOptions(to="orbax")) as (conversion, _):
        for count in (1, 2, 7, 1000):
            plan = make_part_plan("orbax", conversion.outputs, count)
            assert PartPlan.from_json(plan.to_json()) == plan
            assert sum(plan.sizes) == conversion.nbytes
            assert plan.parts[0]
            chunks: dict[str, list[range]] = {}
            for part in plan.parts:
                for piece in part:
                    chunks.setdefault(piece.tensor, []).append(range(piece.first, piece.stop))
            assert chunks.keys() == conversion.outputs.keys()
            for name, runs in chunks.items():
                covered = [number for run in runs for number in run]
                output = conversion.outputs[name]
                assert covered == list(range(pieces.chunk_count("orbax", output.shape, output.dtype)))
            if count <= 7:
                assert max(plan.sizes) <= conversion.nbytes / count + 2 * 320
        parted = [name for part in plan.parts for name in {piece.tensor for piece in part}]
        assert len(parted) > len(set(parted)) + 5, "no tensor is in two parts"
        with pytest.raises(CheckpointError, match="expected 1 to 100000 parts, got 0"):
            make_part_plan("orbax", conversion.outputs, 0)


def test_what_a_part_costs_follows_from_its_pieces() -> None:
    outputs = {}
    for name, dtype in (("same", "float32"), ("cast", "float16"), ("known", "float32")):
        content = np.zeros(250) if name == "known" else identity(name, (1000,), np.dtype(np.float32))
        outputs[name] = Output(PlannedTensor(name, (name,), content), np.dtype(dtype))
    same, cast, known = (
        ConversionPiece(*piece)
        for piece in (("same", 0, 1, 4000), ("cast", 0, 1, 2000), ("known", 0, 1, 1000))
    )
    plan = PartPlan(((same, cast), (known,), (same,), ()))
    mixed, made, plain, empty = estimate_parts(plan, outputs, workers=2, bandwidth=2.0)
    assert vars(mixed) == pytest.approx(
        {
            **{"part": 1, "pieces": 2, "bytes": 6000, "read_bytes": 8000, "rearranged_bytes": 2000},
            **{"memory": 2 * (64 << 20), "cache": 4000, "cpu_seconds": 5.1e-6, "transfer_seconds": 4e-6},
            **{"seconds": 5.1e-6, "rate": 14000 / 5.1e-6, "limit": "cores"},
        }
    )
    assert (made.part, made.read_bytes, made.rearranged_bytes, made.limit) == (2, 0, 1000, "cores")
    assert (plain.rearranged_bytes, plain.cache, plain.cpu_seconds) == (0, 0, pytest.approx(1.6e-6))
    assert (plain.transfer_seconds, plain.seconds, plain.limit) == (2e-6, 2e-6, "storage")
    assert (empty.seconds, empty.rate, empty.limit) == (0.0, 0.0, "nothing to do")
    with pytest.raises(ValueError, match="expected a bandwidth above 0 GB/s, got 0"):
        estimate_parts(plan, outputs, workers=2, bandwidth=0)


def test_the_names_of_a_stage_do_not_depend_on_the_order_of_its_key() -> None:
    key = {"source": "/a", "plan": "0123", "parts": "3"}
    for entries in (key, dict(reversed(key.items()))):
        stage = Stage(Path("/data/b"), entries)
        assert (str(stage.path), stage.conversion) == ("/data/b.tmp-561b2322", "20f7c0759f09cb0c")


def test_a_commit_says_which_parts_are_missing_and_what_differs(source: Path, tmp_path: Path) -> None:
    destination, options = tmp_path / "b", ConvertOptions(to="dcp")
    with pytest.raises(CheckpointError, match=r"no parts of this conversion to .*found none"):
        commit_parts(source, destination, options)
    convert_part(source, destination, options, 2, 3, commit=False)
    other = ConvertOptions(to="dcp", casts=("*=bfloat16",))
    with pytest.raises(CheckpointError, match=r"no parts of this conversion.*plan: expected \w+, found \w+"):
        commit_parts(source, destination, other)
    convert_part(source, destination, other, 1, 3, commit=False)
    with pytest.raises(
        CheckpointError, match=r"expected 3 complete parts, found 1: missing are parts 1, 3 of 3; run those"
    ):
        commit_parts(source, destination, options)
    # Parts of another number do not count.
    convert_part(source, destination, options, 1, 2)
    convert_part(source, destination, options, 1, 3, commit=False)
    report = convert_part(source, destination, options, 3, 3, commit=False)
    assert (report.missing, report.committed) == ((), False)
    assert not destination.exists()
    whole = commit_parts(source, destination, options)
    assert (whole.tensors, whole.bytes) == (len(dcp_arrays()), sum(a.nbytes for a in dcp_arrays().values()))
    assert verify(destination).good
    # A job that is queued again finds its work done, and so does a second commit.
    again = convert_part(source, destination, options, 3, 3)
    assert (again.committed, again.found) == (True, True)
    assert commit_parts(source, destination, options).bytes == whole.bytes
    with pytest.raises(FileExistsError, match="exists already"):
        convert_part(source, destination, other, 2, 3)
    # The rest of the other attempts goes with the commit, as it does after whole conversions.
    assert stages_at(destination) == {}


def test_a_changed_source_has_parts_of_its_own(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "a")
    options = ConvertOptions(to="safetensors")
    convert_part(copy, tmp_path / "b", options, 1, 2)
    os.utime(copy / "__0_0.distcp")
    report = convert_part(copy, tmp_path / "b", options, 2, 2)
    assert report.missing == (1,)
    with pytest.raises(CheckpointError, match="missing is part 1 of 2"):
        commit_parts(copy, tmp_path / "b", options)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("format", ["dcp", pytest.param("orbax", marks=pytest.mark.slow), "safetensors"])
def test_two_runs_of_one_part_at_once(
    format: str, resume: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first has written everything, the second begins and finishes; the first finds that out."""
    destination, options = tmp_path / "b", ConvertOptions(to=format)
    convert_part(source, destination, options, 1, 2)
    real, inside = parts_module.require_unchanged, []

    def second_run(conversion: Any) -> None:
        real(conversion)
        if not inside:
            inside.append(None)
            if resume:
                # Only one can go on with a journal.
                with pytest.raises(journal.InUse, match="is being written by another process"):
                    convert_part(source, destination, options, 2, 2, resume=True)
            inside.append(convert_part(source, destination, options, 2, 2))

    monkeypatch.setattr(parts_module, "require_unchanged", second_run)
    first = convert_part(source, destination, options, 2, 2, resume=resume)
    second = inside[1]
    assert isinstance(second, PartReport)
    assert (second.found, second.committed) == (False, True)
    assert (first.found, first.committed) == (True, True)
    assert verify(destination).good
    assert diff(source, destination).max_ulp == 0
    assert os.listdir(tmp_path) == ["b"]


def test_two_that_commit_at_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first, and says that the destination is there."""
    destination, options = tmp_path / "b", ConvertOptions(to="orbax")
    convert_part(source, destination, options, 1, 1, commit=False)
    real, waited = parts_module.join_parts, []

    def held(*arguments: Any) -> None:
        lock = journal.resume(destination, arguments[3].key)
        assert lock is not None

        def wait(seconds: float) -> None:
            waited.append(seconds)
            lock.close()

        monkeypatch.setattr(parts_module.time, "sleep", wait)
        monkeypatch.setattr(parts_module, "join_parts", real)
        real(*arguments)

    monkeypatch.setattr(parts_module, "join_parts", held)
    assert convert_part(source, destination, options, 1, 1).committed
    assert len(waited) == 1
    assert verify(destination).good


def test_replacing_keeps_the_old_one_until_all_parts_are_there(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "b"
    convert(source, destination, to="dcp", selection=Selection(select=("model.*",)))
    old = {path.name: path.read_bytes() for path in destination.iterdir()}
    options = ConvertOptions(to="safetensors")
    with pytest.raises(FileExistsError):
        convert_part(source, destination, options, 1, 2)
    convert_part(source, destination, options, 1, 2, replace=True)
    assert {path.name: path.read_bytes() for path in destination.iterdir()} == old
    assert convert_part(source, destination, options, 2, 2, replace=True).committed
    assert diff(source, destination).max_ulp == 0
    assert os.listdir(tmp_path) == ["b"]


def test_another_conversion_leaves_parts_in_work_alone(
    source: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    destination, options = tmp_path / "b", ConvertOptions(to="dcp")
    real, stages = parts_module.require_unchanged, []

    def another(conversion: Any) -> None:
        real(conversion)
        convert(source, destination, to="orbax")
        stages.extend(stages_at(destination))

    monkeypatch.setattr(parts_module, "require_unchanged", another)
    convert_part(source, destination, options, 1, 2, commit=False)
    assert len(stages) == 1
    # With nobody at work, the next one removes them.
    convert(source, destination, to="safetensors", replace=True)
    assert stages_at(destination) == {}


def test_what_cannot_be_done_in_parts_is_said(source: Path, tmp_path: Path) -> None:
    options = ConvertOptions()
    for destination, message in (
        ("memory://b", "is in an object store: expected a directory that all parts see"),
        (tmp_path / "b.safetensors", "is one file, which has one writer: expected a directory"),
    ):
        for call in (
            lambda d=destination: convert_part(source, d, options, 1, 2),
            lambda d=destination: commit_parts(source, d, options),
        ):
            with pytest.raises(CheckpointError, match=message):
                call()
    for part, count in ((0, 2), (3, 2), (-1, 1)):
        with pytest.raises(CheckpointError, match=f"expected a part from 1 to {count}, got {part}"):
            convert_part(source, tmp_path / "b", options, part, count)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_damaged_part_is_not_committed(format: str, source: Path, tmp_path: Path) -> None:
    """A part whose files were cut short or removed is named."""
    destination, options = tmp_path / "b", ConvertOptions(to=format)
    in_parts(source, destination, options, 2, commit=False)
    (folder,) = stages_at(destination)
    part = folder / "twinshard.parts" / "part_2"
    large = max((p for p in part.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    if format == "orbax":
        shutil.rmtree(part / "ocdbt.process_2")
    else:
        os.truncate(large, large.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"part_2"):
        commit_parts(source, destination, options)
    assert not destination.exists()
    shutil.rmtree(part)
    for stray in folder.glob("*_2*"):
        shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
    assert convert_part(source, destination, options, 2, 2).committed
    assert diff(source, destination).max_ulp == 0
