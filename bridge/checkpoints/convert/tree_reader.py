"""A JAX tree in memory as a template: the state of the destination's program, or its shapes from `jax.eval_shape`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bridge.core.formats.tensors.arrays import array_checksum
from bridge.core.formats.tensors.base import Box, CheckpointError, TensorInfo, TreePath
from bridge.core.formats.tensors.leaves import SCALAR, STRING, empty_kind, key_kind
from bridge.core.formats.tensors.wrapping import ComputedReader


class TreeReader(ComputedReader):
    """The leaves of ``tree`` where stock Orbax saves them: arrays, shapes with dtypes, numbers, text and empty nodes.

    fingerprint: of all names, shapes, dtypes and values. Raises CheckpointError for another leaf, and for the value of
    a leaf that is a shape.
    """

    format = "orbax"

    def __init__(self, tree: object) -> None:
        self.path: Path | str = f"the {type(tree).__name__} in memory"
        self.tensors: dict[str, TensorInfo] = {}
        self.objects: dict[str, object] = {}
        self.object_paths: Mapping[str, TreePath] = {}
        self.kinds: dict[str, str] = {}
        self._leaves: dict[str, object] = {}
        paths: dict[str, TreePath] = {}
        for keys, leaf in jax.tree.leaves_with_path(tree, is_leaf=_is_empty):
            path = tuple(key_of(key) for key in keys)
            name = "/".join(map(str, path))
            if not path or name in paths:
                raise CheckpointError(
                    f"{self.path}: expected a tree of leaves with different names, got {name!r}"
                )
            paths[name] = path
            self._add(name, path, leaf)
        self.object_paths = {name: paths[name] for name in self.objects}
        reason = (
            "expected values, since the source has none; found a shape: give an array in the template's tree"
        )
        shapes = (name for name, leaf in self._leaves.items() if isinstance(leaf, jax.ShapeDtypeStruct))
        self.unreadable = dict.fromkeys(shapes, reason)
        digest = hashlib.sha256(f"{self.objects} {self.kinds}".encode())
        for name, info in self.tensors.items():
            crc = "" if name in self.unreadable else array_checksum(self.read(name))
            digest.update(f"{name} {info.shape} {info.dtype} {crc}\n".encode())
        self.fingerprint = digest.hexdigest()[:16]

    def _add(self, name: str, path: TreePath, leaf: Any) -> None:
        if isinstance(leaf, int | float | np.generic):
            self.kinds[name], leaf = SCALAR, np.asarray(leaf)
        elif isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            kinds: list[str] = []

            def data(key: jax.Array) -> jax.Array:
                # Only a traced key tells the implementation of a shape.
                kinds.append(key_kind(str(jax.random.key_impl(key))))
                return jax.random.key_data(key)

            shape = jax.eval_shape(data, leaf)
            (self.kinds[name],) = kinds
            leaf = jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else shape
        is_deleted = isinstance(leaf, jax.Array) and leaf.is_deleted()
        is_array = isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
        if is_array and not is_deleted and leaf.dtype != object:
            self._leaves[name] = leaf
            self.tensors[name] = TensorInfo(
                name, path, tuple(leaf.shape), np.dtype(leaf.dtype), (Box.whole(leaf.shape),)
            )
        elif isinstance(leaf, str):
            self.kinds[name], self.objects[name] = STRING, leaf
        elif _is_empty(leaf):
            # Orbax saves a state without fields, such as `optax.EmptyState()`, as None.
            self.kinds[name] = empty_kind(leaf) or "None"
            self.objects[name] = leaf if empty_kind(leaf) else None
        else:
            raise CheckpointError(
                f"{self.path}: {name}: expected an array, a shape with a dtype, a number or text, got "
                f"{'a deleted array' if is_deleted else type(leaf).__name__} (for a PyTorch state, give the path of a "
                "file that torch.save wrote)"
            )

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        if name in self.unreadable:
            raise CheckpointError(f"{self.path}: {name}: {self.unreadable[name]}")
        whole = np.asarray(self._leaves[name])
        return np.array(whole if box is None else whole[box.slices()], order="C")


def _is_empty(node: object) -> bool:
    """Whether a node has no leaf below it, and so is a leaf of a checkpoint."""
    return node is None or (isinstance(node, dict | list | tuple) and not node)


def key_of(key: object) -> str | int:
    """A key of a path, as Orbax names it."""
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    if isinstance(key, jax.tree_util.GetAttrKey):
        return key.name
    if isinstance(key, jax.tree_util.FlattenedIndexKey):
        return int(key.key)
    if isinstance(key, jax.tree_util.DictKey):
        return str(key.key)
    raise CheckpointError(
        f"expected a tree of dicts, lists, tuples and classes with fields, got the key {key!r}"
    )
