"""Arrays of random bits, and bitwise equality of arrays and checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bridge.core.formats import open_checkpoint


def random_bits(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    """Random bit patterns, including NaNs of many payloads, infinities, denormals and both zeros."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, size=int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    if dtype == np.bool_:
        raw &= 1
    return np.frombuffer(raw.tobytes(), dtype).reshape(shape)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether shape, dtype and every bit are equal."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def assert_same_checkpoints(path: Path, expected: Path) -> None:
    """All tensors and objects: names, tree paths, shapes, dtypes, and every bit."""
    with open_checkpoint(path) as ours, open_checkpoint(expected) as theirs:
        assert {n: (i.path, i.shape, i.dtype) for n, i in ours.tensors.items()} == {
            n: (i.path, i.shape, i.dtype) for n, i in theirs.tensors.items()
        }
        for name in theirs.tensors:
            assert ours.read(name).tobytes() == theirs.read(name).tobytes(), name
        assert dict(ours.object_paths) == dict(theirs.object_paths)
        assert dict(ours.objects) == dict(theirs.objects)
