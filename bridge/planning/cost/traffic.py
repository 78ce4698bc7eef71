"""The collectives of one optimizer step of K microbatches, by unit, kind and mesh axis.

``bridge.core.sharding.policy.strategy_collectives`` says which collectives there are; this file has their bytes. For
a group with strategy (p, g, o), of the whole buffer::

    gathered once a step, and for each use    c S_(axis)      c: compute dtype, or payload and scales
    all-reduce of magnitudes                  4 per parameter once a step, float8_e4m3fn only
    reduce-scatter                            r G_(axis)      r: reduce dtype
    all-reduce of the shard of level o        r G_o

S_a are the elements of the buffers at level a. G_a are the elements of a gradient buffer: in JAX the same, in PyTorch
one more for each parameter and each finest shard in it; these tell ranks which parameters other ranks used.

* An axis of one device needs no collective.
* A frozen group has gathers only. PyTorch leaves out the once-per-step collectives, since the weights are unchanged.
  JAX repeats them, since a step is a function of its inputs. In JAX scanned layers share one all-reduce of magnitudes.
* Magnitudes of parts that model axes cut are compared over these axes, too; this traffic is not listed.
* JAX sums the loss in one more all-reduce, which is not listed here, see ``Traffic.loss``.

The buffers of a group are one collective. A gather fills the "whole buffer", and a reduction reads it. On the wire each
of W devices sends and receives (W - 1) / W of the whole buffer, and twice that for an all-reduce (ring algorithms;
Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bridge.core.dtype_names import BYTES
from bridge.core.sharding import ShardingPolicy
from bridge.planning.cost.buffers import GroupBuffers
from bridge.planning.cost.units import TWICE, outward
from bridge.planning.models.model import Model

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
        return sum(times for call, times in self.calls.items() if _matches(call, kind, axis))

    def nbytes(self, kind: str, axis: str | None = None) -> int:
        """Bytes of whole buffers, of a kind, over one axis or all."""
        matching = (item for item in self.calls.items() if _matches(item[0], kind, axis))
        return sum(call.nbytes * times for call, times in matching)

    def wire_bytes(self, kind: str | None = None, axis: str | None = None) -> int:
        """Bytes that a device sends in a step."""
        matching = (item for item in self.calls.items() if _matches(item[0], kind, axis))
        return round(sum(call.wire_bytes * times for call, times in matching))


def _matches(call: Collective, kind: str | None, axis: str | None) -> bool:
    return kind in (None, call.kind) and axis in (None, call.axis)


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
    axes, calls = group.collectives, Counter[Collective]()
    once = 0 if runtime == "torch" and not group.shape.trainable else 1
    for axis in (*axes.gathered_once, *axes.gathered):
        times = gathers * microbatches if axis in axes.gathered else once
        gather = _collective(group, "all_gather", axis, group.gather_dtype, group.gather_bytes(axis))
        calls[gather] += times
    return _needed(calls)


def amax_calls(group: GroupBuffers, layers: int = 1) -> Calls:
    """All-reduces of the largest magnitudes, once per step; ``layers``: how many equal groups share them."""
    calls: Calls = Counter()
    if group.shape.dtypes.gather == "float8_e4m3fn":
        nbytes = BYTES["float32"] * layers * len(group.layout.slots)
        for axis in range(group.strategy.optimizer):
            calls[_collective(group, "all_reduce", axis, "float32", nbytes)] += 1
    return _needed(calls)


def _reductions(group: GroupBuffers, runtime: str, microbatches: int) -> Calls:
    axes, calls = group.collectives, Counter[Collective]()
    for axis in axes.reduced_last:
        summed = axis in axes.summed_once
        kind, level = ("all_reduce", group.strategy.optimizer) if summed else ("reduce_scatter", axis)
        times = microbatches if axis in axes.scattered else 1
        nbytes = group.gradient_size(level, runtime) * group.reduce_bytes
        calls[_collective(group, kind, axis, group.shape.dtypes.reduce, nbytes)] += times
    return _needed(calls)


def _needed(calls: Calls) -> Calls:
    """The calls that run: those over axes of several devices."""
    return Counter({call: times for call, times in calls.items() if times and call.size > 1})


def _collective(group: GroupBuffers, kind: str, axis: int, dtype: str, nbytes: int) -> Collective:
    return Collective(kind, group.mesh.name(axis), group.mesh.size(axis), dtype, nbytes)


@dataclass(frozen=True)
class _Styled:
    """A module that a style cuts; ``shape`` and ``dtype`` of its weight, as given."""

    path: str
    axis: str
    style: str
    embeds: bool
    shape: tuple[int, ...]
    dtype: str

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]


def exchanges(
    model: Model, policy: ShardingPolicy, sizes: Mapping[str, int], tokens: int, microbatches: int
) -> Calls:
    """Collectives of one step over model axes of ``sizes``: activations of ``torch_impl`` and their gradients.

    With B T tokens of a microbatch of a data rank (``tokens``), for ``nn.Linear`` (out, in) and ``nn.Embedding``
    (vocabulary, d)::

        module                            forward                   backward
        rowwise linear                    all-reduce B T out        of whole inputs: all-gather B T in
        colwise linear, rowwise after it                            all-reduce B T in, once for modules of one input
        any other colwise linear          all-gather B T out        all-reduce B T in
        rowwise embedding                 all-reduce B T d
        colwise embedding                 all-gather B T d

    A unit that recomputes repeats its forward, except the sum after the last rowwise module, which backward does not
    need. Modules of one parent with equally many input features are assumed to have one input.
    """
    styled = _styled(model, policy)
    units = policy.units_of(model.modules)
    calls: Calls = Calls()
    entered: set[tuple[str, str, int]] = set()
    for number, module in enumerate(styled):
        around = [path for path in outward(module.path) if path in units]
        runs = 1 + sum(bool(units[path].recompute) for path in around)
        siblings = [other for other in styled if (other.parent, other.axis) == (module.parent, module.axis)]
        siblings = [other for other in siblings if not other.embeds]
        after = styled[number + 1 :]
        needed: list[tuple[str, int, int]] = []
        if module.embeds:
            kind = "all_gather" if module.style == "colwise" else "all_reduce"
            needed.append((kind, module.shape[1], runs))
        elif module.style == "rowwise":
            own = f"{around[0]}.".lstrip(".")
            last = not any(other.style == "rowwise" and other.path.startswith(own) for other in after)
            needed.append(("all_reduce", module.shape[0], runs - (last and bool(units[around[0]].recompute))))
            if not any(other.style == "colwise" and other not in after for other in siblings):
                needed.append(("all_gather", module.shape[1], 1))
        elif any(other.style == "rowwise" and other in after for other in siblings):
            key = module.parent, module.axis, module.shape[1]
            needed += [] if key in entered else [("all_reduce", module.shape[1], 1)]
            entered.add(key)
        else:
            needed += [("all_gather", module.shape[0], runs), ("all_reduce", module.shape[1], 1)]
        for kind, features, times in needed:
            size, dtype = sizes[module.axis], policy.precision.compute_dtype or module.dtype
            if size > 1:
                collective = Collective(kind, module.axis, size, dtype, tokens * features * BYTES[dtype])
                calls[collective] += times * microbatches
    return calls


def _styled(model: Model, policy: ShardingPolicy) -> list[_Styled]:
    """The modules in the order of definition, which is assumed to be the order of forward."""
    entries = policy.parallel_of([*model.modules, *(parameter.path for parameter in model.parameters)])
    weights = {
        parameter.module: parameter for parameter in model.parameters if parameter.path.endswith(".weight")
    }
    styled = []
    for path, matched in entries.items():
        if len(matched) == 1 and matched[0].style in ("colwise", "rowwise") and path in weights:
            weight, entry = weights[path], matched[0]
            assert entry.style is not None
            embeds = weight.kind == "embedding"
            styled.append(_Styled(path, entry.axis, entry.style, embeds, weight.shape, weight.dtype))
    return styled
