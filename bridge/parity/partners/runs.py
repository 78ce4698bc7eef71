"""The recorded runs of both sides, and the surroundings of a call: partners, children, interchangeable inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from bridge.parity.partners.modules import ModulePair, Modules
from bridge.parity.partners.rows import ratio_of
from bridge.parity.partners.weight_map import Order, WeightMap
from bridge.parity.recorded.align import CHANNELS_LAST, Alignment, Moves, match_leaves, other_ways
from bridge.parity.recorded.distance import distance, noise
from bridge.parity.recorded.recording import Call, Leaves, Recording, Side
from bridge.parity.recorded.store import Store, trim_heap

_NEAR = 0.3
"""Further inputs with a larger relative distance than this may mean something else on the other side."""

Matched = Sequence[tuple[str, str, Alignment]]


@dataclass(frozen=True)
class CallPair:
    """Partner calls: a pair of modules, and which of their calls. ``orders``: of their input and output features.

    ``known``: layouts of other arrays, which decide if shapes and values do not; see ``align``.
    """

    modules: ModulePair
    number: int
    torch: Call
    jax: Call
    orders: tuple[Order, Order] = (None, None)
    known: Sequence[Moves] = ()

    @cached_property
    def outputs(self) -> Matched:
        return match_leaves(self.torch.outputs, self.jax.outputs, self.orders[1], self.known)

    @cached_property
    def inputs(self) -> Matched:
        """The first floating input, other inputs with nearly the same values, and repetitions of one of these.

        A rotary table and its twin may hold the same numbers in another order, and integers may be positions on one
        side and a mask on the other. Shapes cannot distinguish these cases.
        """
        matched: list[tuple[str, str, Alignment]] = []
        first = True
        for name, other, way in self._every_input:
            theirs, ours = way.to_jax(self.torch.inputs[name]), self.jax.inputs[other]
            whole = ours.dtype.kind in "iub"
            # Exact equality would leave out inputs that are slightly wrong, and these are the ones to find.
            near = distance(theirs.astype(np.float64), ours.astype(np.float64)).relative <= _NEAR
            if near or (first and not whole) or self._repeats(matched, name, other):
                matched.append((name, other, way))
            first = first and whole
        return self._with_repeated(matched)

    @cached_property
    def _every_input(self) -> Matched:
        return match_leaves(self.torch.inputs, self.jax.inputs, self.orders[0], self.known)

    def _with_repeated(self, matched: Matched) -> Matched:
        """One tensor given twice is one input, however the other side passes it: module(y, y, y), module(y)."""
        repeated = [*matched]
        for name, other, way in matched:
            repeated += [(again, other, way) for again in self._again(repeated, 0, name)]
            repeated += [(name, again, way) for again in self._again(repeated, 1, other)]
        return repeated

    def alternatives(self) -> Iterator[CallPair]:
        """The pair with all inputs that shapes allow, however far apart; then with one input, and outputs that have
        its layout, a layout known from other arrays, or the usual layout."""
        if {places[:2] for places in self._every_input} - {places[:2] for places in self.inputs}:
            pair = replace(self)
            pair.__dict__["inputs"] = self._with_repeated(self._every_input)
            yield pair
        for number, (name, other, way) in enumerate(self.inputs):
            ways = other_ways(way, self.jax.inputs[other].shape, self.known)
            for instead in ways[: len(self.known) + 1] if way.doubt or self.known else ():
                pair, inputs = replace(self), [*self.inputs]
                inputs[number] = name, other, instead
                outputs = [*self.outputs]
                for place, (leaf, twin, lies) in enumerate(self.outputs):
                    if lies.moves == way.moves:
                        outputs[place] = leaf, twin, _like(instead, lies, self.jax.outputs[twin])
                pair.__dict__.update(inputs=inputs, outputs=outputs)
                yield pair

    def _again(self, matched: Matched, side: int, name: str) -> list[str]:
        """Other inputs of one side that hold the same values as ``name`` and have no twin."""
        inputs = (self.torch, self.jax)[side].inputs
        known = {leaf[side] for leaf in matched}
        return [
            other for other in inputs if other not in known and np.array_equal(inputs[other], inputs[name])
        ]

    def _repeats(self, matched: Matched, name: str, other: str) -> bool:
        """Whether an input repeats a ``found`` one on both sides: query, key and value."""
        return any(
            np.array_equal(self.torch.inputs[name], self.torch.inputs[earlier])
            and np.array_equal(self.jax.inputs[other], self.jax.inputs[twin])
            for earlier, twin, _ in matched
        )

    @cached_property
    def without_twin(self) -> tuple[str, ...]:
        """Torch's floating inputs that the JAX module did not get."""
        known = {name for name, _, _ in self.inputs}
        return tuple(
            name
            for name, leaf in self.torch.inputs.items()
            if name not in known and leaf.dtype.kind not in "iub"
        )

    @property
    def masks_without_twin(self) -> tuple[str, ...]:
        """Torch's boolean and integer inputs without a twin, if the JAX module got nothing that could be one."""
        if set(self.jax.inputs) - {twin for _, twin, _ in self.inputs}:
            return ()
        known = {name for name, _, _ in self.inputs}
        return tuple(
            name for name, leaf in self.torch.inputs.items() if name not in known and leaf.dtype.kind in "iub"
        )


class Runs:
    """Both sides' runs in float64 and in the compute dtype, on one batch.

    The batch is recorded on creation, and both sides keep the calls for reruns. ``parameters``: torch's. ``ValueError``
    if the loss is not finite on either side.
    """

    def __init__(self, torch: Side, jax: Side, batch: Any, dtype: str) -> None:
        self.torch, self.jax, self.dtype = torch, jax, dtype
        self.parameters: Leaves = Store().leaves(torch.weights())
        self.torch_high = _record(torch, batch, "float64")
        self.jax_high = _record(jax, batch, "float64")
        losses = self.torch_high.loss, self.jax_high.loss
        if not any(loss is None or math.isfinite(loss) for loss in losses):
            raise ValueError(
                f"loss: expected a finite number, got {losses[0]} in torch and {losses[1]} in JAX, both in float64: "
                "this batch, or these weights, cannot be compared"
            )
        self.torch_low = _record(torch, batch, dtype)
        self.jax_low = _record(jax, batch, dtype)

    def pairs(self, modules: Modules, weights: WeightMap) -> list[CallPair]:
        """Partner calls, in the order in which torch's calls began."""
        return decide_layouts(list(self._pairs(modules, weights)))

    def _pairs(self, modules: Modules, weights: WeightMap) -> Iterator[CallPair]:
        matrices = {name: leaf.shape for name, leaf in self.parameters.items() if leaf.ndim == 2}
        orders: dict[str, tuple[Order, Order]] = {}
        partners = {pair.torch: pair for pair in modules.pairs}
        theirs = {(call.path, call.number): call for call in self.jax_high.calls}
        for call in self.torch_high.calls:
            pair = partners.get(call.path)
            twin = None if pair is None else theirs.get((pair.jax, call.number))
            if pair is None or twin is None:
                continue
            name = f"{call.path}.weight"
            if name in matrices and call.path not in orders:
                orders[call.path] = weights.feature_orders(name, matrices[name])
            yield CallPair(pair, call.number, call, twin, orders.get(call.path, (None, None)))


def _like(instead: Alignment, way: Alignment, jax: np.ndarray) -> Alignment:
    """The way of ``instead`` applied to another array, or ``way`` if the shapes do not allow it."""
    ways = other_ways(way, jax.shape, (instead.moves,))
    return next((other for other in ways if other.moves == instead.moves), way)


def decide_layouts(pairs: Sequence[CallPair]) -> list[CallPair]:
    """The pairs; where a layout is in doubt, the other pairs and the kinds of modules decide it."""
    certain, chosen = ([_moves(pair, doubted) for pair in pairs] for doubted in (False, True))
    decided_pairs = []
    for pair in pairs:
        ways = [way for _, _, way in (*pair.inputs, *pair.outputs)]
        if any(way.doubt for way in ways):
            kin = [number for number, other in enumerate(pairs) if other.torch.kind == pair.torch.kind]
            # Torch's convolutions have channels first, flax's last.
            channels = CHANNELS_LAST if {pair.torch.kind[:4], pair.jax.kind[:4]} == {"Conv"} else ()
            ranked = [*(certain[number] for number in kin), channels, *certain]
            if not all(way.certain for way in ways):
                ranked += [*(chosen[number] for number in kin), *chosen]
            pair = replace(pair, known=tuple(dict.fromkeys(moves for group in ranked for moves in group)))
        decided_pairs.append(pair)
    return decided_pairs


def _moves(pair: CallPair, doubted: bool) -> list[Moves]:
    """Layouts of a pair's arrays that say more than the usual order; ``doubted``: chosen by values alone."""
    ways = [way for _, _, way in (*pair.inputs, *pair.outputs) if way.certain and len(way.axes) > 2]
    return list(dict.fromkeys(way.moves for way in ways if bool(way.doubt) == doubted))


Group = Literal["inputs", "outputs", "gradients"]


class LeafPair(NamedTuple):
    """A leaf of two partner calls in float64, torch's in the JAX layout, and the absolute floor of rounding."""

    torch: np.ndarray
    jax: np.ndarray
    floor: float


def leaf_pair(runs: Runs, pair: CallPair, group: Group, matched: tuple[str, str, Alignment]) -> LeafPair:
    """The recorded values of one matched leaf."""
    name, jax_name, way = matched
    torch, jax = way.to_jax(getattr(pair.torch, group)[name]), getattr(pair.jax, group)[jax_name]
    # Rounding may flip a router's decision: then a call of the float64 run has no twin in the compute dtype.
    torch_call = runs.torch_low.find(pair.torch.path, pair.torch.number)
    jax_call = runs.jax_low.find(pair.jax.path, pair.jax.number)
    torch_low = None if torch_call is None else getattr(torch_call, group).get(name)
    jax_low = None if jax_call is None else getattr(jax_call, group).get(jax_name)
    torch_noise = noise(None if torch_low is None else way.to_jax(torch_low), torch, runs.dtype)
    return LeafPair(torch, jax, max(torch_noise, noise(jax_low, jax, runs.dtype)))


def largest_ratio(runs: Runs, pair: CallPair, group: Literal["inputs", "outputs"]) -> float:
    """The largest recorded distance of a pair's matched inputs or outputs, over the floor; NaN without any."""
    matched: Matched = getattr(pair, group)
    values = (leaf_pair(runs, pair, group, leaf) for leaf in matched)
    ratios = [ratio_of(distance(torch, jax, runs.dtype), floor) for torch, jax, floor in values]
    return max(ratios, default=math.nan)


def _record(side: Side, batch: Any, dtype: str) -> Recording:
    run = side.record(batch, dtype, backward=True)
    trim_heap()
    return run


@dataclass(frozen=True)
class Children:
    """The partner calls inside a pair of calls, without the calls inside other partner calls.

    ``torch``, ``jax``: the number of each call among the calls of its module inside the outer call, from 0.
    """

    pairs: tuple[CallPair, ...]
    torch: tuple[int, ...]
    jax: tuple[int, ...]


def children_of(outer: CallPair, every: Sequence[CallPair], runs: Runs) -> Children:
    """See ``Children``."""
    known = {id(pair.torch): pair for pair in every}
    children, torch_numbers, jax_numbers = [], [], []
    inside_torch = _inside(outer.torch, runs.torch_high)
    inside_jax = _inside(outer.jax, runs.jax_high)
    for call in inside_torch:
        pair = known.get(id(call))
        if pair is None or not any(pair.jax is inner for inner in inside_jax):
            continue
        around = calls_around(call, runs.torch_high)
        if next((parent for parent in around if id(parent) in known), None) is not outer.torch:
            continue
        children.append(pair)
        torch_numbers.append(_number(call, inside_torch))
        jax_numbers.append(_number(pair.jax, inside_jax))
    return Children(tuple(children), tuple(torch_numbers), tuple(jax_numbers))


def _inside(outer: Call, recording: Recording) -> list[Call]:
    calls = recording.calls
    inside: set[int] = set()
    for index, call in enumerate(calls):
        if call.parent is not None and (calls[call.parent] is outer or call.parent in inside):
            inside.add(index)
    return [calls[index] for index in sorted(inside)]


def calls_around(call: Call, recording: Recording) -> Iterator[Call]:
    """The calls around a call, from inside."""
    parent = call.parent
    while parent is not None:
        yield recording.calls[parent]
        parent = recording.calls[parent].parent


def _number(call: Call, among: Sequence[Call]) -> int:
    same = [sibling for sibling in among if sibling.path == call.path]
    return next(number for number, sibling in enumerate(same) if sibling is call)


def inner_first(runs: Runs, pairs: Sequence[CallPair]) -> list[CallPair]:
    """The pairs in the order in which torch's calls end: inner modules before the modules around them."""
    calls = runs.torch_high.calls
    ends = {id(call): number for number, call in enumerate(calls)}
    depths = dict.fromkeys(ends, 0)
    for number, call in enumerate(calls):
        for around in calls_around(call, runs.torch_high):
            ends[id(around)] = number
            depths[id(call)] += 1
    return sorted(pairs, key=lambda pair: (ends[id(pair.torch)], -depths[id(pair.torch)]))


def in_layout(matched: Matched, leaves: Leaves) -> dict[str, np.ndarray]:
    """Torch's leaves under the JAX names, in the JAX layout."""
    return {other: way.to_jax(leaves[name]) for name, other, way in matched if name in leaves}
