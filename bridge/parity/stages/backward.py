"""Gradients of partner modules and parameters, and which module's backward a difference comes from.

On both sides a module alone gets torch's inputs and torch's gradient of its output. A forward that differs also makes
gradients differ, so a backward is blamed only if neither the module nor a module inside it was blamed before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bridge.parity.partners.rows import Row, ratio_of, row_of
from bridge.parity.partners.runs import CallPair, Runs, calls_around, in_layout, leaf_pair
from bridge.parity.partners.weight_map import Key, WeightMap
from bridge.parity.recorded.distance import FACTOR, distance, noise
from bridge.parity.recorded.recording import Call, Leaves, Rerun
from bridge.parity.stages.forward import Forward


def gradient_rows(runs: Runs, weights: WeightMap, least: Mapping[str, float]) -> Iterator[Row]:
    """A row for each JAX parameter: the loss's gradient, torch's in the JAX layout.

    ``least``: the known effect of rounding on a parameter's gradient, by JAX name.
    """
    high, low = (weights.to_jax(run.gradients, gradients=True) for run in (runs.torch_high, runs.torch_low))
    for name, jax_high in runs.jax_high.gradients.items():
        if name not in high:
            continue
        twin = high[name]
        floor = max(
            noise(low.get(name), twin, runs.dtype),
            noise(runs.jax_low.gradients.get(name), jax_high, runs.dtype),
            least.get(name, 0.0),
        )
        yield row_of("gradients", (weights.owners(name), name), twin, jax_high, floor, dtype=runs.dtype)


def activation_rows(runs: Runs, pairs: Sequence[CallPair]) -> Iterator[Row]:
    """A row for each floating output leaf of each pair of calls: its gradient, from the last call backwards."""
    for pair in reversed(pairs):
        for name, jax_name, way in pair.outputs:
            if name not in pair.torch.gradients or jax_name not in pair.jax.gradients:
                continue
            names = (pair.modules.torch, pair.modules.jax)
            values = leaf_pair(runs, pair, "gradients", (name, jax_name, way))
            row = row_of("backward", names, *values, dtype=runs.dtype, kind=pair.torch.kind)
            yield replace(row, leaf=name, call=pair.number, layout=str(way))


def backward_alone(runs: Runs, pair: CallPair, weights: WeightMap) -> tuple[float, str]:
    """The largest ratio among the gradients of inputs and own parameters, and the name of that gradient.

    NaN if the module's output has no gradient, or if the module cannot run alone.
    """
    cotangents = {
        name: pair.torch.gradients[name] for name, _, _ in pair.outputs if name in pair.torch.gradients
    }
    if not cotangents:
        return math.nan, ""
    jax_cotangents = in_layout(pair.outputs, cotangents)
    torch_inputs = {name: pair.torch.inputs[name] for name, _, _ in pair.inputs}
    jax_inputs = in_layout(pair.inputs, pair.torch.inputs)
    path, jax_path, number = pair.modules.torch, pair.modules.jax, pair.number
    try:
        high, low = (
            runs.torch.rerun(dtype, path, number, torch_inputs, cotangents=cotangents)
            for dtype in ("float64", runs.dtype)
        )
        jax_high, jax_low = (
            runs.jax.rerun(dtype, jax_path, number, jax_inputs, cotangents=jax_cotangents)
            for dtype in ("float64", runs.dtype)
        )
    # A module that cannot be called alone is not a fault of the model.
    except Exception as error:
        return math.nan, f"not run alone: {type(error).__name__}: {error!s:.200}"
    worst, note = 0.0, ""
    for what, torch_values, jax_values, torch_coarse, jax_coarse in (
        *_inputs(pair, high, jax_high, low, jax_low),
        *_parameters(weights, high, jax_high, low, jax_low),
    ):
        floor = max(noise(torch_coarse, torch_values, runs.dtype), noise(jax_coarse, jax_values, runs.dtype))
        ratio = ratio_of(distance(torch_values, jax_values, runs.dtype), floor)
        if ratio > worst:
            worst, note = ratio, f"in the gradient of {what}"
    return worst, note


Compared = tuple[str, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


def _inputs(pair: CallPair, high: Rerun, jax_high: Rerun, low: Rerun, jax_low: Rerun) -> Iterator[Compared]:
    """Inputs that are one tensor have one gradient, the sum: a side may get the tensor once, the other three times."""
    jax_inputs = {**pair.jax.inputs, **in_layout(pair.inputs, pair.torch.inputs)}
    for name, other, way in pair.inputs:
        if name in high.input_gradients and other in jax_high.input_gradients:
            torch_sum = _summed(name, pair.torch.inputs, high, low)
            jax_sum = _summed(other, jax_inputs, jax_high, jax_low)
            known = way.to_jax(torch_sum.known) & jax_sum.known
            high_values = way.to_jax(torch_sum.high) * known, jax_sum.high * known
            low_values = None if torch_sum.low is None else way.to_jax(torch_sum.low) * known
            jax_low_values = None if jax_sum.low is None else jax_sum.low * known
            yield f"its input {name}", *high_values, low_values, jax_low_values


class _Summed(NamedTuple):
    """The gradient of a tensor, in both dtypes, and the elements where it is known."""

    high: np.ndarray
    low: np.ndarray | None
    known: np.ndarray


def _summed(name: str, inputs: Leaves, high: Rerun, low: Rerun) -> _Summed:
    """The gradient of an input, summed with the gradients of inputs that are the same tensor or a part of it."""
    whole = inputs[name]
    total = high.input_gradients[name].astype(np.float64)
    coarse = low.input_gradients.get(name)
    coarse = None if coarse is None else coarse.astype(np.float64)
    known = np.ones(whole.shape, bool)
    for other, gradient in high.input_gradients.items():
        places = None if other == name else places_in(whole, inputs[other])
        if places is None:
            continue
        known.reshape(-1)[places.ambiguous] = False
        for values, more in ((total, gradient), (coarse, low.input_gradients.get(other))):
            if values is not None and more is not None:
                np.add.at(values.reshape(-1), places.target, more.reshape(-1)[places.taken])
    return _Summed(total, coarse, known)


class Places(NamedTuple):
    """The places of a part's elements in a whole: element ``taken`` of the part is at ``target`` of the whole, flat.

    ``ambiguous``: elements of the whole that cannot be assigned, since others hold the same number.
    """

    target: np.ndarray
    taken: np.ndarray
    ambiguous: np.ndarray


def places_in(whole: np.ndarray, part: np.ndarray) -> Places | None:
    """The places of a view, a copy, a slice or a transposition of ``whole``, by its numbers; None for other arrays."""
    if whole.dtype.kind in "iub" or part.dtype.kind in "iub" or not part.size or not whole.size:
        return None
    if whole.shape == part.shape and np.array_equal(whole, part):
        every = np.arange(whole.size)
        return Places(every, every, every[:0])
    numbers, first, counts = np.unique(whole.reshape(-1), return_index=True, return_counts=True)
    flat = part.reshape(-1)
    rank = np.minimum(np.searchsorted(numbers, flat), len(numbers) - 1)
    if not np.array_equal(numbers[rank], flat):
        return None
    single = counts[rank] == 1
    # Zeros and ones occur in many arrays: most numbers must be found in exactly one place.
    if 2 * int(single.sum()) <= flat.size:
        return None
    ambiguous = np.flatnonzero(np.isin(whole.reshape(-1), flat[~single]))
    return Places(first[rank[single]], np.flatnonzero(single), ambiguous)


def _parameters(
    weights: WeightMap, high: Rerun, jax_high: Rerun, low: Rerun, jax_low: Rerun
) -> Iterator[Compared]:
    """Parameters that one or several torch parameters complete; layers of a stack count as separate parameters."""
    translated, translated_low = (weights.parts_to_jax(run.gradients, gradients=True) for run in (high, low))
    for name, gradient in jax_high.gradients.items():
        key = _key(name, weights)
        twin = translated.get(key)
        if twin is not None and twin.size == gradient.size:
            coarse = translated_low.get(key)
            low_values = None if coarse is None else coarse.reshape(gradient.shape)
            yield name, twin.reshape(gradient.shape), gradient, low_values, jax_low.gradients.get(name)


def _key(name: str, weights: WeightMap) -> Key:
    """The parameter, or the layer of a stack if a name has a number that is in no parameter's name."""
    if name in weights.sources:
        return name, ()
    parts = name.split("/")
    for index, part in enumerate(parts):
        base = "/".join((*parts[:index], *parts[index + 1 :]))
        if part.isdecimal() and base in weights.sources:
            return base, (int(part),)
    return name, ()


def innermost_suspects(
    suspects: set[int], pairs: Sequence[CallPair], runs: Runs, faulty: set[int]
) -> set[int]:
    """Suspects without another suspected pair inside, in forward or backward. All are indices."""
    index = {id(pair.torch): number for number, pair in enumerate(pairs)}
    explained = {
        index[id(call)]
        for number in suspects | faulty
        for call in calls_around(pairs[number].torch, runs.torch_high)
        if id(call) in index
    }
    return suspects - explained - faulty


def suspects_without_reruns(
    rows: Sequence[Row], gradients: Sequence[Row], pairs: Sequence[CallPair], local: Mapping[int, float]
) -> set[int]:
    """Indices of pairs that could not run alone, such as taps, in which a difference of gradients begins.

    The gradients of their outputs agree, but the gradients of their parameters or inputs do not. Only for models whose
    forward agrees: a difference of values makes gradients differ anywhere.
    """
    differing = {(row.name, row.call) for row in rows if row.counts}
    agreeing = {(row.name, row.call) for row in rows} - differing
    givers = [
        pair for pair in pairs if (pair.modules.torch, pair.number) in differing or _one_sided_gradient(pair)
    ]
    wrong = [name for row in gradients if row.counts for name in row.name.split(", ")]
    suspects = set()
    for number, pair in enumerate(pairs):
        path = pair.modules.torch
        if not math.isnan(local[number]) or (path, pair.number) not in agreeing:
            continue
        own = any(name.startswith(f"{path}." if path else "") for name in wrong)
        if own or any(_gives(giver.torch, pair.torch) for giver in givers):
            suspects.add(number)
    return suspects


def _one_sided_gradient(pair: CallPair) -> bool:
    """Whether the loss depends on an output on only one side; such an output has no row."""
    return any(
        (name in pair.torch.gradients) != (other in pair.jax.gradients)
        and bool(np.any(pair.torch.gradients.get(name, pair.jax.gradients.get(other))))
        for name, other, _ in pair.outputs
    )


def _gives(giver: Call, taker: Call) -> bool:
    """Whether an output of one call is an input of the other."""
    return giver is not taker and any(
        np.array_equal(output, taken)
        for output in giver.outputs.values()
        for taken in taker.inputs.values()
        if output.dtype.kind == "f" and output.shape == taken.shape
    )


def without_shifted(rows: Iterable[Row], pairs: Sequence[CallPair], forward: Forward) -> list[Row]:
    """The verdict is "same" for gradients of modules whose difference another one compensates: they are not twins."""
    names = {(pairs[n].modules.torch, pairs[n].number): where for n, where in forward.shifted.items()}
    return [
        replace(row, verdict="same", note=f"made up for in {names[row.name, row.call]}")
        if (row.name, row.call) in names
        else row
        for row in rows
    ]


def with_blame(
    rows: Sequence[Row],
    gradients: Sequence[Row],
    pairs: Sequence[CallPair],
    runs: Runs,
    weights: WeightMap,
    forward: Forward,
) -> list[Row]:
    index_of = {(pair.modules.torch, pair.number): number for number, pair in enumerate(pairs)}
    # Also modules that were acquitted because an input without a twin was wrong.
    faulty = {
        index_of[row.name, row.call]
        for row in forward.rows
        if row.stage == "forward"
        and row.local > FACTOR
        and index_of[row.name, row.call] not in forward.shifted
    }
    reruns = {
        number: (math.nan, "") if number in forward.shifted else backward_alone(runs, pair, weights)
        for number, pair in enumerate(pairs)
    }
    local = {number: ratio for number, (ratio, _) in reruns.items()}
    suspects = {number for number, ratio in local.items() if ratio > FACTOR}
    if not any(row.counts for row in forward.rows):
        suspects |= suspects_without_reruns(rows, gradients, pairs, local)
    guilty = innermost_suspects(suspects, pairs, runs, faulty)
    judged = []
    for row in rows:
        number = index_of[row.name, row.call]
        ratio, note = reruns[number]
        if number in guilty:
            row = replace(row, verdict="introduced", local=ratio, note=note)
        elif row.counts:
            row = replace(row, verdict="inherited", local=ratio)
        judged.append(row)
    return judged
