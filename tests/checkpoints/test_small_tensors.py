"""Many small tensors: what each costs is counted, in Python's calls, writes and opened files, not timed."""

from __future__ import annotations

import builtins
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.tensors.base import TensorInfo, dtype_from_name

FORMATS = ("dcp", "orbax", "safetensors")
FEW, MANY = 100, 300
SHAPES = ((8, 16), (16, 8), (128,), (), (3, 5))
DTYPES = ("float32", "bfloat16", "int64")

# Some 15 % above what was counted on 2026-11-26, in Python 3.11; later versions count fewer.
LIMITS = {
    ("dcp", "orbax"): 165,
    ("dcp", "safetensors"): 146,
    ("orbax", "dcp"): 152,
    ("orbax", "safetensors"): 134,
    ("safetensors", "dcp"): 144,
    ("safetensors", "orbax"): 145,
    ("open", "dcp"): 22,
    ("open", "orbax"): 17,
    ("open", "safetensors"): 9,
    ("inspect", "dcp"): 32,
    ("inspect", "orbax"): 28,
    ("inspect", "safetensors"): 20,
    ("verify", "dcp"): 99,
    ("verify", "orbax"): 88,
    ("verify", "safetensors"): 79,
    ("diff", "dcp"): 196,
    ("diff", "orbax"): 164,
    ("diff", "safetensors"): 134,
}


def make(path: Path, tensors: int) -> Path:
    rng = np.random.default_rng(tensors)
    with create_checkpoint(path, "safetensors") as writer:
        names = []
        for k in range(tensors):
            dtype = dtype_from_name(DTYPES[k % 3])
            names.append((writer.add_tensor((f"layers.{k}.w",), SHAPES[k % 5], dtype).name, dtype))
        for name, dtype in names:
            for box in writer.chunks(name):
                writer.write(name, box, rng.integers(-99, 99, box.sizes).astype(dtype))
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    folder = tmp_path_factory.mktemp("small")
    paths = {}
    for count in (FEW, MANY):
        first = make(folder / f"safetensors-{count}", count)
        for format in FORMATS:
            paths[format, count] = first
            if format != "safetensors":
                paths[format, count] = folder / f"{format}-{count}"
                convert(first, paths[format, count], to=format)
    return paths


def python_calls(work: Callable[[], object]) -> int:
    """Calls of functions written in Python, in this thread."""
    count = 0

    def count_calls(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(count_calls)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def per_tensor(work: Callable[[int], object]) -> float:
    """Calls for each tensor more; work(count) has that many."""
    work(FEW)  # imports and caches
    return (python_calls(lambda: work(MANY)) - python_calls(lambda: work(FEW))) / (MANY - FEW)


@pytest.mark.each_value
@pytest.mark.parametrize(("a", "b"), list(itertools.permutations(FORMATS, 2)))
def test_a_tensor_more_is_few_calls_more(
    a: str, b: str, sources: dict[tuple[str, int], Path], tmp_path: Path
) -> None:
    targets = (tmp_path / str(k) for k in itertools.count())
    calls = per_tensor(lambda count: convert(sources[a, count], next(targets), to=b, workers=1))
    assert calls < LIMITS[a, b]


@pytest.mark.each_value
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("work", ["open", "inspect", "verify", "diff"])
def test_reading_a_tensor_more_is_few_calls_more(
    work: str, format: str, sources: dict[tuple[str, int], Path]
) -> None:
    def run(count: int) -> object:
        path = sources[format, count]
        if work == "open":
            return open_checkpoint(path).close()
        if work == "inspect":
            return inspect(path)
        return verify(path, workers=1) if work == "verify" else diff(path, path)

    calls = per_tensor(run)
    assert calls < LIMITS[work, format]


@pytest.mark.parametrize("format", FORMATS)
def test_tensors_alike_are_declared_and_opened_as_each_alone(format: str, tmp_path: Path) -> None:
    wishes: tuple[tuple[int, ...] | None, ...] = (None, (2, 16), (8, 5))
    cases = [((8, 16), dtype, wish) for dtype in ("float32", "int8") for wish in wishes]
    cases += [((8, 16, 1), "int8", None), ((), "int8", None), ((0, 16), "int8", None)]
    with create_checkpoint(tmp_path / "all", format) as writer:
        infos = []
        for k, (shape, dtype, wish) in enumerate(cases * 2):
            infos.append(writer.add_tensor(("layers", f"n{k}", "w"), shape, dtype_from_name(dtype), wish))
        for k, info in enumerate(infos):
            for box in writer.chunks(info.name):
                writer.write(info.name, box, np.full(box.sizes, k, info.dtype))
    for k, (shape, dtype, wish) in enumerate(cases * 2):
        alone = create_checkpoint(tmp_path / "alone", format)
        path = ("layers", f"n{k}", "w")
        info = alone.add_tensor(path, shape, dtype_from_name(dtype), wish)
        alone.abort()
        assert infos[k] == info == TensorInfo(info.name, path, shape, dtype_from_name(dtype), info.chunks)
    assert {len(info.chunks) for info in infos} == ({0, 1} if format == "safetensors" else {0, 1, 4})
    with open_checkpoint(tmp_path / "all") as reader:
        for k, info in enumerate(infos):
            opened = reader.tensors[info.name]
            assert (opened.name, opened.path, opened.shape) == (info.name, info.path, info.shape)
            assert opened.dtype == info.dtype
            assert (reader.read(info.name) == k).all()


@pytest.mark.fast_cases("dcp-orbax", "orbax-safetensors", "safetensors-dcp")
@pytest.mark.parametrize(("a", "b"), list(itertools.product(FORMATS, FORMATS)))
def test_small_tensors_are_exact_and_written_together(
    a: str, b: str, sources: dict[tuple[str, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, opened, syncs = [], [], []
    real_pwrite, real_open, real_os_open, real_sync = os.pwrite, builtins.open, os.open, os.fdatasync

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        writes.append(len(data))
        return real_pwrite(descriptor, data, offset)

    def counted(real: Callable[..., object], events: list[object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            events.append(args[0])
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        patch.setattr(builtins, "open", counted(real_open, opened))
        patch.setattr(os, "open", counted(real_os_open, opened))
        patch.setattr(os, "fdatasync", counted(real_sync, syncs))
        convert(sources[a, MANY], tmp_path / "c", to=b, workers=2)
    assert len(writes) < 20, f"{len(writes)} writes for {MANY} tensors"
    assert len(opened) < 60, f"{len(opened)} files opened"
    assert len(syncs) < 10
    report = diff(sources["safetensors", MANY], tmp_path / "c")
    assert report.within
    assert report.max_ulp == 0
    assert len(report.tensors) == MANY
    assert verify(tmp_path / "c").good
    with open_checkpoint(tmp_path / "c") as reader:
        assert len(reader.tensors) == MANY
