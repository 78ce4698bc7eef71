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
from dataclasses import dataclass, replace

import numpy as np

from bridge.parity.causes.makers import moved_to_makers
from bridge.parity.partners.rows import Row, row_of
from bridge.parity.partners.runs import CallPair, Runs, children_of, ended, largest_ratio, same_call
from bridge.parity.recorded.distance import FACTOR, noise
from bridge.parity.stages.precision import odd_ones, precision_rows
from bridge.parity.stages.rerun_module import Alone, run_alone

_EQUAL = 0.04
"""Ratio below which float64 runs are equal: what float32 constants leave is larger."""


@dataclass(frozen=True)
class Forward:
    """``rows``: in the order in which torch's calls end. ``shifted``: pairs whose difference the module around them
    makes up for, by index, with that module's name: the two models draw the line between the modules elsewhere."""

    rows: tuple[Row, ...]
    shifted: Mapping[int, str]


def compare_forward(runs: Runs, pairs: Sequence[CallPair]) -> Forward:
    """A row for each output leaf of each pair of calls."""
    place = {id(pair): number for number, pair in enumerate(pairs)}
    found: dict[int, Alone] = {}
    shifted: dict[int, str] = {}
    for pair in ended(runs, pairs):
        inner = children_of(pair, pairs, runs)
        alone = run_alone(runs, pair, inner)
        for one, torch_number in zip(inner.pairs, inner.torch, strict=True):
            # OPT adds the offset of its positions inside of the table's module, or before.
            number = place[id(one)]
            if (
                number not in shifted
                and found[number].places
                and largest_ratio(runs, one, "outputs") <= _EQUAL
            ):
                alone = alone.without(one.modules.name + (f"#{torch_number}" if torch_number else ""))
                shifted[number] = pair.modules.name
        own: list[CallPair] = []
        for one in inner.pairs if alone.places else ():
            number = place[id(one)]
            if number in shifted or not found[number].places:
                continue
            # With its own inner module instead of torch's: Gemma's embedding is scaled inside or after. What a fault
            # of the inner module spoils would be a new place.
            whole = run_alone(runs, pair, inner, own=[*own, one])
            if whole.places < alone.places:
                alone = whole
                own.append(one)
                shifted[number] = pair.modules.name
        found[place[id(pair)]] = alone
    rows = [
        row
        for pair in ended(runs, pairs)
        for row in _rows(runs, pair, found[place[id(pair)]], shifted.get(place[id(pair)]))
    ]
    rows = moved_to_makers(_without_running(rows, runs, pairs), runs, pairs)
    return Forward(tuple(odd_ones(rows)), shifted)


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
            begins = not inside and not largest_ratio(runs, pair, "inputs") > FACTOR
            if inside or begins:
                explained.add((row.name, row.call))
            row = replace(row, verdict="introduced" if begins else "inherited")
        found.append(row)
    return found


def _rows(runs: Runs, pair: CallPair, alone: Alone, shifted: str | None) -> Iterator[Row]:
    matched = pair.outputs
    if not matched:
        shapes = [
            {name: leaf.shape for name, leaf in call.outputs.items()} for call in (pair.torch, pair.jax)
        ]
        yield _unmatched(pair, f"no output of torch, {shapes[0]}, fits one of JAX, {shapes[1]}")
        return
    low = same_call(runs.torch_low, pair.torch), same_call(runs.jax_low, pair.jax)
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
            kind=pair.torch.kind,
            local=local,
        )
        row = replace(
            row,
            leaf=name,
            call=pair.number,
            layout=str(way),
            note="; ".join(filter(None, (alone.note, way.doubt))),
            cause=alone.cause if local > FACTOR else "",
        )
        if shifted is not None:
            row = replace(
                row, verdict="same", note=f"made up for in {shifted}: {row.cause or 'another share'}"
            )
        yield row
        if position == 0 and not row.counts and shifted is None:
            yield from precision_rows(row, alone.outputs, alone.coarse, runs.dtype)


def _unmatched(pair: CallPair, note: str) -> Row:
    nothing = np.zeros(())
    names = (pair.modules.torch, pair.modules.jax)
    row = row_of("forward", names, nothing, nothing, 0.0, kind=pair.torch.kind)
    return replace(row, call=pair.number, verdict="unknown", note=f"not compared: {note}")
