"""Outputs of partner modules, and which module a difference comes from.

Each pair of calls is compared twice. Once as it happened, where a difference may come from above. And once alone: the
JAX module runs on torch's inputs, and the partner modules inside of it return torch's outputs::

    torch:  x ---> [ norm ] -n-> [ attention ] -a-> ( + ) ---> y          as recorded, float64
                      |               |
    JAX:    x ---> [ n     ] --> [ a         ] --> ( + ) ---> y'          only the layer's own code runs

What differs then, in the output or in what the inner modules were given, was introduced by this module and nothing
else: each fault is found, not only the first, and a module after a fault is acquitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bridge.parity.pair.causes import module_cause
from bridge.parity.pair.distance import FACTOR, distance, noise
from bridge.parity.pair.recording import Call, Leaves, Replacements, Rerun
from bridge.parity.pair.rows import Row, ratio_of, row_of
from bridge.parity.pair.runs import CallPair, Children, Runs, children_of, ended, in_layout


@dataclass(frozen=True)
class Alone:
    """A module's ratios when it runs alone, by output leaf. ``given``: the worst of what it gives to inner modules.

    ``cause``: of what differs, if it is a known one.
    """

    outputs: dict[str, float] = field(default_factory=dict)
    given: float = 0.0
    note: str = ""
    cause: str = ""

    @property
    def worst(self) -> float:
        return max((self.given, *self.outputs.values()))


@dataclass(frozen=True)
class Forward:
    """``rows``: in the order in which torch's calls end. ``shifted``: pairs whose difference the module around them
    makes up for, by index, with that module's name: the two models draw the line between the modules elsewhere."""

    rows: tuple[Row, ...]
    shifted: Mapping[int, str]


def compare_forward(runs: Runs, pairs: Sequence[CallPair]) -> Forward:
    """A row for each output leaf of each pair of calls."""
    parameters = runs.torch.weights()
    place = {id(pair): number for number, pair in enumerate(pairs)}
    found: dict[int, Alone] = {}
    shifted: dict[int, str] = {}
    for pair in ended(runs, pairs):
        inner = children_of(pair, pairs, runs)
        alone = run_alone(runs, pair, inner, parameters)
        faulty = [one for one in inner.pairs if found[place[id(one)]].worst > FACTOR]
        faulty = [one for one in faulty if place[id(one)] not in shifted]
        if alone.worst > FACTOR and faulty:
            # With its own inner modules instead of torch's: Gemma's embedding is scaled inside or after.
            whole = run_alone(runs, pair, inner, parameters, own=faulty)
            if whole.worst <= FACTOR:
                alone = whole
                shifted |= {place[id(one)]: pair.modules.name for one in faulty}
        found[place[id(pair)]] = alone
    rows = [
        row
        for pair in ended(runs, pairs)
        for row in _rows(runs, pair, found[place[id(pair)]], shifted.get(place[id(pair)]))
    ]
    return Forward(tuple(_without_running(rows, runs, pairs)), shifted)


def _without_running(rows: Sequence[Row], runs: Runs, pairs: Sequence[CallPair]) -> list[Row]:
    """Verdicts of modules that could not run alone, as in traces.

    A difference begins where the inputs are the same and none begins inside. A module inside that gets other inputs
    has a difference, too, but not one of its own.
    """
    of = {(pair.modules.torch, pair.number): pair for pair in pairs}
    explained: set[tuple[str, int]] = set()
    found = []
    for row in rows:
        if row.verdict == "differs":
            pair = of[row.name, row.call]
            inner = children_of(pair, pairs, runs).pairs
            inside = any((one.modules.torch, one.number) in explained for one in inner)
            begins = not inside and _same_inputs(runs, pair)
            if inside or begins:
                explained.add((row.name, row.call))
            row = replace(row, verdict="introduced" if begins else "inherited")
        found.append(row)
    return found


def _same_inputs(runs: Runs, pair: CallPair) -> bool:
    low = _same_call(runs.torch_low.calls, pair.torch), _same_call(runs.jax_low.calls, pair.jax)
    for name, other, way in pair.inputs:
        high, ours = way.to_jax(pair.torch.inputs[name]), pair.jax.inputs[other]
        floor = max(
            noise(None if low[0] is None else way.to_jax(low[0].inputs[name]), high, runs.dtype),
            noise(None if low[1] is None else low[1].inputs.get(other), ours, runs.dtype),
        )
        if ratio_of(distance(high, ours, runs.dtype), floor) > FACTOR:
            return False
    return True


def _rows(runs: Runs, pair: CallPair, alone: Alone, shifted: str | None) -> Iterator[Row]:
    matched = pair.outputs
    if not matched:
        shapes = [
            {name: leaf.shape for name, leaf in call.outputs.items()} for call in (pair.torch, pair.jax)
        ]
        yield _unmatched(pair, f"no output of torch, {shapes[0]}, fits one of JAX, {shapes[1]}")
        return
    low = _same_call(runs.torch_low.calls, pair.torch), _same_call(runs.jax_low.calls, pair.jax)
    for position, (name, other, way) in enumerate(matched):
        high = way.to_jax(pair.torch.outputs[name])
        torch_low = None if low[0] is None else way.to_jax(low[0].outputs[name])
        jax_low = None if low[1] is None else low[1].outputs.get(other)
        floor = max(noise(torch_low, high, runs.dtype), noise(jax_low, pair.jax.outputs[other], runs.dtype))
        local = alone.outputs.get(other, math.nan)
        if position == 0 and not math.isnan(local):
            local = max(local, alone.given)
        row = row_of(
            "forward",
            (pair.modules.torch, pair.modules.jax),
            high,
            pair.jax.outputs[other],
            floor,
            dtype=runs.dtype,
            leaf=name,
            call=pair.number,
            kind=pair.torch.kind,
            local=local,
            layout=str(way),
            note=alone.note,
            cause=alone.cause if local > FACTOR else "",
        )
        if shifted is not None:
            row = replace(
                row, verdict="same", note=f"made up for in {shifted}: {row.cause or 'another share'}"
            )
        yield row


def run_alone(
    runs: Runs, pair: CallPair, inner: Children, parameters: Leaves, own: Sequence[CallPair] = ()
) -> Alone:
    """Run the JAX module on torch's inputs, with torch's outputs of the modules inside, and compare.

    ``parameters``: all of torch's. ``own``: modules inside that give their own outputs, on both sides.
    """
    torch_inputs = {name: pair.torch.inputs[name] for name, _, _ in pair.inputs}
    jax_inputs = in_layout(pair.inputs, pair.torch.inputs)
    ours, theirs = _replacements(inner, own)
    path, other, number = pair.modules.torch, pair.modules.jax, pair.number
    try:
        found = runs.jax.rerun("float64", other, number, jax_inputs, replaced=theirs)
        jax_low = runs.jax.rerun(runs.dtype, other, number, jax_inputs, replaced=theirs)
        torch_low = runs.torch.rerun(runs.dtype, path, number, torch_inputs, replaced=ours)
    # A module that cannot be called alone is no fault of the model.
    except Exception as error:
        return Alone(note=f"not run alone: {type(error).__name__}: {error!s:.200}")
    outputs, floors = {}, {}
    for name, leaf, way in pair.outputs:
        if leaf not in found.outputs or found.outputs[leaf].shape != pair.jax.outputs[leaf].shape:
            continue
        high = way.to_jax(pair.torch.outputs[name])
        floors[leaf] = max(
            noise(way.to_jax(torch_low.outputs[name]), high, runs.dtype),
            noise(jax_low.outputs.get(leaf), found.outputs[leaf], runs.dtype),
        )
        outputs[leaf] = ratio_of(distance(high, found.outputs[leaf], runs.dtype), floors[leaf])
    worst, note = _given(runs.dtype, inner, found, torch_low, jax_low)
    cause = ""
    note = note if worst > FACTOR else ""
    if max((worst, *outputs.values())) > FACTOR:
        prefix = f"{path}." if path else ""
        parts = {
            name.removeprefix(prefix): value
            for name, value in parameters.items()
            if name.startswith(prefix) and "." not in name.removeprefix(prefix)
        }
        calls = (
            _nth(found.calls, child.modules.jax, n) for child, n in zip(inner.pairs, inner.jax, strict=True)
        )
        given = {index: call.inputs for index, call in enumerate(calls) if call is not None}
        cause = module_cause(pair, inner, found.outputs, given, floors, parts)
    return Alone(outputs, worst, note, cause)


def _given(dtype: str, inner: Children, found: Rerun, torch_low: Rerun, jax_low: Rerun) -> tuple[float, str]:
    """The largest ratio among the inputs of the modules inside, and which module it was."""
    worst, note = 0.0, ""
    for child, torch_number, jax_number in zip(inner.pairs, inner.torch, inner.jax, strict=True):
        call = _nth(found.calls, child.modules.jax, jax_number)
        if call is None:
            return math.inf, f"{child.modules.jax} is not called where torch calls {child.modules.torch}"
        low = _nth(jax_low.calls, child.modules.jax, jax_number)
        torch_call = _nth(torch_low.calls, child.modules.torch, torch_number)
        for name, leaf, way in child.inputs:
            high = way.to_jax(child.torch.inputs[name])
            if leaf not in call.inputs or call.inputs[leaf].shape != high.shape:
                continue
            theirs = None if torch_call is None else torch_call.inputs.get(name)
            floor = max(
                noise(None if theirs is None else way.to_jax(theirs), high, dtype),
                noise(None if low is None else low.inputs.get(leaf), call.inputs[leaf], dtype),
            )
            ratio = ratio_of(distance(high, call.inputs[leaf], dtype), floor)
            if ratio > worst:
                worst, note = ratio, f"in what it gives to {child.modules.name}"
    return worst, note


def _replacements(inner: Children, own: Sequence[CallPair]) -> tuple[Replacements, Replacements]:
    """Torch's outputs of the inner modules, for torch and for JAX."""
    ours: dict[tuple[str, int], Leaves] = {}
    theirs: dict[tuple[str, int], Leaves] = {}
    for child, torch_number, jax_number in zip(inner.pairs, inner.torch, inner.jax, strict=True):
        outputs = in_layout(child.outputs, child.torch.outputs)
        if outputs and not any(child is one for one in own):
            ours[child.modules.torch, torch_number] = {
                name: child.torch.outputs[name] for name, _, _ in child.outputs
            }
            theirs[child.modules.jax, jax_number] = outputs
    return ours, theirs


def _nth(calls: Sequence[Call], path: str, number: int) -> Call | None:
    same = [call for call in calls if call.path == path]
    return same[number] if number < len(same) else None


def _same_call(calls: Sequence[Call], call: Call) -> Call | None:
    return next((one for one in calls if (one.path, one.number) == (call.path, call.number)), None)


def _unmatched(pair: CallPair, note: str) -> Row:
    nothing = np.zeros(())
    row = row_of(
        "forward",
        (pair.modules.torch, pair.modules.jax),
        nothing,
        nothing,
        0.0,
        call=pair.number,
        kind=pair.torch.kind,
        note=f"not compared: {note}",
    )
    return replace(row, verdict="unknown")
