"""Small tensors that are read into the writer's memory: the same bytes and checks as through maps and arrays."""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from isal import isal_zlib

from bridge.checkpoints.checked import checked
from bridge.checkpoints.convert import convert
from bridge.formats import create_checkpoint, open_checkpoint
from bridge.formats.base import Box, CheckpointError, Checksums, dtype_from_name
from bridge.formats.crc32c import extend
from bridge.formats.files.data_file import DataFile
from bridge.formats.files.gathered import SMALL, Gathered
from bridge.formats.files.manifest import MANIFEST_FILE
from bridge.formats.files.record import RecordedChunks

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
            sums = asked.read_into(name, memory) if info.chunks else None
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
def test_memory_of_another_size_is_not_filled(format: str, sources: dict[str, Path]) -> None:
    with open_checkpoint(sources[format]) as reader:
        name = next(name for name, info in reader.tensors.items() if info.shape == (3, 7))
        nbytes = reader.tensors[name].nbytes
        for size in (0, nbytes - 1, nbytes + 1):
            assert reader.read_into(name, memoryview(bytearray(size))) is None


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_left_to_read_to_be_named(format: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Every byte of a tensor and of the checksums beside it, in all formats; safetensors has them in the manifest."""
    with open_checkpoint(sources[format]) as reader:
        name = next(
            n for n, info in reader.tensors.items() if info.shape == (5,) and info.dtype.itemsize == 8
        )
        needle, files = reader.read(name).tobytes(), [file.name for file in reader.files()]
    source = tmp_path / "c"
    for step in range(-1, len(needle) + 4):
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
        # Beside the elements Orbax alone has a checksum that is read again with them.
        beside = step < 0 or step >= len(needle)
        if beside and (format != "orbax" or step < 0):
            continue
        content[at] ^= 0x10
        data.write_bytes(content)
        with open_checkpoint(source) as whole:
            held = checked(whole)
            assert held.read_into(name, memoryview(bytearray(len(needle)))) is None
            with pytest.raises(CheckpointError, match=r"damaged|expected CRC"):
                held.lend(name, Box.whole((5,)))
        content[at] ^= 0x10
        data.write_bytes(content)


def contents(path: Path) -> dict[str, bytes]:
    """Every file by its name, but for the random ones of OCDBT, its time and its identity."""
    found = {}
    for file in sorted(path.rglob("*")):
        if file.is_file() and file.name not in ("manifest.ocdbt", "_CHECKPOINT_METADATA", MANIFEST_FILE):
            name = str(file.relative_to(path))
            found["d" if "/d/" in f"/{name}" else name] = file.read_bytes()
    return found


@pytest.mark.parametrize(("a", "b"), list(itertools.product(FORMATS, FORMATS)))
def test_both_ways_write_the_same_files(
    a: str, b: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[bool] = []
    write_from = RecordedChunks.write_from

    def counted(self: RecordedChunks, *args: object) -> bool:
        taken.append(write_from(self, *args))  # type: ignore[arg-type]
        return taken[-1]

    with monkeypatch.context() as patch:
        patch.setattr(RecordedChunks, "write_from", counted)
        convert(sources[a], tmp_path / "direct", to=b, workers=2)
    # All but those without elements, and the one that is cut in the source.
    assert sum(taken) == len(taken) - (a != "safetensors") == 25 + (a == "safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(RecordedChunks, "write_from", lambda *_: False)
        convert(sources[a], tmp_path / "general", to=b, workers=2)
    direct, general = contents(tmp_path / "direct"), contents(tmp_path / "general")
    if b == "orbax":
        # The node behind the values names the file, at random.
        direct["d"], general["d"] = (
            found["d"][: found["d"].rindex(b"\x0c\xdb\x20\xde")] for found in (direct, general)
        )
    assert direct == general


def test_pieces_that_are_filled_and_handed_over_arrive(tmp_path: Path) -> None:
    """In any mixture, of sizes around those of blocks and of the memory, with some that come to nothing."""
    rng = random.Random(5)
    file, pieces = DataFile(tmp_path / "f"), Gathered()
    expected = bytearray()
    for round in range(200):
        size = rng.choice([1, 17, 4095, 4096, 4097, 70_000, SMALL - 1, 2 * SMALL, rng.randrange(1, SMALL)])
        if round % 9 == 0:
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

    def fill(memory: memoryview) -> Checksums:
        memory[:] = values.tobytes()
        return Checksums()

    def fails(memory: memoryview) -> Checksums:
        raise OSError("no more")

    with create_checkpoint(tmp_path / "c", format) as writer:
        names = [writer.add_tensor((name,), values.shape, values.dtype).name for name in ("a", "b")]
        box = Box.whole(values.shape)
        assert not writer.write_from(names[0], box, lambda memory: None)
        writer.write(names[0], box, values)
        assert writer.write_from(names[1], box, fill)
        for again in (
            lambda: writer.write(names[1], box, values),
            lambda: writer.write_from(names[1], box, fill),
        ):
            with pytest.raises(CheckpointError, match="written once"):
                again()
        with pytest.raises(CheckpointError, match="one of its 1 chunks"):
            writer.write_from(names[1], Box((0, 0), (1, 4)), fill)
    with open_checkpoint(tmp_path / "c") as reader:
        assert all(np.array_equal(reader.read(name), values) for name in names)

    def write_failing() -> None:
        with create_checkpoint(tmp_path / "d", format) as writer:
            writer.write_from(writer.add_tensor(("a",), values.shape, values.dtype).name, box, fails)

    with pytest.raises(OSError, match="no more"):
        write_failing()
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_a_large_chunk_is_not_taken(format: str, tmp_path: Path) -> None:
    values = np.zeros(SMALL // 4, np.float32)
    asked: list[Callable[..., object]] = []

    def fill(memory: memoryview) -> None:
        asked.append(fill)

    with create_checkpoint(tmp_path / "c", format) as writer:
        name = writer.add_tensor(("a",), values.shape, values.dtype).name
        assert not writer.write_from(name, Box.whole(values.shape), fill)
        writer.write(name, Box.whole(values.shape), values)
    assert not asked


def test_a_reader_that_lends_otherwise_reads_into_memory_otherwise() -> None:
    """One that inherits the second alone would give elements of the tensor below it, renamed or still quantized."""
    found = 0
    for file in (ROOT / "bridge").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                if "lend" in methods:
                    found += 1
                    assert "read_into" in methods, f"{file}: {node.name} has lend, and no read_into"
    assert found >= 9
