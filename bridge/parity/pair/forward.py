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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bridge.parity.pair.distance import distance, noise
from bridge.parity.pair.recording import Call, Leaves, Replacements, Rerun
from bridge.parity.pair.rows import Row, ratio_of, row_of
from bridge.parity.pair.runs import CallPair, Children, Runs, children_of, in_layout


@dataclass(frozen=True)
class Alone:
    """A module's ratios when it runs alone, by output leaf. ``given``: the worst of what it gives to inner modules."""

    outputs: dict[str, float] = field(default_factory=dict)
    given: float = 0.0
    note: str = ""


def forward_rows(runs: Runs, pairs: Sequence[CallPair]) -> Iterator[Row]:
    """A row for each output leaf of each pair of calls, in the order of the calls."""
    for pair in pairs:
        alone = run_alone(runs, pair, children_of(pair, pairs, runs))
        matched = pair.outputs
        if not matched:
            shapes = [
                {name: leaf.shape for name, leaf in call.outputs.items()} for call in (pair.torch, pair.jax)
            ]
            yield _unmatched(pair, f"no output of torch, {shapes[0]}, fits one of JAX, {shapes[1]}")
            continue
        low = _same_call(runs.torch_low.calls, pair.torch), _same_call(runs.jax_low.calls, pair.jax)
        for position, (name, other, way) in enumerate(matched):
            high = way.to_jax(pair.torch.outputs[name])
            torch_low = None if low[0] is None else way.to_jax(low[0].outputs[name])
            jax_low = None if low[1] is None else low[1].outputs.get(other)
            floor = max(
                noise(torch_low, high, runs.dtype), noise(jax_low, pair.jax.outputs[other], runs.dtype)
            )
            local = alone.outputs.get(other, math.nan)
            if position == 0 and not math.isnan(local):
                local = max(local, alone.given)
            yield row_of(
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
            )


def run_alone(runs: Runs, pair: CallPair, inner: Children) -> Alone:
    """Run the JAX module on torch's inputs, with torch's outputs of the modules inside, and compare."""
    torch_inputs = {name: pair.torch.inputs[name] for name, _, _ in pair.inputs}
    jax_inputs = in_layout(pair.inputs, pair.torch.inputs)
    ours, theirs = _replacements(inner)
    path, other, number = pair.modules.torch, pair.modules.jax, pair.number
    try:
        found = runs.jax.rerun("float64", other, number, jax_inputs, replaced=theirs)
        jax_low = runs.jax.rerun(runs.dtype, other, number, jax_inputs, replaced=theirs)
        torch_low = runs.torch.rerun(runs.dtype, path, number, torch_inputs, replaced=ours)
    # A module that cannot be called alone is no fault of the model.
    except Exception as error:
        return Alone(note=f"not run alone: {type(error).__name__}: {error!s:.200}")
    outputs = {}
    for name, leaf, way in pair.outputs:
        if leaf not in found.outputs:
            continue
        high = way.to_jax(pair.torch.outputs[name])
        floor = max(
            noise(way.to_jax(torch_low.outputs[name]), high, runs.dtype),
            noise(jax_low.outputs.get(leaf), found.outputs[leaf], runs.dtype),
        )
        outputs[leaf] = ratio_of(distance(high, found.outputs[leaf], runs.dtype), floor)
    worst, note = _given(runs.dtype, inner, found, torch_low, jax_low)
    return Alone(outputs, worst, note)


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


def _replacements(inner: Children) -> tuple[Replacements, Replacements]:
    """Torch's outputs of the inner modules, for torch and for JAX."""
    ours: dict[tuple[str, int], Leaves] = {}
    theirs: dict[tuple[str, int], Leaves] = {}
    for child, torch_number, jax_number in zip(inner.pairs, inner.torch, inner.jax, strict=True):
        outputs = in_layout(child.outputs, child.torch.outputs)
        if outputs:
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
    return row
