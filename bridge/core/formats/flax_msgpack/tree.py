"""The leaves of a tree of flax.serialization, and which of its numbered keys are positions in lists.

flax writes lists and tuples as maps with the keys "0", "1", ...: so does it with a dict that has these keys. In an
optimizer's state they are positions, as in the tuples of optax, but for those in the part of a path that is a weight's:

    opt_state/0/mu/blocks/0/kernel         ("opt_state", 0, "mu", "blocks", "0", "kernel")    params/blocks/0/kernel
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from bridge.core.formats.flax_msgpack.parser import CHUNKED, StoredArray
from bridge.core.formats.tensors.base import ORBAX_DTYPES, CheckpointError, TreePath

OPTIMIZER: Final = frozenset({"opt_state", "optimizer"})
_UNREADABLE: Final = np.dtype(np.uint8)


@dataclass(frozen=True)
class Pieces:
    """An array whose elements are in one or several pieces of the file, in row-major order.

    places: first byte and number of bytes of each piece. unreadable: the dtype, where it is none of ORBAX_DTYPES.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    places: tuple[tuple[int, int], ...]
    unreadable: str | None = None


def leaves(root: object, what: str) -> Iterator[tuple[TreePath, object]]:
    """Each leaf with its path: Pieces of an array, or another value. CheckpointError when the root is no map."""
    if not isinstance(root, dict):
        raise CheckpointError(f"{what}: expected a tree with keys, found {type(root).__name__}")
    walked = list(_walk(root, (), what))
    weights = {path[1:] for path, _ in walked if path[0] in ("params", "target", "model") and len(path) > 1}
    paths = {path for path, _ in walked}
    for path, value in walked:
        yield (_with_positions(path, weights, paths) if path[0] in OPTIMIZER else path), value


def _walk(node: object, path: TreePath, what: str) -> Iterator[tuple[TreePath, object]]:
    where = f"{what}: {'/'.join(map(str, path))!r:.200}"
    if isinstance(node, StoredArray):
        yield path, _pieces([node], node.shape, where)
    elif isinstance(node, dict) and CHUNKED in node:
        yield path, _chunked(node, where)
    elif isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _walk(value, (*path, key), what)
    elif isinstance(node, list) and any(
        isinstance(value, dict | list | StoredArray | complex) for value in node
    ):
        for number, value in enumerate(node):
            yield from _walk(value, (*path, number), what)
    elif path:
        yield path, node


def _chunked(node: dict[str, object], where: str) -> Pieces:
    shape, chunks = (_in_order(node.get(key)) for key in ("shape", "chunks"))
    sizes = tuple(n for n in shape or () if type(n) is int and n >= 0)
    arrays = [chunk for chunk in chunks or () if isinstance(chunk, StoredArray) and len(chunk.shape) == 1]
    if (
        shape is None
        or chunks is None
        or len(sizes) != len(shape)
        or not arrays
        or len(arrays) != len(chunks)
    ):
        raise CheckpointError(
            f"{where}: expected the shape and the chunks of one array, found something else"
        )
    if len({array.dtype for array in arrays}) > 1:
        raise CheckpointError(f"{where}: expected chunks of one dtype, found several")
    return _pieces(arrays, sizes, where)


def _in_order(node: object) -> list[object] | None:
    if not isinstance(node, dict) or set(node) != {str(k) for k in range(len(node))}:
        return None
    return [node[str(k)] for k in range(len(node))]


def _pieces(arrays: list[StoredArray], shape: tuple[int, ...], where: str) -> Pieces:
    name = arrays[0].dtype
    dtype = ORBAX_DTYPES.get("bfloat16" if name == "V2" else name)
    nbytes = sum(array.nbytes for array in arrays)
    if any(size >= 1 << 63 for size in shape):
        raise CheckpointError(f"{where}: expected sizes below 2**63, got {shape!r:.200}")
    expected = math.prod(shape) * (dtype or _UNREADABLE).itemsize
    if dtype is not None and nbytes != expected:
        raise CheckpointError(f"{where}: expected {expected} bytes for {name} {shape}, got {nbytes}")
    places = tuple((array.start, array.nbytes) for array in arrays if array.nbytes)
    if dtype is None:
        return Pieces(shape, _UNREADABLE, places, f"{name!r:.80}, which is no dtype known here")
    return Pieces(shape, dtype, places)


def _with_positions(path: TreePath, weights: Collection[TreePath], paths: Collection[TreePath]) -> TreePath:
    start = next((k for k in range(1, len(path)) if path[k:] in weights), len(path))
    return tuple(
        int(key) if 0 < depth < start and isinstance(key, str) and _is_position(key) else key
        for depth, key in enumerate(path)
    )


def _is_position(key: str) -> bool:
    return key.isascii() and key.isdecimal() and (key == "0" or key[0] != "0") and len(key) < 19
