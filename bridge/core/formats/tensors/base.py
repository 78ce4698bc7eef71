"""The common interface of all checkpoint formats: boxes, tensor descriptions, and the reader and writer protocols.

A checkpoint is a set of named tensors, each stored as chunks, plus named values that are not tensors ("objects").
A chunk is a Box: an axis-aligned block of the global tensor.

      0        4      6
    0 +--------+------+      shape (5, 6), three chunks:
      |   A    |  B   |      A = Box((0, 0), (2, 4))
    2 +--------+------+      B = Box((0, 4), (2, 2))
      |       C       |      C = Box((2, 0), (3, 6))
    5 +---------------+
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import add, le
from pathlib import Path
from types import EllipsisType, MappingProxyType
from typing import Final, NamedTuple, Protocol, Self, TypeAlias

import ml_dtypes
import numpy as np

from bridge.core.dtype_names import BYTES, FLOAT8, NARROW_INTEGERS, ONLY_JAX

# Where a leaf sits in the tree: str = mapping key, int = position in a list.
TreePath: TypeAlias = tuple[str | int, ...]


COPY_AGAIN: Final = "copy or download it again, or save it anew"
"""What to do about a file that is truncated or damaged."""


class CheckpointError(Exception):
    """A checkpoint cannot be read or written as asked: malformed, truncated, hostile, incomplete or misused."""


class UnreadableValue(CheckpointError):
    """An object whose value is not plain data. reason: what it is; holds_tensors: whether it contains tensors."""

    def __init__(self, message: str, reason: str, holds_tensors: bool) -> None:
        super().__init__(message)
        self.reason, self.holds_tensors = reason, holds_tensors


ORBAX_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {name: np.dtype(getattr(ml_dtypes, name, name)) for name in (*BYTES, *FLOAT8, *ONLY_JAX)}
)
"""DTYPES and those that only JAX has, which Orbax stores with a byte per element, and PyTorch and safetensors lack."""
DTYPES: Mapping[str, np.dtype] = MappingProxyType({name: ORBAX_DTYPES[name] for name in (*BYTES, *FLOAT8)})


_NAMES = {dtype: name for name, dtype in ORBAX_DTYPES.items()}


@cache
def name_of(dtype: np.dtype) -> str:
    """The dtype's own name, cached: NumPy builds it anew at each access."""
    return str(dtype.name)


def is_whole(dtype: np.dtype) -> bool:
    """Whether elements are integers or booleans. NumPy counts ml_dtypes' integers among its unknown kinds."""
    return dtype.kind in "biu" or name_of(dtype) in NARROW_INTEGERS


def dtype_from_name(name: str) -> np.dtype:
    """The NumPy (or ml_dtypes) dtype called `name`, e.g. "bfloat16". CheckpointError for an unknown name.

    File readers use it, so short names (`bridge.core.dtype_names`) are unknown here.
    """
    if name not in ORBAX_DTYPES:
        raise CheckpointError(f"expected a dtype out of {', '.join(ORBAX_DTYPES)}, got {name[:80]!r}")
    return ORBAX_DTYPES[name]


def dtype_name(dtype: np.dtype, known: Mapping[str, np.dtype] = ORBAX_DTYPES) -> str:
    """The name PyTorch and JAX use for `dtype`. CheckpointError for one that is not known (e.g. strings)."""
    dtype = np.dtype(dtype)
    # NumPy builds a dtype's name anew at each access, which takes longer than everything else here.
    name = _NAMES.get(dtype)
    if name is None or name not in known:
        raise CheckpointError(f"expected a little-endian dtype out of {', '.join(known)}, got {dtype!r}")
    return name


@dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor: elements `offsets[a] <= i < offsets[a] + sizes[a]` on each axis a."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"expected as many offsets as sizes, got {self.offsets} and {self.sizes}")
        if self.offsets and (min(self.offsets) < 0 or min(self.sizes) < 0):
            raise ValueError(f"expected no negative offset or size, got {self.offsets} and {self.sizes}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements inside."""
        return math.prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """The first index after the box, per axis."""
        return tuple(map(add, self.offsets, self.sizes))

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether the box has the rank of `shape` and lies within it."""
        # With `map`: a generator's overhead exceeds the computation, and there may be 100,000 tensors.
        return len(self.sizes) == len(shape) and all(map(le, self.stops, shape))

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes, or None if there are none (also when either box is empty)."""
        if self == other:
            return None if 0 in self.sizes else self
        low = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(b - a for a, b in zip(low, map(min, self.stops, other.stops), strict=True))
        return Box(low, sizes) if all(s > 0 for s in sizes) else None

    def slices(self, outer: Box | None = None) -> tuple[slice | EllipsisType, ...]:
        """Index of this box in an array of the global tensor, or in an array of just the box `outer`.

        Begins with an Ellipsis, so that indexing an array of rank 0 also gives an array.
        """
        base = outer.offsets if outer is not None else (0,) * len(self.offsets)
        starts = [o - b for o, b in zip(self.offsets, base, strict=True)]
        return (..., *(slice(o, o + s) for o, s in zip(starts, self.sizes, strict=True)))


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor.

    name: DCP's flat key "model.layers.0.wq.weight", or Orbax's path joined by "/" "params/layers/0/wq".
    path: the same leaf as a tree path; ints are list positions.
    shape: global shape, elements. dtype: a value of ORBAX_DTYPES. chunks: stored blocks that cover each element once.
    """

    name: str
    path: TreePath
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[Box, ...]

    def __post_init__(self) -> None:
        if min(self.shape, default=0) < 0:
            raise ValueError(f"tensor {self.name!r}: expected no negative dimension, got shape {self.shape}")
        for chunk in self.chunks:
            if not chunk.inside(self.shape):
                raise ValueError(f"tensor {self.name!r}: expected chunks inside {self.shape}, got {chunk}")

    def named(self, name: str, path: TreePath) -> TensorInfo:
        """Another tensor with this shape, dtype and chunks, which are not checked again."""
        # Takes a sixth of the time of `TensorInfo(...)`, which matters for 20,000 tensors that are alike.
        other = object.__new__(TensorInfo)
        put = object.__setattr__
        put(other, "name", name)
        put(other, "path", path)
        put(other, "shape", self.shape)
        put(other, "dtype", self.dtype)
        put(other, "chunks", self.chunks)
        return other

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, uncompressed."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Loan:
    """Borrowed elements: `array` is read-only and row-major. `give_back` allows its memory to be reused.

    crc: the CRC-32C of the elements, if they were compared with one, so that it need not be calculated again.
    """

    array: np.ndarray
    give_back: Callable[[], None]
    crc: int | None = None


Wanted: TypeAlias = tuple[str, memoryview]
"""A tensor's name, and memory for all of its elements."""


class Checksums(NamedTuple):
    """Known checksums of elements in row-major order: their CRC-32, as in zip, and their CRC-32C."""

    crc32: int | None = None
    crc32c: int | None = None


Fill: TypeAlias = Callable[[Sequence[int], Sequence[memoryview]], Sequence[Checksums | None]]
"""Fills memory for chunks by their positions in a list; see `CheckpointWriter.write_from`."""

Elements: TypeAlias = np.ndarray | Sequence[np.ndarray]
"""The elements of a box: as an array, or as parts that follow each other in row-major order."""


class CheckpointReader(Protocol):
    """A checkpoint opened for reading. Opening reads only metadata; the files are never written to."""

    @property
    def format(self) -> str:
        """One of FORMATS or READ_ONLY_FORMATS of `bridge.core.formats`."""

    @property
    def path(self) -> Path | str:
        """The checkpoint's directory or file, or its URL."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by name."""

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name: None, bool, int, float, str, list, tuple, dict.

        Looking one up may read it, and raises CheckpointError when the value has another type.
        """

    @property
    def object_paths(self) -> Mapping[str, TreePath]:
        """The tree path of every object, by name."""

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block (default: all) of a tensor, in the stored dtype, C-contiguous, in newly allocated memory.

        Needs memory for the box, plus one chunk if chunks are compressed. KeyError for an unknown name, ValueError for
        a box outside the tensor, CheckpointError for damaged data.
        """

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        """The block in reusable memory, checked as in `read`, if it is contiguous in a file; else None.

        offset: the byte of a file to which the elements will be written. The memory begins at the same distance from a
        multiple of 4096, so that the elements can be written directly. Errors as in `read`.
        """

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        """Read each of these tensors whole, in row-major order, into its memory; return the computed checksums.

        For small tensors that are one chunk each, stored unchanged in a local file: neighbours are read together.
        Checked as in `read`. None for all other tensors, and if anything is wrong, which `read` then reports; the
        memory's content is undefined then.
        """

    def files(self) -> Sequence[Path]:
        """The checkpoint's files that reading opens; none if it is in a store, at a URL."""

    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""

    def __enter__(self) -> Self: ...

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None: ...


def unreadable(reader: CheckpointReader) -> Mapping[str, str]:
    """Why tensors are listed but cannot be read, by name: only some formats have such, see `SafetensorsReader`."""
    reasons: Mapping[str, str] = getattr(reader, "unreadable", {})
    return reasons


def drop_options(names: Sequence[str], most: int = 40) -> str:
    """Command-line options that leave out exactly these names, quoted for a shell."""
    patterns = (glob.escape(name).replace("'", "'\"'\"'") for name in names[:most])
    shown = " ".join(f"--drop '{pattern}'" for pattern in patterns)
    return shown + (" ..." if len(names) > most else "")


def require_tensor(reader: CheckpointReader, name: str) -> None:
    """CheckpointError for a tensor that is listed but cannot be read."""
    reason = unreadable(reader).get(name)
    if reason is not None:
        raise CheckpointError(
            f"{reader.path}: tensor {name!r}: expected a tensor that can be read, found {reason}: leave it out "
            f"({drop_options([name])})"
        )


class CheckpointWriter(Protocol):
    """A new checkpoint. It appears at `path` on commit, complete, or never.

    Declare tensors, then write every box of `chunks(name)` exactly once in any order, then commit. As a context
    manager: commits on a clean exit, aborts on an exception.
    """

    @property
    def format(self) -> str:
        """ "dcp", "orbax" or "safetensors"."""

    @property
    def path(self) -> Path:
        """Where the checkpoint will be. Must not exist: FileExistsError at construction."""

    def add_tensor(
        self,
        path: str | Sequence[str | int],
        shape: Sequence[int],
        dtype: np.dtype,
        chunk_shape: Sequence[int] | None = None,
    ) -> TensorInfo:
        """Declare a tensor; its `name` in the result is what `chunks` and `write` take.

        path: tree path (ints are list positions), or the name. chunk_shape: the preferred stored block size; default:
        the writer's choice, blocks that are small enough for memory. CheckpointError for a repeated name or a dtype the
        format lacks.
        """

    def chunks(self, name: str) -> tuple[Box, ...]:
        """The boxes that `write` expects, covering the tensor once; none for a tensor without elements."""

    def position(self, name: str, box: Box | None = None) -> tuple[str, int]:
        """The file and byte at which a tensor (once all are declared) or a chunk's data begins; ("", 0) if unknown."""

    def stored(self, name: str) -> frozenset[Box]:
        """The boxes of `chunks(name)` that a resumed attempt has already stored: they must not be written again."""

    def write(self, name: str, box: Box, array: Elements, *, crc: int | None = None) -> None:
        """Store one of `chunks(name)`; `array` has the box's sizes and the tensor's dtype, in any memory order.

        It may come in parts, whose concatenated elements are those of the box in row-major order. crc: the CRC-32C of
        the elements, if the caller has compared them with one.

        CheckpointError for another box, shape or dtype (nothing is cast), or a box written before.
        """

    def write_from(self, chunks: Sequence[tuple[str, Box]], fill: Fill) -> Sequence[bool]:
        """Like `write`, for small chunks that ``fill`` puts, in row-major order, into the writer's own memory.

        So the elements of many small tensors go from file to file without another copy. ``fill`` is called with the
        positions of any number of chunks and memory for each. It returns the known checksums of each chunk, or None for
        a chunk that it does not fill. The result is False for a chunk that is not written: not filled, not small, or
        not on a local file system. Errors as in `write`, and from ``fill``.
        """

    def add_object(self, path: str | Sequence[str | int], value: object) -> None:
        """Store a value that is not a tensor: None, bool, int, float, str, or list, tuple, dict of these."""

    def add_kinds(self, kinds: Mapping[str, str]) -> None:
        """Declare special kinds of leaves of a JAX tree, by the names of tensors and objects; see `leaves.py`.

        Call it after declaring tensors and objects, and before the first `write`. CheckpointError for a typed key whose
        tensor is not uint32 in Orbax.
        """

    def commit(self) -> None:
        """Check that every chunk was written, sync to disk, and make the checkpoint appear."""

    def abort(self) -> None:
        """Remove everything written. Does nothing after commit or abort."""

    def __enter__(self) -> Self: ...

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None: ...
