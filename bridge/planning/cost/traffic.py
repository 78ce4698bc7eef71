"""The collectives of one optimizer step of K microbatches, by unit, kind and mesh axis.

For a group with strategy (p, g, o) on a mesh of d axes (axis 0 innermost; level a is cut over the a innermost ones)::

    when                 what                              over axis            bytes of the whole buffer
    once a step          gather levels o .. p              o-1 ... p            c S_(axis)        (c: compute dtype, or
    forward, backward    gather levels p .. 0              p-1 ... 0            c S_(axis)        payload and scales)
    once a step          all-reduce of magnitudes          0 ... o-1            4 a parameter     float8_e4m3fn only
    each microbatch      reduce-scatter levels 0 .. g      0 ... g-1            r G_(axis)        (r: reduce dtype)
    once a step          reduce-scatter levels g .. o      g ... o-1            r G_(axis)
    once a step          all-reduce the shard of level o   o ... d-1            r G_o

S_a are the elements of the buffers at level a. G_a are those of a gradient buffer: in JAX as many, in PyTorch one more
for each parameter and each of the finest shards in it, by which ranks learn which parameters others used.

* An axis of one device takes no collective.
* A frozen group has gathers only. PyTorch leaves out what is once a step, since the weights are unchanged. JAX, a
  function of its inputs, repeats it. In JAX scanned layers have one all-reduce of magnitudes together.
* Magnitudes of parts that model axes cut are compared over these axes as well, which is not listed.
* JAX sums the loss in one more all-reduce, which is not listed here, see ``Traffic.loss``.

The buffers of a group are one collective. A gather fills the "whole buffer", and a reduction reads it. On the wire each
of W devices sends and receives (W - 1) / W of the whole buffer, and twice that for an all-reduce (ring algorithms;
Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bridge.planning.cost.buffers import GroupBuffers
from bridge.planning.cost.gathers import TWICE

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Collective:
    """One collective of a group: ``kind``, name and ``size`` of the mesh axis, dtype, and bytes of the whole buffer."""

    kind: str
    axis: str
    size: int
    dtype: str
    nbytes: int

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends, on average over the axis."""
        share = self.nbytes * (self.size - 1) / self.size
        return 2 * share if self.kind == "all_reduce" else share


Calls = Counter[Collective]
"""How often each collective runs in a step."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of a step. ``loss``: the number of all-reduces that sum only the loss."""

    calls: Mapping[Collective, int]
    loss: int = 0

    def count(self, kind: str, axis: str | None = None) -> int:
        """Calls of a kind, over one axis or all."""
        return sum(calls for one, calls in self.calls.items() if _matches(one, kind, axis))

    def nbytes(self, kind: str, axis: str | None = None) -> int:
        """Bytes of whole buffers, of a kind, over one axis or all."""
        return sum(one.nbytes * calls for one, calls in self.calls.items() if _matches(one, kind, axis))

    def wire_bytes(self, kind: str | None = None, axis: str | None = None) -> int:
        """Bytes that a device sends in a step."""
        return round(
            sum(one.wire_bytes * calls for one, calls in self.calls.items() if _matches(one, kind, axis))
        )


def _matches(one: Collective, kind: str | None, axis: str | None) -> bool:
    return kind in (None, one.kind) and axis in (None, one.axis)


def step_calls(
    groups: Iterable[GroupBuffers], runtime: str, microbatches: int, gathers: int = TWICE
) -> Calls:
    """The collectives of one unit in a step of ``microbatches`` microbatches; ``gathers``: see ``UnitKind``.

    In JAX without ``amax_calls``, which the layers of a stack share.
    """
    calls: Calls = Counter()
    for group in groups:
        if runtime == "torch" and group.shape.trainable:
            calls += amax_calls(group)
        calls += _gathers(group, runtime, microbatches, gathers)
        if group.shape.trainable:
            calls += _reductions(group, runtime, microbatches)
    return calls


def _gathers(group: GroupBuffers, runtime: str, microbatches: int, gathers: int) -> Calls:
    strategy, calls = group.strategy, Counter[Collective]()
    once = 0 if runtime == "torch" and not group.shape.trainable else 1
    for axis in range(strategy.optimizer):
        if group.mesh.size(axis) > 1:
            times = gathers * microbatches if axis < strategy.parameters else once
            calls[_collective(group, "all_gather", axis, group.gather_dtype, group.gather_bytes(axis))] += (
                times
            )
    return +calls


def amax_calls(group: GroupBuffers, layers: int = 1) -> Calls:
    """All-reduces of the largest magnitudes, once a step; ``layers``: how many equal groups share them."""
    calls: Calls = Counter()
    if group.shape.dtypes.gather == "float8_e4m3fn":
        for axis in range(group.strategy.optimizer):
            if group.mesh.size(axis) > 1:
                nbytes = 4 * layers * len(group.layout.slots)
                calls[
                    Collective("all_reduce", group.mesh.name(axis), group.mesh.size(axis), "float32", nbytes)
                ] += 1
    return calls


def _reductions(group: GroupBuffers, runtime: str, microbatches: int) -> Calls:
    strategy, calls = group.strategy, Counter[Collective]()
    for axis in range(group.mesh.ndim):
        if group.mesh.size(axis) == 1:
            continue
        scatters = axis < strategy.optimizer
        kind, level = ("reduce_scatter", axis) if scatters else ("all_reduce", strategy.optimizer)
        times = microbatches if axis < strategy.gradients else 1
        nbytes = group.gradient_size(level, runtime) * group.reduce_bytes
        calls[_collective(group, kind, axis, group.shape.dtypes.reduce, nbytes)] += times
    return calls


def _collective(group: GroupBuffers, kind: str, axis: int, dtype: str, nbytes: int) -> Collective:
    return Collective(kind, group.mesh.name(axis), group.mesh.size(axis), dtype, nbytes)
