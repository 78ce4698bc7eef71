"""Find the first unit whose output is not finite while compiled steps run.

A step that is traced while a watch is open has a callback at the end of each unit, which reports the unit's output on
each device to the host. The watch is part of the key of ``jax.jit``'s caches, so steps with and without a watch are
separate programs, and JAX keeps both::

    step(...)                                 compiled
    with watch_nonfinite_outputs(plan):
        step(...)                             compiled again, with callbacks
    step(...)                                 the first program
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from bridge.core.callers import warn_caller
from jax_impl.runtime.groups.sharding_plan import ShardingPlan


@dataclass(frozen=True)
class NonFiniteOutput:
    """A unit whose output is not finite.

    unit: its path, "" for the root, whose output is the loss's return value.
    layer: the layer of the unit's stack, or None.
    begins: whether such an output came from finite inputs; otherwise the fault is before the unit. In the pjit engine
        the loss's return value comes from all processes' rows, but a process sees only its own rows.
    nan, inf: number of elements, in the call and on the device with the most.
    devices: the devices of this process with such outputs. In the pjit engine, all devices see an array whose first
        dimension is not a multiple of the devices.
    """

    unit: str
    layer: int | None
    begins: bool
    nan: int
    inf: int
    devices: tuple[str, ...]

    def __str__(self) -> str:
        layer = "" if self.layer is None else f", layer {self.layer}"
        where = "from finite inputs" if self.begins else "from inputs that are not finite"
        return (
            f"output of {self.unit or '(root)'}{layer}: {self.nan} NaN, {self.inf} infinite, {where} (devices "
            f"{', '.join(self.devices)})"
        )


@dataclass
class _Seen:
    """``order``: the call's position in the order of tracing. ``clean``, ``spoiled``: whether such outputs came from
    finite inputs, and from nonfinite inputs.
    """

    order: int
    clean: bool = False
    spoiled: bool = False
    nan: int = 0
    inf: int = 0
    devices: set[int] = field(default_factory=set)


class _Watch:
    def __init__(self, plan: ShardingPlan) -> None:
        self.plan = plan
        self.found: list[NonFiniteOutput] = []
        self.calls = 0
        self._seen: dict[tuple[str, int | None], _Seen] = {}
        # The order at which a stack begins; its units run layer by layer.
        self._first: dict[str, int] = {}

    def add(
        self, unit: str, order: int, layer: int | None, nan: int, inf: int, clean: bool, device: int
    ) -> None:
        self.calls += 1
        if not nan and not inf:
            return
        if layer is not None:
            stack = _stack(unit)
            self._first[stack] = min(order, self._first.get(stack, order))
        seen = self._seen.setdefault((unit, layer), _Seen(order))
        seen.order = min(seen.order, order)
        seen.clean |= clean
        seen.spoiled |= not clean
        seen.nan, seen.inf = max((seen.nan, seen.inf), (nan, inf))
        seen.devices.add(device)
        self.found[:] = [self._output(*key) for key in sorted(self._seen, key=self._place)]

    def _place(self, key: tuple[str, int | None]) -> tuple[bool, int, int, int]:
        unit, layer = key
        seen = self._seen[key]
        if layer is None:
            return not self._begins(seen), seen.order, 0, seen.order
        return not self._begins(seen), self._first[_stack(unit)], layer, seen.order

    def _begins(self, seen: _Seen) -> bool:
        # In the pjit engine a device may hold a result of all devices' inputs.
        return seen.clean and not (seen.spoiled and self.plan.engine == "pjit")

    def _output(self, unit: str, layer: int | None) -> NonFiniteOutput:
        seen = self._seen[unit, layer]
        devices = self.plan.mesh.devices.flat
        names = tuple(str(devices[number]) for number in sorted(seen.devices))
        return NonFiniteOutput(unit, layer, self._begins(seen), seen.nan, seen.inf, names)


def _stack(unit: str) -> str:
    return unit.partition("/")[0]


# Whether programs are traced with a watch. A JAX context is part of the key of jit's caches. A Python variable would
# not be, and the first program of a step would be used with and without a watch.
WATCHING = jax.make_user_context(default_value=False)
_open: list[_Watch] = []
# Callbacks run in threads of the runtime while the program continues.
_lock = threading.Lock()
_orders = itertools.count()


@contextmanager
def watch_nonfinite_outputs(plan: ShardingPlan) -> Iterator[list[NonFiniteOutput]]:
    """Watch the output of every unit of ``plan`` in the steps that run while the context is open.

    ::

        with watch_nonfinite_outputs(plan) as found:
            state, metrics = step(state, batch)
        print(found[0])    # output of layers, layer 3: 12 NaN, 0 infinite, from finite inputs (devices TFRT_CPU_1)

    The list is complete when the context closes. Outputs that are not finite although the unit's inputs are come first,
    in the order in which units end, so the first entry is the innermost unit where the fault began. A unit in a stack
    is listed layer by layer; microbatches and recomputed forwards count as one. Each process sees its own devices.

    A step that was compiled before is compiled again with callbacks (``jax.debug.callback``), and is as fast as before
    when the context is closed. An earlier program of ``step.lower(...).compile()`` cannot be compiled again and is not
    watched: if nothing was seen at all, closing the context issues a ``RuntimeWarning``. A program that is compiled
    ahead of time inside the context is watched whenever a watch is open.
    """
    watch = _Watch(plan)
    with _lock:
        _open.append(watch)
    try:
        with WATCHING(True):
            yield watch.found
        # Steps may return before their callbacks have run.
        jax.effects_barrier()
        if not watch.calls:
            warn_caller(
                "watch_nonfinite_outputs: expected a step of the plan to run, saw none: run the step inside the "
                "context. A program compiled ahead of time outside the context (lower, compile) has no callbacks: "
                "compile it inside, too",
                RuntimeWarning,
            )
    finally:
        with _lock:
            _open.remove(watch)


def layer_numbers(layers: int) -> jax.Array:
    """The numbers that a stacked unit carries so that its calls know their layer."""
    return jnp.arange(layers, dtype=jnp.int32)


def look_at_output(plan: ShardingPlan, unit: str, layer: jax.Array, inputs: Any, output: Any) -> None:
    """Add to the program a callback that reports a unit's output. ``layer``: int32, -1 outside stacks."""
    order = next(_orders)
    ins, outs = (
        # A callback has no derivative, and its counts must not enter any derivative.
        [lax.stop_gradient(x) for x in jax.tree.leaves(tree) if _may_be_nonfinite(x)]
        for tree in (inputs, output)
    )

    def count(layer: jax.Array, ins: list[jax.Array], outs: list[jax.Array]) -> jax.Array:
        nan = sum((jnp.isnan(x).sum(dtype=jnp.int32) for x in outs), jnp.int32(0))
        bad = sum(((~jnp.isfinite(x)).sum(dtype=jnp.int32) for x in outs), jnp.int32(0))
        before = sum(((~jnp.isfinite(x)).sum(dtype=jnp.int32) for x in ins), jnp.int32(0))
        device = lax.axis_index(plan.mesh.axis_names).astype(jnp.int32)
        return jnp.stack([device, layer, nan, bad - nan, before])[None]

    def tell(counts: jax.Array) -> tuple[()]:
        # Each device reports its own part, so nothing is gathered.
        jax.debug.callback(partial(_record, plan, unit, order), counts, partitioned=True)
        return ()

    if plan.engine == "shard_map" and plan.model_axes.names:
        # A device knows its index only if the step is manual on all axes; arrays that model axes cut are gathered.
        plan.model_axes.on_each(lambda *args: tell(count(*args)), PartitionSpec(), ())(layer, ins, outs)
        return
    if plan.engine == "shard_map":
        counts = count(layer, ins, outs)
    else:
        specs = (PartitionSpec(), [_spec(plan, x) for x in ins], [_spec(plan, x) for x in outs])
        by_device = PartitionSpec(plan.mesh.axis_names)
        # Count manually: XLA would combine each count over all devices.
        counts = jax.shard_map(count, mesh=plan.mesh, in_specs=specs, out_specs=by_device, check_vma=False)(
            layer, ins, outs
        )
    tell(counts)


def _spec(plan: ShardingPlan, x: jax.Array) -> PartitionSpec:
    # Rows of a batch already have this sharding; anything else would be gathered.
    return plan.axes.batch_spec if x.ndim and x.shape[0] % plan.data_ranks == 0 else PartitionSpec()


def _may_be_nonfinite(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _record(plan: ShardingPlan, unit: str, order: int, counts: Any) -> None:
    device, layer, nan, inf, before = np.asarray(counts)[0].tolist()
    with _lock:
        for watch in _open:
            if watch.plan is plan:
                watch.add(unit, order, None if layer < 0 else layer, nan, inf, not before, device)
