"""Find a NaN or an infinity: in which weight, gradient or moment, in which rows, on which devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_impl.runtime.groups.memory_kinds import check_not_donated
from jax_impl.runtime.groups.sharding_plan import ShardingPlan

Index = tuple[int, ...]


@dataclass(frozen=True)
class NonFinite:
    """One parameter or other array with elements that are not finite.

    kind: where in the given pytree: "weights", "opt_state/mu"; "" in a dictionary of arrays by key.
    name: path of the parameter or variable; ``"padding of 'layers/0'"`` for elements that belong to no parameter.
    nan, inf: number of elements; for several copies, in the copy with the most.
    rows: indices of the first rows with such elements, over all dimensions but the last; for vectors, of the elements.
    devices: the devices of this process that hold such rows.
    """

    kind: str
    name: str
    nan: int
    inf: int
    rows: tuple[Index, ...]
    devices: tuple[str, ...]

    def __str__(self) -> str:
        rows = ", ".join(str(list(row)) for row in self.rows)
        what = f"{self.kind} {self.name}".strip()
        return f"{what}: {self.nan} NaN, {self.inf} infinite, rows {rows} (devices {', '.join(self.devices)})"


@dataclass
class _Found:
    """The findings for one name; ``counts``: NaNs and infinities by copy."""

    counts: dict[int, list[int]] = field(default_factory=dict)
    rows: set[Index] = field(default_factory=set)
    devices: dict[str, None] = field(default_factory=dict)

    def add(self, replica: int, nan: int, inf: int, device: str) -> None:
        total = self.counts.setdefault(replica, [0, 0])
        total[0] += nan
        total[1] += inf
        self.devices[device] = None


def find_nonfinite(plan: ShardingPlan, values: Any, *, max_rows: int = 8) -> tuple[NonFinite, ...]:
    """The parameters in ``values`` that are not finite, in model order, each with at most ``max_rows`` of its rows.

    ``values``: a ``TrainState``, arrays by key such as ``state.weights`` or the gradients of ``step.gradients``, an
    optimizer state, or any pytree of these. Integers and random keys are skipped.

    Nothing is gathered: each device tells which of its shards are finite, and only the other shards are copied to the
    host. All processes must call this; each reports its own devices, so their reports differ.

    Raises ``ValueError`` inside ``jax.jit``, and for donated arrays.
    """
    listed: list[tuple[Any, jax.Array]] = []
    for path, leaf in jax.tree.leaves_with_path(values):
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError(
                f"values{jax.tree_util.keystr(path)}: expected an array with values, got a traced one: call "
                "find_nonfinite on the results of the jitted function, or use watch_nonfinite_outputs"
            )
        check_not_donated(f"values{jax.tree_util.keystr(path)}", leaf)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            listed.append((path, leaf))
    suspects = _suspects(plan, [leaf for _, leaf in listed])
    faults: dict[tuple[str, str], _Found] = {}
    for number, (path, leaf) in enumerate(listed):
        for shard in leaf.addressable_shards:
            if (number, shard.device) in suspects:
                _look(plan, path, leaf, shard, max_rows, faults)
    order = {path: position for position, path in enumerate(plan.parameters)}
    trees = {tree: position for position, tree in enumerate(dict.fromkeys(tree for tree, _ in faults))}
    keys = sorted(faults, key=lambda key: (trees[key[0]], order.get(key[1], len(order))))
    return tuple(_report(*key, faults[key], max_rows) for key in keys)


def _suspects(plan: ShardingPlan, leaves: Sequence[jax.Array]) -> set[tuple[int, jax.Device]]:
    """``(number, device)`` of the shards that are not finite, or that the program cannot check."""
    specs: dict[int, PartitionSpec] = {
        number: leaf.sharding.spec
        for number, leaf in enumerate(leaves)
        if isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == plan.mesh
    }
    suspects = {
        (number, shard.device)
        for number, leaf in enumerate(leaves)
        if number not in specs
        for shard in leaf.addressable_shards
    }
    if not specs:
        return suspects
    finite = _finite([leaves[number] for number in specs], mesh=plan.mesh, specs=tuple(specs.values()))
    for shard in finite.addressable_shards:
        flags = np.asarray(shard.data)[0]
        suspects |= {(number, shard.device) for number, fine in zip(specs, flags, strict=True) if not fine}
    return suspects


@partial(jax.jit, static_argnames=("mesh", "specs"))
def _finite(leaves: list[jax.Array], *, mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> jax.Array:
    """``[devices, leaves]``: whether all elements of a device's shard are finite."""

    def local(shards: list[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.isfinite(shard).all() for shard in shards])[None]

    return jax.shard_map(
        local, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(mesh.axis_names), check_vma=False
    )(leaves)


def _look(
    plan: ShardingPlan,
    path: tuple[Any, ...],
    leaf: jax.Array,
    shard: Any,
    max_rows: int,
    faults: dict[tuple[str, str], _Found],
) -> None:
    values = np.asarray(shard.data)
    rest = _counts(values)
    tree, name = "", jax.tree_util.keystr(path, simple=True, separator="/")
    for tree, name, offsets, piece in _pieces(plan, path, leaf, shard, values):
        nan, inf = _counts(piece)
        rest = (rest[0] - nan, rest[1] - inf)
        if nan or inf:
            fault = faults.setdefault((tree, name), _Found())
            fault.add(shard.replica_id, nan, inf, str(shard.device))
            fault.rows |= set(_rows(piece, offsets, max_rows))
    if any(rest):
        located = plan.locate_buffer(path, leaf)
        key = located[0] if located else name
        fault = faults.setdefault((tree, f"padding of {key!r}"), _Found())
        fault.add(shard.replica_id, *rest, str(shard.device))


def _pieces(
    plan: ShardingPlan, path: tuple[Any, ...], leaf: jax.Array, shard: Any, values: np.ndarray
) -> Iterator[tuple[str, str, Index, np.ndarray]]:
    located = plan.locate_buffer(path, leaf)
    if located is None:
        # A variable's own path is its key in the state.
        tree = jax.tree_util.keystr(path[:-1], simple=True, separator="/")
        name = jax.tree_util.keystr(path[-1:], simple=True, separator="/")
        yield tree, name, tuple(part.start or 0 for part in shard.index), values
        return
    key, outer = located
    tree = jax.tree_util.keystr(outer, simple=True, separator="/")
    for piece in plan.stored(key).pieces(shard.index, values):
        yield tree, piece.path, piece.offsets, piece.values


def _counts(values: np.ndarray) -> tuple[int, int]:
    nan = int(np.isnan(values).sum())
    return nan, int((~np.isfinite(values)).sum()) - nan


def _rows(values: np.ndarray, offsets: Index, max_rows: int) -> Iterator[Index]:
    bad = ~np.isfinite(values)
    if values.ndim >= 2:
        bad = bad.any(axis=-1)
    for index in np.argwhere(bad)[:max_rows].tolist():
        yield tuple(at + start for at, start in zip(index, offsets, strict=False))


def _report(tree: str, name: str, fault: _Found, max_rows: int) -> NonFinite:
    nan, inf = max(tuple(count) for count in fault.counts.values())
    rows = tuple(sorted(fault.rows)[:max_rows])
    return NonFinite(tree, name, nan, inf, rows, tuple(fault.devices))
