"""Elements that are looked at where they are: the same reports as from copies, the same errors, and no more memory."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.compare.spread import Spread
from bridge.checkpoints.compare.ulp import Difference, Tolerance
from bridge.checkpoints.ground.borrowed import MEMORY, borrow, count_not_finite
from bridge.checkpoints.ground.workers import batches, each, ordered
from bridge.checkpoints.verify import verification as verify_module
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import create_checkpoint
from bridge.core.formats.dcp.reader import DcpReader
from bridge.core.formats.files.manifest import MANIFEST_FILE
from bridge.core.formats.orbax.reader import OrbaxReader
from bridge.core.formats.safetensors.reader import SafetensorsReader
from bridge.core.formats.tensors.base import DTYPES, ORBAX_DTYPES, Box, CheckpointError, Loan, Wanted
from tests.support.bridge.bits import random_bits
from tests.support.examples import examples

READERS = {"dcp": DcpReader, "orbax": OrbaxReader, "safetensors": SafetensorsReader}
SHAPES = ((), (0, 3), (6,), (5, 7))


@contextmanager
def copies_only() -> Iterator[None]:
    """Readers that lend nothing, and read into no other memory."""
    with ExitStack() as patches:
        for reader in READERS.values():
            patches.enter_context(mock.patch.object(reader, "lend", return_value=None))
            patches.enter_context(
                mock.patch.object(reader, "read_into", lambda self, wanted: [None] * len(wanted))
            )
        yield


def write(path: Path, format: str, tensors: dict[str, np.ndarray]) -> Path:
    with create_checkpoint(path, format) as writer:
        for name, array in tensors.items():
            writer.add_tensor(tuple(name.split(".")), array.shape, array.dtype)
        separator = "/" if format == "orbax" else "."
        for name, array in tensors.items():
            stored = name.replace(".", separator)
            for box in writer.chunks(stored):
                writer.write(stored, box, array[box.slices()])
    return path


def bits_changed(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """With other bits in some elements: among them other signs of zeros, NaNs and infinities."""
    changed = array.copy().reshape(-1)
    for _ in range(rng.choice((0, 0, 1, 3))):
        if changed.size:
            raw = changed.view(np.uint8)
            if array.dtype == np.bool_:
                raw[rng.randrange(raw.size)] ^= 1
            else:
                raw[rng.randrange(raw.size)] ^= 1 << rng.choice((0, 3, 7))
    return changed.reshape(array.shape)


def special(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """With zeros of both signs and infinities, where the dtype has them."""
    array = array.copy()
    if array.size and array.dtype.kind in "fc":
        flat = array.reshape(-1)
        for value in (0.0, -0.0, np.inf, -np.inf, np.nan):
            flat[rng.randrange(flat.size)] = value
    return array


# A seed that is smaller is no simpler case.
@examples(60, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(sorted(itertools.product(READERS, READERS))),
    st.sampled_from(
        [
            Tolerance(),
            Tolerance(max_ulp=3),
            Tolerance(rtol=1e-3, atol=1e-5),
            Tolerance(max_error=0.1),
            Tolerance(max_ulp=1, noise_factor=1),
        ]
    ),
    st.booleans(),
    st.booleans(),
)
def test_comparisons_are_those_of_copies(
    seed: int, formats: tuple[str, str], tolerance: Tolerance, rounded: bool, noisy: bool
) -> None:
    rng = random.Random(seed)
    # What all formats hold; in Orbax alone the narrow types, too.
    dtypes = dict(ORBAX_DTYPES if set(formats) == {"orbax"} else DTYPES)
    if "safetensors" in formats or noisy:
        dtypes.pop("complex128")
    a, b, noise = {}, {}, {}
    for k, (name, dtype) in enumerate(dtypes.items()):
        bits = random_bits(rng.choice(SHAPES), dtype, rng.randrange(1000))
        if name in ("int4", "int2", "float4_e2m1fn"):
            bits = (bits.view(np.uint8) & 3).view(dtype)
        key = f"{name}.{k}"
        a[key] = special(bits, rng)
        b[key] = bits_changed(a[key], rng) if name not in ("int4", "int2", "float4_e2m1fn") else a[key]
        if rounded and name == "float32" and rng.random() < 0.5:
            with np.errstate(all="ignore"):
                b[key] = b[key].astype(DTYPES["bfloat16"])
        if dtype.kind in "fcV" and name not in ("int4", "int2"):
            noise[key] = bits_changed(b[key], rng)
    folder = Path(tempfile.mkdtemp())
    try:
        paths = (
            write(folder / "a.safetensors", formats[0], a),
            write(folder / "b.safetensors", formats[1], b),
        )
        options: dict[str, Any] = {"tolerance": tolerance, "rounded": rounded}
        if noisy:
            options["noise"] = write(folder / "n.safetensors", formats[1], noise)
        reports = [diff(*paths, **options, workers=workers) for workers in (1, 3)]
        with copies_only():
            expected = diff(*paths, **options)
        assert len(expected.tensors) == len(a) - len(expected.mismatched)
        assert [repr(vars(report)) for report in reports] == [repr(vars(expected))] * 2
        assert reports[0].total == sum((tensor.difference for tensor in reports[0].tensors), Difference())
        with copies_only():
            counted = verify(paths[0], workers=1)
        looked_at = verify(paths[0], workers=1)
        assert looked_at.problems == counted.problems == ()
        assert looked_at.not_finite == counted.not_finite
    finally:
        shutil.rmtree(folder)


def numbers(count: int) -> dict[str, np.ndarray]:
    return {f"w.{k:03}": np.random.default_rng(k).random((40, 50), np.float32) for k in range(count)}


@pytest.mark.parametrize("format", READERS)
def test_small_tensors_are_neither_lent_nor_copied(format: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", format, numbers(5))
    asked: list[str] = []

    def refuse(*_: object) -> None:
        asked.append("lend or read")
        raise AssertionError

    with mock.patch.multiple(READERS[format], lend=refuse, read=refuse):
        assert diff(path, path).within
        assert verify(path).good
    assert asked == []


@pytest.mark.parametrize("format", READERS)
def test_larger_tensors_are_lent(format: str, tmp_path: Path) -> None:
    large = {"w.x": np.random.default_rng(0).random((3, 100_000), np.float32)}
    path = write(tmp_path / "a.safetensors", format, large)
    changed = {"w.x": large["w.x"].copy()}
    changed["w.x"][2, 7] += 1
    other = write(tmp_path / "b.safetensors", format, changed)
    held: list[int] = []
    real = READERS[format].lend

    def lend(reader: Any, name: str, box: Box) -> Loan | None:
        loan = real(reader, name, box)
        if loan is None:
            return None
        held.append(1)

        def give_back() -> None:
            held.append(-1)
            loan.give_back()

        return dataclasses.replace(loan, give_back=give_back)

    with mock.patch.multiple(READERS[format], lend=lend, read=mock.Mock(side_effect=AssertionError)):
        (tensor,) = diff(path, other).tensors
        assert verify(path).good
    assert tensor.difference.differing == 1
    assert tensor.difference.at_abs is not None
    assert tensor.difference.at_abs.index == (2, 7)
    assert (held.count(1), held.count(-1)) == (3, 3)


class Asked:
    """A reader that notes what it is asked for."""

    def __init__(self, reader: DcpReader, error: Exception | None = None) -> None:
        self._reader, self._error = reader, error
        self.tensors = reader.tensors
        self.calls: list[str] = []

    def read_into(self, wanted: Sequence[Wanted]) -> object:
        self.calls.append("read_into")
        if self._error is not None:
            raise self._error
        return self._reader.read_into(wanted)

    def lend(self, name: str, box: Box) -> object:
        self.calls.append("lend")
        return None

    def read(self, name: str, box: Box) -> np.ndarray:
        self.calls.append("read")
        return self._reader.read(name, box)


def test_parts_are_read_and_errors_are_left_to_reading(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = write(tmp_path / "a", "dcp", {"w": array})
    with DcpReader(path) as reader:
        asked: Any = Asked(reader)
        part = Box((1, 1), (2, 2))
        # A store would be asked for the part twice.
        assert borrow(asked, "w", part, MEMORY.first).array.tolist() == array[1:, 1:3].tolist()
        assert asked.calls == ["read"]
        asked.calls.clear()
        assert borrow(asked, "w", Box.whole((3, 4)), MEMORY.first).array.tolist() == array.tolist()
        assert asked.calls == ["read_into"]
        for error in (OSError("gone"), CheckpointError("damaged")):
            asked = Asked(reader, error)
            assert borrow(asked, "w", Box.whole((3, 4)), MEMORY.first).array.tolist() == array.tolist()
            assert asked.calls == ["read_into", "lend", "read"]


def test_spreads_of_regions_add_up() -> None:
    rng = np.random.default_rng(0)
    first, second, third = 10.0 ** rng.uniform(-18, 2, (3, 500))
    third[7] = np.inf
    parts, other, whole, nothing = Spread(), Spread(), Spread(), Spread()
    parts.add(np.zeros(3))
    parts.add(first)
    parts.add(second)
    other.add(third)
    parts.join(other)
    parts.join(nothing)
    whole.add(np.concatenate([first, second, third]))
    assert parts.histogram(2000) == whole.histogram(2000)
    assert parts.percentiles(2000) == whole.percentiles(2000)
    assert sum(parts.histogram(2000).values()) == 2000
    assert (nothing.histogram(5), nothing.histogram(0)) == ({"0": 5}, {})
    assert set(nothing.percentiles(5).values()) == {0.0}


def test_batches_of_small_tensors_are_looked_at_by_one_thread_at_a_time() -> None:
    busy = threading.Lock()
    together: list[bool] = []

    def look(item: int) -> int:
        free = busy.acquire(blocking=False)
        together.append(not free)
        time.sleep(0.002)
        if free:
            busy.release()
        if item == 41:
            raise CheckpointError("damaged")
        return 2 * item

    assert list(ordered(lambda batch: each(look, batch), [[1, 2, 3], [4, 5], [6, 7]], 3)) == [
        [2, 4, 6],
        [8, 10],
        [12, 14],
    ]
    assert not any(together)
    with pytest.raises(CheckpointError, match="damaged"):
        each(look, [40, 41])
    # An error leaves the way free for others, and a single item, which may be large, waits for nobody.
    assert each(look, [1, 2]) == [2, 4]
    both = threading.Barrier(2, timeout=20)

    def wait(item: int) -> int:
        both.wait()
        return item

    assert list(ordered(lambda batch: each(wait, batch), [[1], [2]], 2)) == [[1], [2]]


def test_each_thread_has_memory_of_its_own() -> None:
    buffers: list[memoryview] = [MEMORY.first, MEMORY.second]
    thread = threading.Thread(target=lambda: buffers.extend((MEMORY.first, MEMORY.second)))
    thread.start()
    thread.join()
    buffers[0][0] = 1
    for buffer, other in itertools.combinations(buffers, 2):
        buffer[0], other[0] = 1, 2
        assert buffer[0] == 1


@pytest.mark.parametrize("format", READERS)
def test_damage_is_reported_as_from_copies(format: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", format, numbers(12))
    whole = path if path.is_file() else max(path.rglob("*"), key=lambda file: file.stat().st_size)
    content = whole.read_bytes()
    rng = random.Random(3)
    seen = 0
    for _ in range(8):
        spot = rng.randrange(2000, len(content) - 2000)
        damaged = bytearray(content)
        damaged[spot] ^= 1 << rng.randrange(8)
        whole.write_bytes(damaged)
        report = verify(path)
        with copies_only():
            expected = verify(path)
        assert report.problems == expected.problems
        assert report.not_finite == expected.not_finite
        seen += bool(report.problems)
    assert seen >= 5


def test_problems_are_in_the_order_of_tensors_and_chunks(tmp_path: Path) -> None:
    arrays = numbers(3)
    with create_checkpoint(tmp_path / "a", "dcp") as writer:
        for name, array in arrays.items():
            writer.add_tensor(tuple(name.split(".")), array.shape, array.dtype, (10, 50))
            for box in writer.chunks(name):
                writer.write(name, box, array[box.slices()])
    data = next((tmp_path / "a").glob("*.distcp"))
    content = bytearray(data.read_bytes())
    for row in (0, 30):
        content[content.index(arrays["w.000"][row].tobytes())] ^= 1
    data.write_bytes(content)
    file = tmp_path / "a" / MANIFEST_FILE
    manifest = json.loads(file.read_text())
    manifest["tensors"]["w.001"]["dtype"] = "int32"
    file.write_text(json.dumps(manifest))
    problems = [(problem.where, problem.text) for problem in verify(tmp_path / "a").problems]
    assert [name for name, _ in problems] == ["w.000", "w.000", "w.001"]
    assert ["(0, 0)" in problems[0][1], "(30, 0)" in problems[1][1]] == [True, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "float8_e5m2"])
def test_numbers_that_are_not_finite_are_counted_in_each_block(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = random_bits((301, 7), DTYPES[dtype], 5)
    path = write(tmp_path / "a", "dcp", {"w": array})
    monkeypatch.setattr(verify_module, "_BLOCK_BYTES", 64)
    report = verify(path)
    assert report.good
    (not_finite,) = report.not_finite
    assert (not_finite.nan, not_finite.infinite) == count_not_finite(array)
    # Whatever the blocks are: the checksum is that of all of them.
    content = next(path.glob("*.distcp"))
    data = bytearray(content.read_bytes())
    start = data.index(array.tobytes())
    data[start + 100] ^= 1
    content.write_bytes(data)
    assert not verify(path).good


@examples()
@given(st.lists(st.integers(0, 12 << 20), max_size=40), st.integers(0, 1200))
def test_batches_are_in_order_and_bounded(sizes: list[int], empty: int) -> None:
    sizes = [*sizes, *[0] * empty]
    grouped = list(batches((size, (k, size)) for k, size in enumerate(sizes)))
    assert [item for batch in grouped for item in batch] == list(enumerate(sizes))
    for batch in grouped:
        assert 0 < len(batch) <= 512
        assert sum(size for _, size in batch[:-1]) < 8 << 20
    assert len(grouped) <= sum(sizes) // (8 << 20) + len(sizes) // 512 + 1
