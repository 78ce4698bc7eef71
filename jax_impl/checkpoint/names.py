"""The names of a train state's tensors in a checkpoint.

::

    params/<path>                   main weights, one array per parameter
    opt_state/<name>/<path>         every dict of arrays by key in the optimizer's state: mu, nu; 0/mu in a chain
    opt_state/<name>_scale/<path>   float32 scales of moments in low precision: shape (*shape[:-1], 1)
    opt_state/<name>                every other leaf: count; random keys as their uint32 data
    variables/<path>                the model's other variables; random keys likewise
    train/...                       the caller's values

Parameters without moments (frozen, or excluded by ``optax.masked``) have no moments in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from bridge.core.formats import CheckpointError, TreePath
from bridge.core.text import first_of
from jax_impl.checkpoint.by_path import TreeReader
from jax_impl.runtime.groups.sharding_plan import Buffers, ShardingPlan
from jax_impl.runtime.groups.variables import is_key

# Random keys are saved as numbers; the object with this name records their algorithms.
KEY_IMPLS: TreePath = ("random_key_impls",)


class ShapeDtype(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype


def optimizer_tensors(plan: ShardingPlan, opt_state: Any) -> dict[str, Any]:
    """The entries of an optimizer state, abstract or not, by name: arrays by key, or a single array."""
    entries: dict[str, Any] = {}
    for keys, leaf in jax.tree.leaves_with_path(opt_state):
        located = plan.locate_buffer(keys, leaf)
        parts = parts_of(keys if located is None else located[1])
        name = "/".join(parts)
        if located is not None:
            entries.setdefault(name, {})[located[0]] = leaf
            continue
        # An array that is sharded over devices in a way that only its optimizer knows.
        cut = isinstance(leaf, jax.Array) and not leaf.sharding.is_fully_replicated
        if cut or not all(parts):
            raise ValueError(
                f"optimizer state {name!r}: expected an array for each weight array, or a named array that is whole "
                f"on every device, got {leaf.dtype} of shape {leaf.shape}"
            )
        entries[name] = leaf
    return entries


def parts_of(keys: tuple[Any, ...]) -> list[str]:
    """The name of a leaf of the optimizer state, part by part."""
    return ["opt_state", *(jax.tree_util.keystr((key,), simple=True) for key in keys)]


def state_tensors(plan: ShardingPlan, weights: Buffers, opt_state: Any) -> dict[str, ShapeDtype]:
    """Shape and dtype of every array in a checkpoint of this plan and optimizer, except ``train``.

    ``weights`` and ``opt_state`` may be abstract; ``opt_state`` None: no optimizer.
    """
    expected = {}
    variables = {f"variables/{path}": variable for path, variable in plan.variables.items()}
    for name, value in {"params": weights, **optimizer_tensors(plan, opt_state), **variables}.items():
        if isinstance(value, Mapping):
            for path in plan.parameters:
                if (key := plan.holding(value, path)) is not None:
                    shape = plan.tensor_shape(key, path) or ()
                    expected[f"{name}/{path}"] = ShapeDtype(shape, np.dtype(value[key].dtype))
        else:
            stored = jax.eval_shape(as_stored, jax.ShapeDtypeStruct(value.shape, value.dtype))
            expected[name] = ShapeDtype(tuple(stored.shape), np.dtype(stored.dtype))
    return expected


def as_stored(array: jax.Array) -> jax.Array:
    """A variable, or a leaf of an optimizer's state, as an array of numbers."""
    return jax.random.key_data(array) if is_key(array) else array


def key_impl(array: Any) -> str | None:
    """The algorithm of an abstract random key, such as "threefry2x32"; None for other arrays."""
    impls: list[str] = []
    if is_key(array):
        # Only arrays know their algorithm; dtypes do not.
        abstract = jax.ShapeDtypeStruct((), array.dtype)
        jax.eval_shape(lambda key: impls.append(str(jax.random.key_impl(key))), abstract)
    return impls[0] if impls else None


def key_impls(plan: ShardingPlan) -> dict[str, str]:
    """The algorithm of every random key among the model's variables."""
    return {path: impl for path, variable in plan.variables.items() if (impl := key_impl(variable))}


def check_key_impls(reader: TreeReader, expected: Mapping[str, str], saved: Mapping[str, object]) -> None:
    """``saved``: the recorded algorithms; for keys that other programs saved, only the size is known."""
    wrong = [
        f"variables/{path} (expected {impl}, got {saved[path]})"
        for path, impl in expected.items()
        if saved.get(path, impl) != impl
    ]
    if wrong:
        raise CheckpointError(
            f"{reader.path}: random keys whose algorithm differs from this model's: {first_of(wrong)}; build the "
            "model with keys of that algorithm (jax_default_prng_impl)"
        )


def train_tensors(
    train: Mapping[str, Any], parents: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Tree path and array of every value; raises ``ValueError`` that names a value which cannot be saved."""
    for key, value in train.items():
        path = (*parents, key)
        name = "/".join(map(str, ("train", *path)))
        if not isinstance(key, str) or not key or "/" in key:
            raise ValueError(f"{name}: expected keys to be non-empty strings without '/', got {key!r}")
        if isinstance(value, Mapping) and value:
            yield from train_tensors(value, path)
        elif isinstance(value, np.ndarray | np.generic):
            yield ("train", *path), np.asarray(value)
        elif type(value) is int and -(2**63) <= value < 2**63:
            yield ("train", *path), np.asarray(value, np.int64)
        else:
            raise ValueError(
                f"{name}: expected a NumPy array, an int of at most 64 bits or a mapping of these, got "
                f"{type(value).__name__} {value!r:.80}"
            )


def train_values(reader: TreeReader) -> dict[str, Any]:
    """The nested dict that was saved."""
    values: dict[tuple[str, ...], Any] = {}
    for name, info in reader.tensors.items():
        if len(info.path) > 1 and info.path[0] == "train":
            array = reader.read(name)
            is_int = array.ndim == 0 and array.dtype.kind in "iu"
            values[tuple(map(str, info.path[1:]))] = int(array) if is_int else array
    return unflatten_dict(values)
