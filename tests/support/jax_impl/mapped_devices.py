"""Emulate ``jax.shard_map`` on one device: mesh axes become mapped axes, and collectives become sums and copies.

Programs for accelerators can so run with different data on each of several devices. On simulated devices their
unordered collectives could meet in different orders and hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

import jax_impl.runtime.unit.unit
from jax_impl.runtime.groups.sharding_plan import ShardingPlan


def as_accelerators(monkeypatch: Any) -> None:
    """From now on plans are made as for accelerators, and their steps run on one device."""
    monkeypatch.setattr(ShardingPlan, "chained", False)
    monkeypatch.setattr(jax, "shard_map", _mapped)
    # Not the user's vmap.
    monkeypatch.setattr(jax_impl.runtime.unit.unit, "is_mapped", lambda values: None)


def _mapped(
    function: Callable[..., Any],
    *,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    axis_names: set[str],
    check_vma: bool,
) -> Callable[..., Any]:
    assert axis_names == set(mesh.axis_names), "no vmap is automatic"
    names, sizes = mesh.axis_names, dict(mesh.shape)
    for name in reversed(names):
        function = jax.vmap(function, axis_name=name)

    def axes_of(entry: Any) -> tuple[str, ...]:
        return entry if isinstance(entry, tuple) else () if entry is None else (entry,)

    def cut(spec: PartitionSpec, x: jax.Array) -> jax.Array:
        """Axes of the mesh first."""
        where: dict[str, int] = {}
        at = 0
        for size, entry in zip(x.shape, (*spec, *[None] * (x.ndim - len(spec))), strict=True):
            axes = axes_of(entry)
            parts = [sizes[name] for name in axes]
            where.update((name, at + i) for i, name in enumerate(axes))
            x = x.reshape(*x.shape[:at], *parts, size // math.prod(parts), *x.shape[at + 1 :])
            at += len(axes) + 1
        cut_over = [name for name in names if name in where]
        x = jnp.moveaxis(x, [where[name] for name in cut_over], range(len(cut_over)))
        for at, name in enumerate(names):
            if name not in where:
                x = jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], sizes[name], *x.shape[at:]))
        return x

    def joined(spec: PartitionSpec, x: jax.Array) -> jax.Array:
        used = [name for name in names if any(name in axes_of(entry) for entry in spec)]
        for at, name in reversed(list(enumerate(names))):
            if name not in used:
                x = x[(slice(None),) * at + (0,)]
        for entry_at, entry in enumerate(spec):
            for name in reversed(axes_of(entry)):
                at, left = used.index(name), len(used) - 1
                x = jnp.moveaxis(x, at, left + entry_at)
                used.remove(name)
                at = left + entry_at
                x = x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])
        return x

    def of_all(each: Any, specs: Any, values: Any) -> Any:
        return jax.tree.map(
            lambda spec, value: jax.tree.map(lambda x: each(spec, x), value),
            specs,
            values,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def run(*args: Any) -> Any:
        return of_all(joined, out_specs, function(*of_all(cut, in_specs, args)))

    return run
