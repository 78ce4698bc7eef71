"""What a conversion can be asked for: a part, casts, a dry run, replacing, space."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from bridge.checkpoints.convert import engine
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.convert.plan import ConvertOptions, planned
from bridge.checkpoints.ground.selection import Selection
from bridge.commands.main import app
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.files.journal import Journal
from bridge.core.formats.files.manifest import MANIFEST_FILE, object_checksum, read_manifest
from bridge.core.formats.tensors.arrays import array_checksum
from bridge.core.formats.tensors.base import DTYPES, CheckpointError, TreePath
from tests.support.bridge.bits import random_bits, same_bits

F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)
SMALL_FLOATS = [d for d in DTYPES.values() if d.kind in "fV" and d.itemsize <= 2]


def values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


ARRAYS: dict[TreePath, np.ndarray] = {
    ("model", "w"): values((6, 4), 1),
    ("model", "b"): values((5,), 2),
    ("model", "half"): values((3,), 3).astype(ml_dtypes.bfloat16),
    ("model", "mask"): np.array([True, False]),
    ("optimizer", "state", "w", "exp_avg"): values((6, 4), 4),
    ("optimizer", "state", "w", "step"): np.asarray(7, np.float32),
    ("train", "seen"): np.asarray(99, np.int64),
}
OBJECTS: dict[TreePath, object] = {("optimizer", "param_groups", 0, "lr"): 0.1, ("note",): "x"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    with create_checkpoint(tmp_path / "source", "dcp") as writer:
        for path, array in ARRAYS.items():
            name = writer.add_tensor(path, array.shape, array.dtype).name
            for box in writer.chunks(name):
                writer.write(name, box, array[box.slices()])
        for path, value in OBJECTS.items():
            writer.add_object(path, value)
    return tmp_path / "source"


def contents(path: Path) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    with open_checkpoint(path) as reader:
        return {n: reader.read(n) for n in reader.tensors}, dict(reader.objects)


@pytest.mark.parametrize(
    ("selection", "kept"),
    [
        (Selection(("model.*",)), {"model.w", "model.b", "model.half", "model.mask"}),
        (Selection(("model.[wb]", "train.*")), {"model.w", "model.b", "train.seen"}),
        (
            Selection((), ("optimizer.*", "note")),
            {"model.w", "model.b", "model.half", "model.mask", "train.seen"},
        ),
        (Selection(("model.*",), ("*.half", "*.mask")), {"model.w", "model.b"}),
        (Selection(weights_only=True), {"model.w", "model.b", "model.half", "model.mask"}),
    ],
)
def test_a_part_is_converted_and_the_rest_is_named(
    tmp_path: Path, source: Path, selection: Selection, kept: set[str]
) -> None:
    report = convert(source, tmp_path / "out", to="dcp", selection=selection)
    tensors, objects = contents(tmp_path / "out")
    assert set(tensors) == kept
    names = {".".join(map(str, path)) for path in (*ARRAYS, *OBJECTS)}
    assert set(report.dropped) == names - kept - set(objects)
    assert not selection.weights_only or objects == {}


def test_patterns_that_match_nothing_and_selections_that_leave_nothing_are_refused(
    tmp_path: Path, source: Path
) -> None:
    for selection, message in (
        (Selection(("modle.*",)), r"--select modle\.\*: expected a pattern that matches a name, got one"),
        (Selection((), ("x",)), "--drop x: expected a pattern"),
        (Selection(("note",)), "none of 7 tensors is selected: expected at least one"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "out", selection=selection)
    assert not (tmp_path / "out").exists()


def test_weights_only_without_such_a_root_leaves_out_what_is_known_as_state(tmp_path: Path) -> None:
    names = (
        "layers.0.w",
        "optimizer.state.layers.0.w.exp_avg",
        "lr_scheduler.last_epoch",
        "train_state.step",
    )
    with create_checkpoint(tmp_path / "a", "dcp") as writer:
        for number, name in enumerate(names):
            writer.write(
                writer.add_tensor((name,), (2,), F32).name, writer.chunks(name)[0], values((2,), number)
            )
    convert(tmp_path / "a", tmp_path / "b", to="dcp", selection=Selection(weights_only=True))
    assert list(contents(tmp_path / "b")[0]) == ["layers.0.w"]


def test_weights_only_takes_batch_statistics_beside_the_parameters(tmp_path: Path) -> None:
    paths = (
        ("params", "bn", "scale"),
        ("batch_stats", "bn", "mean"),
        ("opt_state", "0", "mu", "bn", "scale"),
    )
    with create_checkpoint(tmp_path / "a", "orbax") as writer:
        names = [writer.add_tensor(path, (2,), F32).name for path in paths]
        for number, name in enumerate(names):
            writer.write(name, writer.chunks(name)[0], values((2,), number))
    convert(tmp_path / "a", tmp_path / "b", to="orbax", selection=Selection(weights_only=True))
    assert {*contents(tmp_path / "b")[0]} == {*names[:2]}


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_weights_only_takes_a_head_beside_the_module_that_a_flat_state_dict_calls_model(
    tmp_path: Path, form: Literal["dcp", "safetensors"]
) -> None:
    names = ("model.embed.weight", "lm_head.weight", "optimizer.state.lm_head.weight.exp_avg", "train.step")
    with create_checkpoint(tmp_path / "a", form) as writer:
        for name in names:
            writer.add_tensor((name,), (2,), F32)
        for number, name in enumerate(names):
            writer.write(name, writer.chunks(name)[0], values((2,), number))
    convert(tmp_path / "a", tmp_path / "b", to="dcp", selection=Selection(weights_only=True))
    assert {*contents(tmp_path / "b")[0]} == {"model.embed.weight", "lm_head.weight"}


def test_casts_round_what_they_name_and_nothing_else(tmp_path: Path, source: Path) -> None:
    report = convert(source, tmp_path / "out", casts=["model/*=bfloat16", "model/b=float16"])
    tensors, _ = contents(tmp_path / "out")
    assert same_bits(tensors["model/w"], ARRAYS["model", "w"].astype(ml_dtypes.bfloat16))
    assert same_bits(tensors["model/b"], ARRAYS["model", "b"].astype(np.float16))
    for name in ("model/half", "model/mask", "train/seen", "optimizer/state/w/exp_avg"):
        assert same_bits(tensors[name], ARRAYS[tuple(name.split("/"))])
    assert report.overflowed == {}


def test_a_cast_rounds_to_nearest_even_and_counts_what_overflows(tmp_path: Path) -> None:
    array = np.array(
        [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e30, -1e30, np.inf, np.nan, -0.0, 65519.9, 65520], np.float32
    )
    with create_checkpoint(tmp_path / "a", "dcp") as writer:
        writer.write(writer.add_tensor(("w",), array.shape, F32).name, writer.chunks("w")[0], array)
    convert(tmp_path / "a", tmp_path / "bf", casts=["w=bfloat16"])
    cast = contents(tmp_path / "bf")[0]["w"]
    assert cast[:3].tolist() == [1.0, 1.0, 1 + 2**-6]
    assert np.signbit(cast[7])
    report = convert(tmp_path / "a", tmp_path / "half", casts=["w=float16"])
    assert report.overflowed == {"w": 3}
    assert np.isinf(contents(tmp_path / "half")[0]["w"]).sum() == 4


@pytest.mark.parametrize("dtype", SMALL_FLOATS, ids=str)
def test_a_cast_from_float64_rounds_once(tmp_path: Path, dtype: np.dtype) -> None:
    # Between two neighbours there is a middle; a little beside it, float32 sees the middle itself.
    numbers = np.arange(256 ** min(dtype.itemsize, 2), dtype=f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):
        wide = numbers.astype(np.float64)
    values = np.unique(wide[np.isfinite(wide)])
    if dtype == ml_dtypes.float8_e8m0fnu:
        # ml_dtypes itself rounds denormal float32 up to powers of two.
        values = values[values >= np.finfo(np.float32).tiny]
    low, high = values[:-1], values[1:]
    middle = low + (high - low) / 2
    step = (high - low) * 2.0**-30
    array = np.concatenate([middle - step, middle + step])
    expected = np.concatenate([low, high])
    with create_checkpoint(tmp_path / "a", "dcp") as writer:
        writer.write(writer.add_tensor(("w",), array.shape, F64).name, writer.chunks("w")[0], array)
    convert(tmp_path / "a", tmp_path / "b", casts=[f"w={dtype.name}"])
    assert (contents(tmp_path / "b")[0]["w"].astype(np.float64) == expected).all()


@pytest.mark.parametrize(
    ("cast", "message"),
    [
        (
            "model/mask=float32",
            r"cast model/mask=float32: expected floating-point tensors .*, got dtypes bool",
        ),
        ("train/seen=int32", "got dtypes int64"),
        ("nothing=bfloat16", "got no tensor of 7, such as model/w"),
        ("model/w=float7", "expected a floating-point dtype .* or a complex one, got 'float7'; did you mean"),
        ("model/w", "expected a cast PATTERN=DTYPE"),
        ("=float16", "expected a cast PATTERN=DTYPE"),
    ],
)
def test_casts_that_cannot_be_are_refused_before_anything_is_written(
    tmp_path: Path, source: Path, cast: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out", casts=[cast])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(tmp_path: Path, source: Path) -> None:
    with planned(source, ConvertOptions(casts=["model/w=bfloat16"])) as (conversion, _):
        assert conversion.nbytes == sum(a.nbytes for a in ARRAYS.values()) - 48
        assert conversion.outputs["model/w"].sources == ("model.w",)
    arguments = [
        "convert",
        str(source),
        str(tmp_path / "out"),
        "--dry-run",
        "--cast",
        "model/w=bfloat16",
        "--drop",
        "note",
    ]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert "model/w" in shown.stdout
    assert "float32 -> bfloat16" in shown.stdout
    assert "left out 1: note" in shown.stdout
    document = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert {t["name"]: t["dtype"] for t in document["tensors"]}["model/w"] == "bfloat16"
    assert document["left_out"] == ["note"]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_replacing_takes_checkpoints_only_and_never_the_source(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "out", to="orbax")
    with pytest.raises(FileExistsError, match=r"choose another name, or replace it \(--replace\)"):
        convert(source, tmp_path / "out", to="orbax")
    convert(source, tmp_path / "out", to="dcp", replace=True)
    assert contents(tmp_path / "out")[1] == {".".join(map(str, p)): v for p, v in OBJECTS.items()}
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="home is not a checkpoint: expected one to replace"):
        convert(source, home, replace=True)
    assert (home / "letter.txt").read_text() == "dear"
    with pytest.raises(CheckpointError, match=r"is inside the source .*: expected a destination outside"):
        convert(source, source, to="dcp", replace=True)
    outer = tmp_path / "outer"
    convert(source, outer, to="dcp")
    convert(source, outer / "inner", to="dcp")
    with pytest.raises(
        CheckpointError,
        match=r"contains the source .*, and would be replaced: expected",
    ):
        convert(outer / "inner", outer, to="dcp", replace=True)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(CheckpointError, match="is a symbolic link: expected the directory or file itself"):
        convert(source, tmp_path / "link", to="dcp", replace=True)
    single = tmp_path / "one.safetensors"
    convert(source, single, to="safetensors")
    convert(source, single, to="safetensors", selection=Selection(weights_only=True), replace=True)
    assert set(contents(single)[0]) == {"model.w", "model.b", "model.half", "model.mask"}


def test_a_failed_replacement_keeps_the_old_one(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "out", to="orbax")
    before = contents(tmp_path / "out")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises((OSError, CheckpointError), match="No space left"):
        convert(source, tmp_path / "out", to="dcp", replace=True)
    monkeypatch.undo()
    after = contents(tmp_path / "out")
    assert all(same_bits(before[0][name], after[0][name]) for name in before[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_too_little_space_is_said_before_the_first_byte(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 100

    monkeypatch.setattr("bridge.checkpoints.convert.conversion.shutil.disk_usage", lambda _: Usage)
    with pytest.raises(
        CheckpointError,
        match=r"too little free space for .*out: expected 2.. bytes, found 100; free some",
    ):
        convert(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    with pytest.raises(CheckpointError, match=r"--weights-only\)$"):
        convert(source, tmp_path / "out", resume=True)
    (left,) = tmp_path.glob("out.tmp-*")
    with pytest.raises(CheckpointError, match=rf"killed attempts left {left}: resume"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("format", ["dcp", "orbax", "safetensors"])
def test_the_manifest_says_what_was_written(tmp_path: Path, source: Path, format: str) -> None:
    convert(source, tmp_path / "out", to=format)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    tensors, objects = contents(tmp_path / "out")
    assert manifest.format == format
    assert set(manifest.tensors) == set(tensors)
    for name, entry in manifest.tensors.items():
        assert (entry.dtype, entry.shape) == (tensors[name].dtype.name, tensors[name].shape)
        for box, crc in entry.chunks.items():
            assert crc == array_checksum(tensors[name][box.slices()])
    assert manifest.objects == {name: object_checksum(value) for name, value in objects.items()}
    files = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert set(manifest.files) == files - {MANIFEST_FILE}


def test_checksums_tell_values_apart() -> None:
    alike = [0, 0.0, False, None, "", "0", b"0", [], (), {}, [0], (0,), [[0]], {"0": 0}, {0: 0}, "None", -0.0]
    assert len({object_checksum(value) for value in alike}) == len(alike)
    array = random_bits((4, 6), F32, 1)
    assert array_checksum(array.T) == array_checksum(array.T.copy())
    assert array_checksum(array.T) != array_checksum(array)


@pytest.mark.parametrize("format", ["dcp", "orbax", "safetensors"])
def test_a_chunk_is_noted_only_when_it_is_on_disk(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    """A power cut may lose what was written and not synced; the journal must not speak of it."""
    events: list[str] = []
    monkeypatch.setattr("bridge.core.formats.files.record.SYNC_BYTES", 1)
    monkeypatch.setattr(os, "fdatasync", lambda _: events.append("synced"))
    monkeypatch.setattr(Journal, "record", lambda self, entries: events.extend("noted" for _ in entries))
    monkeypatch.setattr(os, "pwrite", counted(os.pwrite, events))
    convert(source, tmp_path / "out", to=format, workers=1)
    assert events.count("noted") == len(ARRAYS)
    for index, event in enumerate(events):
        if event == "noted":
            before = [e for e in events[:index] if e != "noted"]
            assert before[-1] == "synced"


def counted(operation: Callable[..., int], events: list[str]) -> Callable[..., int]:
    def call(*args: object) -> int:
        events.append("written")
        return operation(*args)

    return call


@pytest.mark.parametrize("format", ["dcp", "orbax", "safetensors"])
def test_an_attempt_that_fails_keeps_all_that_it_has_written_where_it_is_to_be_resumed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    events: list[str] = []
    monkeypatch.setattr(os, "fdatasync", lambda _: events.append("synced"))
    # One tensor at a time, so that what is written is what was told.
    monkeypatch.setattr(engine, "TOGETHER_BYTES", 1)
    seen: list[str] = []

    def interrupted(done: int, total: int, name: str) -> None:
        seen.append(name)
        if len(seen) == 3:
            raise KeyboardInterrupt

    for resume in (False, True):
        seen.clear()
        events.clear()
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "out", to=format, resume=resume, progress=interrupted, workers=1)
        assert bool(events) == resume
    report = convert(source, tmp_path / "out", to=format, resume=True)
    with open_checkpoint(source) as reader:
        assert report.resumed_bytes == sum(reader.tensors[name.replace("/", ".")].nbytes for name in seen)
    with open_checkpoint(tmp_path / "out") as reader:
        converted = {
            ".".join(map(str, info.path)): reader.read(name) for name, info in reader.tensors.items()
        }
    assert all(same_bits(converted[".".join(path)], array) for path, array in ARRAYS.items())


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_while_work_is_handed_out_is_the_one_that_is_raised(
    tmp_path: Path, source: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(100))
    group = engine.group_boxes

    def failing(*args: Any) -> Any:
        if next(calls) == 2:
            raise CheckpointError("planned wrong")
        return group(*args)

    monkeypatch.setattr(engine, "group_boxes", failing)
    with pytest.raises(CheckpointError, match="planned wrong"):
        convert(source, tmp_path / "out", to="orbax", workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_pattern_for_all_leaves_counts_of_steps_as_they_are(tmp_path: Path) -> None:
    arrays = {
        ("optimizer", "state", "w", "step"): np.asarray(1001, np.float32),
        ("optimizer", "state", "w", "exp_avg"): values((3,), 1),
        ("scale",): np.asarray(1.001, np.float32),
        ("step",): values((3,), 2),
    }
    with create_checkpoint(tmp_path / "a", "dcp") as writer:
        for path, array in arrays.items():
            name = writer.add_tensor(path, array.shape, array.dtype).name
            writer.write(name, writer.chunks(name)[0], array)

    def dtypes(*casts: str) -> list[str]:
        with planned(tmp_path / "a", ConvertOptions(casts=casts)) as (conversion, _):
            return [o.dtype.name for o in conversion.outputs.values()]

    assert dtypes("*=bfloat16") == ["float32", "bfloat16", "bfloat16", "bfloat16"]
    assert dtypes("optimizer/*=bfloat16") == ["float32", "bfloat16", "float32", "float32"]
    assert dtypes("*=float16", "*/step=float64") == ["float64", "float16", "float16", "float16"]
    assert dtypes("optimizer/state/w/step=float64")[0] == "float64"


def test_the_last_pattern_counts_also_when_it_was_given_before(tmp_path: Path, source: Path) -> None:
    with planned(source, ConvertOptions(casts=["model/*=float16", "*=bfloat16", "model/*=float64"])) as (
        conversion,
        _,
    ):
        assert conversion.outputs["model/w"].dtype == F64
        assert conversion.outputs["optimizer/state/w/exp_avg"].dtype.name == "bfloat16"


def test_a_source_with_a_name_that_is_no_text_is_converted(tmp_path: Path, source: Path) -> None:
    odd = tmp_path / os.fsdecode(b"step_\xff")
    os.rename(source, odd)
    convert(odd, tmp_path / "out")
    shown = CliRunner().invoke(app, ["convert", str(odd), str(tmp_path / "again")])
    assert shown.exit_code == 0, shown.output
    assert contents(tmp_path / "out")[1] == contents(tmp_path / "again")[1]


def test_a_destination_called_safetensors_is_one_unless_another_format_is_asked_for(
    tmp_path: Path, source: Path
) -> None:
    assert convert(source, tmp_path / "a.safetensors").format == "safetensors"
    assert (tmp_path / "a.safetensors").is_file()
    assert convert(source, tmp_path / "b.safetensors", to="orbax").format == "orbax"
    shown = CliRunner().invoke(app, ["convert", str(source), "x.safetensors", "--dry-run", "--json"])
    assert json.loads(shown.stdout)["format"] == "safetensors"
