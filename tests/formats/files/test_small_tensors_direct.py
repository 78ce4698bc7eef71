"""Small tensors that are read into the writer's memory: the same bytes and checks as through maps and arrays."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isal import isal_zlib

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.checked import checked
from bridge.checkpoints.ground.selection import SelectedReader, Selection
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.files.data_file import SMALL, DataFile, Gathered
from bridge.core.formats.files.manifest import MANIFEST_FILE
from bridge.core.formats.files.recorded_chunks import RecordedChunks
from bridge.core.formats.orbax.reader import OrbaxReader
from bridge.core.formats.reading.source_files import SourceFiles, Span
from bridge.core.formats.tensors.arrays import extend
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    CheckpointReader,
    Checksums,
    Fill,
    dtype_from_name,
)
from bridge.core.formats.whole.composite import JoinedReader
from bridge.core.formats.whole.quantized import DequantizedReader
from bridge.core.mapping.states.numbered_states import NamedStates

FORMATS = ("dcp", "orbax", "safetensors")
SHAPES = ((), (5,), (3, 7), (64, 65), (1, 300, 250), (2, 0))
DTYPES = ("float32", "bfloat16", "int64", "bool", "float8_e4m3fn")
ROOT = Path(__file__).parents[3]


def make(path: Path, format: str) -> Path:
    rng = np.random.default_rng(3)
    with create_checkpoint(path, format) as writer:
        infos = [
            writer.add_tensor(("layers", f"t{k}"), shape, dtype_from_name(dtype))
            for k, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES))
        ]
        infos.append(writer.add_tensor(("cut",), (10, 6), np.dtype(np.int16), (4, 6)))
        for info in infos:
            for box in writer.chunks(info.name):
                bits = rng.integers(
                    0, 2 if info.dtype == np.bool_ else 256, (*box.sizes, info.dtype.itemsize), np.uint8
                )
                writer.write(info.name, box, bits.view(info.dtype)[..., 0])
    return path


def into(reader: CheckpointReader, name: str, memory: memoryview) -> Checksums | None:
    (sums,) = reader.read_into([(name, memory)])
    return sums


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("direct")
    return {format: make(folder / format, format) for format in FORMATS}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("held", [False, True])
def test_what_is_read_into_memory_is_what_read_gives(
    format: str, held: bool, sources: dict[str, Path]
) -> None:
    with open_checkpoint(sources[format]) as reader:
        asked = checked(reader) if held else reader
        direct = 0
        for name, info in reader.tensors.items():
            expected = reader.read(name).tobytes()
            memory = memoryview(bytearray(len(expected)))
            sums = into(asked, name, memory) if info.chunks else None
            if sums is None:
                assert len(info.chunks) != 1
                continue
            direct += 1
            assert bytes(memory) == expected, name
            assert sums.crc32 in (None, isal_zlib.crc32(expected))
            assert sums.crc32c in (None, extend(0, expected))
            # Whatever was compared need not be computed again.
            assert (sums.crc32 is not None) == (format == "dcp")
            assert (sums.crc32c is not None) == (format == "orbax" or (held and format == "safetensors"))
        assert direct >= 25


@pytest.mark.parametrize("format", FORMATS)
def test_many_at_once_in_any_order_are_what_each_is(format: str, sources: dict[str, Path]) -> None:
    rng = random.Random(2)
    with open_checkpoint(sources[format]) as reader:
        whole = [name for name, info in reader.tensors.items() if len(info.chunks) == 1]
        others = [name for name, info in reader.tensors.items() if len(info.chunks) != 1]
        for round in range(20):
            names = [*whole, *others, *whole][: rng.randrange(2 * len(whole))]
            if round % 3:
                rng.shuffle(names)
            memory = [bytearray(reader.tensors[name].nbytes + (rng.random() < 0.1)) for name in names]
            checksums = reader.read_into(list(zip(names, map(memoryview, memory), strict=True)))
            for name, filled, sums in zip(names, memory, checksums, strict=True):
                fits = len(filled) == reader.tensors[name].nbytes and len(reader.tensors[name].chunks) == 1
                assert (sums is not None) == fits
                assert sums is None or bytes(filled) == reader.read(name).tobytes()


def test_pieces_of_files_are_read_together_as_far_as_they_are_there(tmp_path: Path) -> None:
    rng = random.Random(4)
    contents = {name: rng.randbytes(300_000) for name in ("a", "b")}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    files = SourceFiles(tmp_path)
    for _ in range(30):
        pieces: list[Span | None] = []
        at = 0
        for _ in range(rng.choice([1, 5, 2500])):
            if rng.random() < 0.1:
                pieces.append(None)
                continue
            at = rng.choice(
                [at, at, at + rng.randrange(100), at + 16_384, at + 16_385, rng.randrange(300_000)]
            )
            parts = tuple(memoryview(bytearray(rng.randrange(1, 90))) for _ in range(rng.choice([1, 1, 2])))
            pieces.append(Span(rng.choice(["a", "a", "a", "b"]), at, parts))
            at += sum(map(len, parts))
        were_read = files.read_into(pieces)
        assert len(were_read) == len(pieces)
        for piece, read in zip(pieces, were_read, strict=True):
            if piece is None:
                assert not read
                continue
            expected = contents[piece.file][piece.start : piece.start + sum(map(len, piece.targets))]
            assert read == (len(expected) == sum(map(len, piece.targets)))
            assert not read or b"".join(piece.targets) == expected
    (tmp_path / "a").unlink()
    with pytest.raises(CheckpointError, match="/c: cannot be opened: No such file"):
        SourceFiles(tmp_path).read_into([Span("c", 0, (memoryview(bytearray(1)),))])
    files.close()
    with pytest.raises(ValueError, match="was closed"):
        files.read_into([Span("b", 0, (memoryview(bytearray(1)),))])


@pytest.mark.parametrize("format", FORMATS)
def test_memory_of_another_size_is_not_filled(format: str, sources: dict[str, Path]) -> None:
    with open_checkpoint(sources[format]) as reader:
        name = next(name for name, info in reader.tensors.items() if info.shape == (3, 7))
        nbytes = reader.tensors[name].nbytes
        for size in (0, nbytes - 1, nbytes + 1):
            assert into(reader, name, memoryview(bytearray(size))) is None


def test_a_shard_of_as_many_elements_in_another_shape_is_not_the_array(sources: dict[str, Path]) -> None:
    with OrbaxReader(sources["orbax"]) as reader:
        name = next(name for name, info in reader.tensors.items() if info.shape == (3, 7))
        reader._layouts[name] = dataclasses.replace(reader._layouts[name], chunk=(7, 3), stored_chunk=(7, 3))
        assert into(reader, name, memoryview(bytearray(reader.tensors[name].nbytes))) is None


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_left_to_read_to_be_named(format: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Every byte of a tensor and of the checksums beside it, in all formats; safetensors has them in the manifest."""
    with open_checkpoint(sources[format]) as reader:
        name = next(
            n for n, info in reader.tensors.items() if info.shape == (5,) and info.dtype.itemsize == 8
        )
        needle, files = reader.read(name).tobytes(), [file.name for file in reader.files()]
    source = tmp_path / "c"
    for step in range(-1, len(needle) + 24):
        if not source.exists():
            source.mkdir()
            for file in sources[format].rglob("*"):
                if file.is_file():
                    (source / file.relative_to(sources[format])).parent.mkdir(parents=True, exist_ok=True)
                    (source / file.relative_to(sources[format])).write_bytes(file.read_bytes())
        (data,) = (
            f for f in source.rglob("*") if f.is_file() and f.name in files and needle in f.read_bytes()
        )
        content = bytearray(data.read_bytes())
        at = content.index(needle) + step
        # Beside the elements Orbax alone has checksums, and where they are, which are read with them.
        beside = step < 0 or step >= len(needle)
        if beside and (format != "orbax" or step < 0):
            continue
        content[at] ^= 0x10
        data.write_bytes(content)
        with open_checkpoint(source) as whole:
            held = checked(whole)
            assert into(held, name, memoryview(bytearray(len(needle)))) is None
            with pytest.raises(CheckpointError, match=r"damaged|expected CRC|expected \d+ bytes"):
                held.lend(name, Box.whole((5,)))
        content[at] ^= 0x10
        data.write_bytes(content)


def test_readers_of_other_readers_ask_for_the_right_tensor(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    blocks, scales = (
        rng.integers(0, 255, (2, 4, 1, 16), np.uint8),
        rng.integers(120, 130, (2, 4, 1), np.uint8),
    )
    arrays = {
        ("w_blocks",): blocks,
        ("w_scales",): scales,
        ("plain",): rng.random((3, 4), np.float32),
        ("optimizer", "state", "0", "exp_avg"): rng.random((3, 4), np.float32),
    }
    with create_checkpoint(tmp_path / "c", "dcp") as writer:
        names = [writer.add_tensor(path, array.shape, array.dtype).name for path, array in arrays.items()]
        for name, array in zip(names, arrays.values(), strict=True):
            writer.write(name, Box.whole(array.shape), array)
    with open_checkpoint(tmp_path / "c") as reader:
        for wrapped in (
            NamedStates(reader, {("optimizer",): {0: "plain"}}),
            JoinedReader(tmp_path, "dcp", {"item": reader}),
            DequantizedReader(reader),
            SelectedReader(reader, Selection(drop=["plain"])),
        ):
            direct = set()
            for name, info in wrapped.tensors.items():
                memory = bytearray(info.nbytes)
                if into(wrapped, name, memoryview(memory)) is not None:
                    direct.add(name)
                    assert bytes(memory) == wrapped.read(name).tobytes(), (type(wrapped), name)
            assert len(direct) >= 2
            assert not isinstance(wrapped, DequantizedReader) or "w" not in direct


def contents(path: Path) -> dict[str, bytes]:
    """Every file by its name, but for the random ones of OCDBT, its time and its identity."""
    files = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name not in ("manifest.ocdbt", "_CHECKPOINT_METADATA", MANIFEST_FILE):
            name = str(file.relative_to(path))
            files["d" if "/d/" in f"/{name}" else name] = file.read_bytes()
    return files


@pytest.mark.parametrize(("a", "b"), list(itertools.product(FORMATS, FORMATS)))
def test_both_ways_write_the_same_files(
    a: str, b: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    write_from = RecordedChunks.write_from

    def counted(self: RecordedChunks, *args: Any) -> Sequence[bool]:
        done = write_from(self, *args)
        taken.extend(done)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(RecordedChunks, "write_from", counted)
        convert(sources[a], tmp_path / "direct", to=b, workers=2)
    # All but those without elements, and the one that is cut in the source.
    assert sum(taken) == len(taken) - (a != "safetensors") == 25 + (a == "safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(RecordedChunks, "write_from", lambda self, chunks, fill: [False] * len(chunks))
        convert(sources[a], tmp_path / "general", to=b, workers=2)
    direct, general = contents(tmp_path / "direct"), contents(tmp_path / "general")
    if b == "orbax":
        # The node behind the values names the file, at random.
        direct["d"], general["d"] = (
            written["d"][: written["d"].rindex(b"\x0c\xdb\x20\xde")] for written in (direct, general)
        )
    assert direct == general


@pytest.mark.parametrize("format", FORMATS)
def test_a_cast_to_as_many_bytes_is_a_cast(format: str, tmp_path: Path) -> None:
    values = np.array([1.5, -2.0, 0.0, 3.0], dtype_from_name("bfloat16"))
    with create_checkpoint(tmp_path / "a", format) as writer:
        name = writer.add_tensor(("w",), values.shape, values.dtype).name
        writer.write(name, Box.whole(values.shape), values)
    convert(tmp_path / "a", tmp_path / "b", to="dcp", casts=["*=float16"])
    with open_checkpoint(tmp_path / "b") as reader:
        assert reader.read("w").tolist() == values.astype(np.float32).tolist()


def test_pieces_that_are_filled_and_handed_over_arrive(tmp_path: Path) -> None:
    """In any mixture, of sizes around those of blocks and of the memory, with some that come to nothing."""
    rng = random.Random(5)
    file, pieces = DataFile(tmp_path / "f"), Gathered()
    expected = bytearray()
    for round in range(200):
        size = rng.choice([1, 17, 4095, 4096, 4097, 70_000, SMALL - 1, 2 * SMALL, rng.randrange(1, SMALL)])
        if round % 40 == 0:
            expected += bytes(rng.randrange(1, 9000))
        content = rng.randbytes(size)
        offset = len(expected)

        def fill(memory: memoryview, content: bytes = content) -> bool:
            memory[:] = content
            return True

        def broken(memory: memoryview) -> bool:
            memory[:] = bytes(len(memory))
            raise OSError("no more")

        match round % 4:
            case 0:
                pieces.add(file, offset, [content[: size // 3], content[size // 3 :]])
            case 1:
                assert not pieces.fill(file, offset, size, lambda memory: False)
                assert pieces.fill(file, offset, size, fill)
            case 2:
                with pytest.raises(OSError, match="no more"):
                    pieces.fill(file, offset, size, broken)
                assert pieces.fill(file, offset, size, fill)
            case _:
                assert pieces.fill(file, offset, size, fill)
        expected += content
        if rng.random() < 0.05:
            pieces.flush()
    pieces.flush()
    file.close()
    assert (tmp_path / "f").read_bytes() == bytes(expected)


@pytest.mark.parametrize("format", FORMATS)
def test_a_chunk_that_was_not_filled_can_still_be_written(format: str, tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    box = Box.whole(values.shape)

    def fill(positions: Sequence[int], targets: Sequence[memoryview]) -> list[Checksums | None]:
        for target in targets:
            target[:] = values.tobytes()
        # Every second one is not to be had this way.
        return [Checksums() if position % 2 else None for position in positions]

    def fails(positions: Sequence[int], targets: Sequence[memoryview]) -> list[Checksums | None]:
        raise OSError("no more")

    with create_checkpoint(tmp_path / "c", format) as writer:
        names = [writer.add_tensor((f"t{k}",), values.shape, values.dtype).name for k in range(7)]
        assert writer.write_from([(name, box) for name in names], fill) == [k % 2 == 1 for k in range(7)]
        for name in names[::2]:
            writer.write(name, box, values)
        for again in (
            lambda: writer.write(names[1], box, values),
            lambda: writer.write_from([(names[2], box)], fill),
        ):
            with pytest.raises(CheckpointError, match="written once"):
                again()
    with open_checkpoint(tmp_path / "c") as reader:
        assert all(np.array_equal(reader.read(name), values) for name in names)
    assert verify(tmp_path / "c").good

    def write_failing(error: Fill, box: Box) -> None:
        with create_checkpoint(tmp_path / "d", format) as writer:
            writer.write_from([(writer.add_tensor(("a",), values.shape, values.dtype).name, box)], error)

    with pytest.raises(OSError, match="no more"):
        write_failing(fails, box)
    with pytest.raises(CheckpointError, match="one of its 1 chunks"):
        write_failing(fill, Box((0, 0), (1, 4)))
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_large_chunk_is_not_taken(format: str, tmp_path: Path) -> None:
    values = np.zeros(SMALL // 4, np.float32)
    asked: list[object] = []

    def fill(positions: Sequence[int], targets: Sequence[memoryview]) -> list[Checksums | None]:
        asked.extend(positions)
        return [None] * len(positions)

    with create_checkpoint(tmp_path / "c", format) as writer:
        name = writer.add_tensor(("a",), values.shape, values.dtype).name
        assert writer.write_from([(name, Box.whole(values.shape))], fill) == [False]
        writer.write(name, Box.whole(values.shape), values)
    assert not asked


def test_a_reader_that_lends_otherwise_reads_into_memory_otherwise() -> None:
    """One that inherits the second alone would give elements of the tensor below it, renamed or still quantized."""
    count = 0
    for file in (ROOT / "bridge").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                if "lend" in methods:
                    count += 1
                    assert "read_into" in methods, f"{file}: {node.name} has lend, and no read_into"
    assert count >= 9


def test_a_selection_has_only_its_own_values(tmp_path: Path) -> None:
    with create_checkpoint(tmp_path / "c", "dcp") as writer:
        writer.write(
            writer.add_tensor(("w",), (1,), np.dtype(np.float32)).name, Box.whole((1,)), np.ones(1, "f4")
        )
        writer.add_object(("kept",), 1)
        writer.add_object(("left",), 2)
    with open_checkpoint(tmp_path / "c") as reader:
        selected = SelectedReader(reader, Selection(drop=["left"]))
        assert dict(selected.objects) == {"kept": 1}
        assert selected.left_out == ["left"]
