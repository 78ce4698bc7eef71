"""Boxes, coverage, format detection and the atomic directory."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.formats import FORMATS, create_checkpoint, detect_format, open_checkpoint
from bridge.core.formats.files.atomic import AtomicDirectory, is_temporary
from bridge.core.formats.tensors.base import Box, CheckpointError, TensorInfo, dtype_from_name, dtype_name
from bridge.core.formats.tensors.boxes import check_coverage, grid_of_chunks


def count(shape: tuple[int, ...], chunks: list[Box]) -> np.ndarray:
    held = np.zeros(shape, int)
    for chunk in chunks:
        held[chunk.slices()] += 1
    return held


@st.composite
def shapes_and_chunks(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A random tiling by repeated cuts, sometimes spoiled by one change."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    chunks = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = chunks.pop(draw(st.integers(0, len(chunks) - 1)))
        axes = [a for a, n in enumerate(box.sizes) if n > 1]
        if not axes:
            chunks.append(box)
            continue
        axis = draw(st.sampled_from(axes))
        cut = draw(st.integers(1, box.sizes[axis] - 1))
        for low, size in ((0, cut), (cut, box.sizes[axis] - cut)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis] += low
            sizes[axis] = size
            chunks.append(Box(tuple(offsets), tuple(sizes)))
    change = draw(st.sampled_from(["none", "drop", "repeat", "replace"]))
    if change in ("drop", "replace"):
        chunks.pop(draw(st.integers(0, len(chunks) - 1)))
    if change in ("repeat", "replace") and chunks:
        chunks.append(draw(st.sampled_from(chunks)))
    return shape, draw(st.permutations(chunks))


@given(shapes_and_chunks())
def test_coverage_accepts_exactly_the_tilings(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, chunks = case
    held = count(shape, chunks)
    if (held == 1).all():
        check_coverage(shape, chunks, "tensor 'w'")
    else:
        first = tuple(int(i) for i in np.argwhere(held != 1)[0])
        with pytest.raises(CheckpointError) as caught:
            check_coverage(shape, chunks, "tensor 'w'")
        # The reported element is the first wrong one, with its true count.
        assert f"element {first} is in {held[first]} " in str(caught.value)


@pytest.mark.slow
def test_coverage_of_65536_chunks_is_checked_and_one_missing_or_doubled_is_found() -> None:
    chunks = [Box((2 * i, 3 * j, 0), (2, 3, 7)) for i, j in itertools.product(range(256), range(256))]
    shape = (512, 768, 7)
    check_coverage(shape, chunks, "w")
    with pytest.raises(CheckpointError, match=r"element \(2, 3, 0\) is in 0 \(65535 chunks"):
        check_coverage(shape, chunks[:257] + chunks[258:], "w")
    with pytest.raises(CheckpointError, match=r"element \(2, 3, 0\) is in 0"):
        check_coverage(shape, chunks[:257] + chunks[258:] + [chunks[-1]], "w")


def test_coverage_ignores_empty_chunks_and_wants_none_for_an_empty_tensor() -> None:
    check_coverage((0, 3), [], "w")
    check_coverage((0, 3), [Box((0, 0), (0, 3))], "w")
    check_coverage((2,), [Box((0,), (2,)), Box((2,), (0,))], "w")
    check_coverage((), [Box((), ())], "w")
    with pytest.raises(CheckpointError, match="is in 0"):
        check_coverage((), [], "w")
    with pytest.raises(CheckpointError, match="is in 2"):
        check_coverage((), [Box((), ()), Box((), ())], "w")
    with pytest.raises(CheckpointError, match="inside shape"):
        check_coverage((2,), [Box((1,), (2,))], "w")
    with pytest.raises(CheckpointError, match="inside shape"):
        check_coverage((2, 2), [Box((0,), (2,))], "w")


def test_coverage_refuses_hostile_cuts_instead_of_growing_without_bound() -> None:
    rng = np.random.default_rng(0)
    corners = rng.integers(0, 1000, (500, 40))
    chunks = [Box(tuple(map(int, c)), (7,) * 40) for c in corners]
    with pytest.raises(CheckpointError, match="too irregularly"):
        check_coverage((2000,) * 40, chunks, "w")


@given(st.data())
def test_intersections_and_slices_agree_with_counting(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=3)))

    def box() -> Box:
        offsets = tuple(data.draw(st.integers(0, n)) for n in shape)
        return Box(
            offsets, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
        )

    a, b = box(), box()
    both = (count(shape, [a]) + count(shape, [b])) == 2
    common = a.intersect(b)
    assert both.sum() == (common.numel if common else 0)
    assert (common is None) == (not both.any())
    if common:
        array = np.arange(int(np.prod(shape))).reshape(shape)
        part = array[a.slices()][common.slices(a)]
        assert isinstance(part, np.ndarray)
        assert part.tolist() == array[common.slices()].tolist()


def test_bad_boxes_and_tensors_are_refused_with_what_was_found() -> None:
    with pytest.raises(ValueError, match="as many offsets as sizes"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="no negative"):
        Box((-1,), (1,))
    with pytest.raises(ValueError, match="chunks inside"):
        TensorInfo("w", ("w",), (2,), np.dtype("float32"), (Box((1,), (2,)),))


def test_dtype_names_are_those_of_both_frameworks() -> None:
    assert dtype_from_name("bfloat16") == ml_dtypes.bfloat16
    assert dtype_name(np.dtype(ml_dtypes.float8_e4m3fn)) == "float8_e4m3fn"
    with pytest.raises(CheckpointError, match="quint8"):
        dtype_from_name("quint8")
    for foreign in (">f4", "U3", "O", "M8[s]"):
        with pytest.raises(CheckpointError, match="dtype"):
            dtype_name(np.dtype(foreign))


class Crash(Exception):
    pass


def test_an_exception_while_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    def crash() -> None:
        with AtomicDirectory(tmp_path / "new" / "parents" / "checkpoint") as directory:
            (directory.temporary / "half").write_text("half")
            raise Crash

    with pytest.raises(Crash):
        crash()
    assert list(tmp_path.iterdir()) == []


def test_a_failing_rename_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="no space"), AtomicDirectory(tmp_path / "checkpoint"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file_type", ["file", "directory", "dangling link"])
def test_an_existing_destination_is_refused_and_kept(tmp_path: Path, file_type: str) -> None:
    path = tmp_path / "checkpoint"
    if file_type == "file":
        path.write_text("precious")
    elif file_type == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="remove it first"):
        AtomicDirectory(path)
    assert os.path.lexists(path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_destination_that_appears_while_writing_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with pytest.raises(FileExistsError), AtomicDirectory(path):
        path.mkdir()
    assert list(tmp_path.iterdir()) == [path]


def test_everything_is_synced_before_the_rename_and_the_parent_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(descriptor: int) -> None:
        events.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def spy_rename(a: Path, b: Path) -> None:
        events.append("rename")
        rename(a, b)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    with AtomicDirectory(tmp_path / "checkpoint") as directory:
        (directory.temporary / "item").mkdir()
        (directory.temporary / "item" / "data").write_text("data")
        (directory.temporary / "metadata").write_text("metadata")
        temporary = os.path.realpath(directory.temporary)
    at = events.index("rename")
    assert set(events[:at]) == {temporary + tail for tail in ("", "/item", "/item/data", "/metadata")}
    assert events[at + 1 :] == [os.path.realpath(tmp_path)]
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["item", "metadata"]


def test_what_is_not_a_checkpoint_gets_an_error_that_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist: expected a checkpoint there"):
        open_checkpoint(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file of another kind"):
        open_checkpoint(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="an empty directory"):
        open_checkpoint(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.h5").write_text("")
    with pytest.raises(CheckpointError, match=r"found model\.h5"):
        open_checkpoint(tmp_path / "other")
    (tmp_path / "step.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "step.orbax-checkpoint-tmp" / "_METADATA").write_text("{}")
    with pytest.raises(CheckpointError, match="never finished"):
        detect_format(tmp_path / "step.orbax-checkpoint-tmp")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "__0_0.distcp").write_text("")
    with pytest.raises(CheckpointError, match="did not finish"):
        open_checkpoint(tmp_path / "torn")
    (tmp_path / "torn" / "__0.metadata").write_text("")
    with pytest.raises(CheckpointError, match=r"__0\.metadata: refused"):
        open_checkpoint(tmp_path / "torn")
    (tmp_path / "torn.safetensors").write_text("")
    with pytest.raises(CheckpointError, match=r"torn\.safetensors"):
        open_checkpoint(tmp_path / "torn.safetensors")


def test_the_working_directory_of_an_unfinished_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = create_checkpoint(tmp_path / "checkpoint", "dcp")
    (temporary,) = tmp_path.iterdir()
    (temporary / ".metadata").write_text("")
    assert is_temporary(temporary)
    with pytest.raises(CheckpointError, match="never finished"):
        open_checkpoint(temporary)
    monkeypatch.chdir(temporary)
    with pytest.raises(CheckpointError, match="never finished"):
        open_checkpoint(".")
    writer.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", [".metadata", "__0.metadata"])
def test_weights_beside_a_dcp_or_orbax_checkpoint_do_not_hide_it(tmp_path: Path, first: str) -> None:
    (tmp_path / "model.safetensors").write_text("")
    assert detect_format(tmp_path) == "safetensors"
    (tmp_path / "_METADATA").write_text("{}")
    assert detect_format(tmp_path) == "orbax"
    (tmp_path / first).write_text("")
    assert detect_format(tmp_path) == "dcp"


@pytest.mark.parametrize("subfolder", ["", "default", "10/state"])
def test_orbax_is_recognized_flat_with_items_and_with_steps(tmp_path: Path, subfolder: str) -> None:
    (tmp_path / "run" / subfolder).mkdir(parents=True)
    (tmp_path / "run" / subfolder / "_METADATA").write_text("{}")
    assert detect_format(tmp_path / "run") == "orbax"


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="expected a checkpoint format out of dcp, orbax, safetensors, got 'npz'"
    ):
        create_checkpoint(tmp_path / "checkpoint", "npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_writer_committed_inside_its_with_block_is_not_committed_again(tmp_path: Path, format: str) -> None:
    with create_checkpoint(tmp_path / "checkpoint", format) as writer:
        writer.add_tensor("w", (2,), np.dtype("float32"))
        writer.write("w", writer.chunks("w")[0], np.ones(2, np.float32))
        writer.commit()
    with open_checkpoint(tmp_path / "checkpoint") as reader:
        assert reader.read("w").tolist() == [1, 1]
    for again in (writer.commit, lambda: writer.write("w", writer.chunks("w")[0], np.ones(2, np.float32))):
        with pytest.raises(CheckpointError, match="it was committed or aborted"):
            again()
    with open_checkpoint(tmp_path / "checkpoint") as reader:
        assert reader.read("w").tolist() == [1, 1]


def test_parents_made_for_a_checkpoint_are_synced_into_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    with AtomicDirectory(tmp_path / "new" / "deep" / "c"):
        monkeypatch.setattr(os, "fsync", spy)
    root = os.path.realpath(tmp_path)
    assert {root, f"{root}/new", f"{root}/new/deep"} <= set(synced)


@pytest.mark.parametrize("format", FORMATS)
def test_a_shape_of_more_chunks_than_can_be_listed_is_refused(tmp_path: Path, format: str) -> None:
    writer = create_checkpoint(tmp_path / "c", format)
    with pytest.raises(
        CheckpointError, match=r"tensor 'w': expected at most 1048576 chunks, got \d+ of shape"
    ):
        writer.add_tensor("w", (2**55,), np.dtype("float32"))
    assert writer.add_tensor("hollow", (2**55, 0), np.dtype("float32")).chunks == ()
    writer.abort()


def test_a_name_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    writer = create_checkpoint(tmp_path / "c", "dcp")
    with pytest.raises(CheckpointError, match="expected a name of Unicode characters"):
        writer.add_object(("a", "lone \udc80"), 1)
    writer.abort()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "path",
    [(), ("a", 1 << 63), ("a", -1), ("a", True), ("a",) * 257],
    ids=["none", "large", "negative", "bool", "deep"],
)
def test_paths_that_some_format_cannot_read_back_are_refused_by_all(
    tmp_path: Path, format: str, path: tuple[str | int, ...]
) -> None:
    with create_checkpoint(tmp_path / "c", format) as writer:
        with pytest.raises(CheckpointError, match="list pos"):
            writer.add_tensor(path, (1,), np.dtype(np.float32))
        with pytest.raises(CheckpointError, match="list pos"):
            writer.add_object(path, 1)
        writer.abort()


@pytest.mark.parametrize("format", FORMATS)
def test_the_longest_path_and_the_largest_position_come_back(tmp_path: Path, format: str) -> None:
    paths: list[tuple[str | int, ...]] = [("x", (1 << 63) - 1), ("a",) * 256]
    with create_checkpoint(tmp_path / "c", format) as writer:
        for path in paths:
            writer.add_object(path, 1)
        name = writer.add_tensor("w", (1,), np.dtype(np.float32)).name
        writer.write(name, Box.whole((1,)), np.ones(1, np.float32))
    with open_checkpoint(tmp_path / "c") as reader:
        assert set(paths) <= set(reader.object_paths.values())


def test_a_tensor_of_another_name_is_like_one_that_was_checked() -> None:
    info = TensorInfo("a", ("a",), (4, 3), np.dtype("float32"), grid_of_chunks((4, 3), (2, 3)))
    other = info.named("b.c", ("b", "c"))
    assert other == TensorInfo("b.c", ("b", "c"), info.shape, info.dtype, info.chunks)
    assert vars(other).keys() == {field.name for field in dataclasses.fields(TensorInfo)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        other.name = "d"  # type: ignore[misc]
