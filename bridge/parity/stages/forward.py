"""Outputs of partner modules, and the module that causes a difference.

Each pair of calls is compared twice: as recorded, where a difference may come from above, and alone (see
``rerun_module``). A module that differs in the rerun introduces a difference itself. This way every fault is found, not
only the first, and a correct module after a fault is acquitted.

Torch may give every layer's attention a table (cosines and sines) that JAX computes elsewhere or in another shape. If
the table is wrong, each attention differs when it runs alone, but no attention is to blame::

    model  --> rotary table --> layers.0.self_attn, layers.1.self_attn, ...       all differ: the model made the table

If all modules of a kind that get the same input of this sort differ, the module around them introduced the difference.

Below float32, a module also shows whether both sides lose equally much to the dtype. If one side computes a softmax, a
norm or a router in float32 and the other in bfloat16, the float64 runs agree, but the bfloat16 runs round differently::

    torch  bfloat16 -> [ norm in float32  ] -> bfloat16      |low - high| = 3.1e-3
    JAX    bfloat16 -> [ norm in bfloat16 ] -> bfloat16      |low - high| = 3.3e-3      |torch - JAX| = 3.3e-3, else 0

Two correct programs may cast in another order, so different rounding counts only if the other modules of the kind round
alike. A softmax in bfloat16 inside an attention that casts in another order anyway is not detected.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridge.parity.partners.rows import Row, row_of
from bridge.parity.partners.runs import (
    CallPair,
    Runs,
    calls_around,
    children_of,
    inner_first,
    largest_ratio,
    leaf_pair,
)
from bridge.parity.recorded.distance import FACTOR, epsilon
from bridge.parity.stages.rerun_module import ModuleRerun, Rounding, rerun_module

_EQUAL = 0.04
"""Below this ratio float64 runs are equal: float32 constants leave more."""
COARSER = 2.0
"""How many times as much one side may lose to the compute dtype: correct pairs reach 1.4, by the order of casts."""
_FEW = 256
"""Below this many elements, a norm of rounding errors is chance."""
_APART, _ALIKE = 0.5, 0.1
"""Fractions of the rounding error: the least distance of sides that round differently, the largest if alike."""


@dataclass(frozen=True)
class Forward:
    """``rows``: in the order in which torch's calls end. ``shifted``: by index, pairs whose difference the enclosing
    module compensates, with that module's name: the two models divide the work between the modules differently."""

    rows: tuple[Row, ...]
    shifted: Mapping[int, str]


def compare_forward(runs: Runs, pairs: Sequence[CallPair]) -> Forward:
    """A row for each output leaf of each pair of calls."""
    index = {id(pair): number for number, pair in enumerate(pairs)}
    reruns: dict[int, ModuleRerun] = {}
    shifted: dict[int, str] = {}
    # Inner modules first: a fault of an inner module acquits the module around it.
    ordered = inner_first(runs, pairs)
    for pair in ordered:
        inner = children_of(pair, pairs, runs)
        rerun = rerun_module(runs, pair, inner)
        for child, torch_number in zip(inner.pairs, inner.torch, strict=True):
            # OPT adds the offset of its positions inside the table's module, or before it.
            number = index[id(child)]
            differs = number not in shifted and reruns[number].differences
            if differs and largest_ratio(runs, child, "outputs") <= _EQUAL:
                rerun = rerun.without(child.modules.name + (f"#{torch_number}" if torch_number else ""))
                shifted[number] = pair.modules.name
        own: list[CallPair] = []
        for child in inner.pairs if rerun.differences else ():
            number = index[id(child)]
            if number in shifted or not reruns[number].differences:
                continue
            # With its own inner module instead of torch's: Gemma's embedding is scaled inside or after. A difference
            # that a fault of the inner module causes would be a new one.
            with_own = rerun_module(runs, pair, inner, own=[*own, child])
            if with_own.differences < rerun.differences:
                rerun = with_own
                own.append(child)
                shifted[number] = pair.modules.name
        reruns[index[id(pair)]] = rerun
    places = [(pair, index[id(pair)]) for pair in ordered]
    rows = [row for pair, number in places for row in _rows(runs, pair, reruns[number], shifted.get(number))]
    rows = blame_first_fault(_without_reruns(rows, runs, pairs), runs, pairs)
    return Forward(tuple(odd_ones(rows)), shifted)


def _without_reruns(rows: Sequence[Row], runs: Runs, pairs: Sequence[CallPair]) -> list[Row]:
    """Verdicts of modules that could not run alone, as in traces.

    A difference begins where the inputs are the same and no difference begins inside. An inner module with different
    inputs also differs, but its difference does not begin there.
    """
    pair_of = {(pair.modules.torch, pair.number): pair for pair in pairs}
    explained: set[tuple[str, int]] = set()
    judged = []
    for row in rows:
        if row.verdict == "differs":
            pair = pair_of[row.name, row.call]
            inner = children_of(pair, pairs, runs).pairs
            inside = any((child.modules.torch, child.number) in explained for child in inner)
            begins = not inside and not largest_ratio(runs, pair, "inputs") > FACTOR
            if inside or begins:
                explained.add((row.name, row.call))
            row = replace(row, verdict="introduced" if begins else "inherited")
        judged.append(row)
    return judged


def _rows(runs: Runs, pair: CallPair, rerun: ModuleRerun, shifted: str | None) -> Iterator[Row]:
    names = pair.modules.torch, pair.modules.jax
    if not pair.outputs:
        shapes = [
            {name: leaf.shape for name, leaf in call.outputs.items()} for call in (pair.torch, pair.jax)
        ]
        note = f"not compared: no output of torch, {shapes[0]}, fits one of JAX, {shapes[1]}"
        row = row_of("forward", names, np.zeros(()), np.zeros(()), 0.0, kind=pair.torch.kind)
        yield replace(row, call=pair.number, verdict="unknown", note=note)
        return
    for position, (name, jax_name, way) in enumerate(pair.outputs):
        local = rerun.outputs.get(jax_name, math.nan)
        # An input that a module gives to inner modules has no row of its own: the first output represents it.
        if position == 0 and not math.isnan(local):
            local = max(local, rerun.worst_inner)
        values = leaf_pair(runs, pair, "outputs", (name, jax_name, way))
        row = row_of("forward", names, *values, dtype=runs.dtype, kind=pair.torch.kind, local=local)
        row = replace(
            row,
            leaf=name,
            call=pair.number,
            layout=str(way),
            note="; ".join(filter(None, (rerun.note, way.doubt))),
            cause=rerun.cause if local > FACTOR else "",
        )
        if shifted is not None:
            note = f"made up for in {shifted}: {row.cause or 'another share'}"
            row = replace(row, verdict="same", note=note)
        yield row
        if position == 0 and not row.counts and shifted is None:
            yield from precision_rows(row, rerun.outputs, rerun.coarse, runs.dtype)


def blame_first_fault(rows: Sequence[Row], runs: Runs, pairs: Sequence[CallPair]) -> list[Row]:
    """The rows; the blame for an input without a twin moves to the innermost pair around all modules that get it."""
    blamed = {(row.name, row.call) for row in rows if row.verdict == "introduced" and row.stage == "forward"}
    groups: dict[tuple[str, str], list[CallPair]] = {}
    for pair in pairs:
        if pair.without_twin:
            groups.setdefault((pair.torch.kind, _fingerprint(pair)), []).append(pair)
    moved = list(rows)
    for (module_kind, _), members in groups.items():
        names = {(pair.modules.torch, pair.number) for pair in members}
        # One module that is correct with this input acquits the input.
        if len(members) < 2 or not names <= blamed:
            continue
        maker = _around_all(members, runs, pairs)
        if maker is None:
            continue
        inputs = ", ".join(members[0].without_twin)
        note = f"in {inputs}, which every {module_kind} gets and which has no twin"
        for index, row in enumerate(moved):
            if row.stage != "forward":
                continue
            if (row.name, row.call) in names and row.verdict == "introduced":
                made_in = f"{inputs} made in {maker.modules.name}"
                moved[index] = replace(row, verdict="inherited", note=made_in)
            elif (row.name, row.call) == (maker.modules.torch, maker.number):
                worst = max(member.local for member in rows if (member.name, member.call) in names)
                moved[index] = replace(row, verdict="introduced", local=worst, note=note)
    return moved


def _fingerprint(pair: CallPair) -> str:
    """A digest of the inputs without a twin, which a large model gives to hundreds of calls."""
    digest = hashlib.sha256()
    for name in pair.without_twin:
        digest.update(pair.torch.inputs[name].tobytes())
    return digest.hexdigest()


def _around_all(members: Sequence[CallPair], runs: Runs, pairs: Sequence[CallPair]) -> CallPair | None:
    """The innermost pair whose torch call contains all of these."""
    by_call = {id(pair.torch): pair for pair in pairs}
    chains = [list(calls_around(pair.torch, runs.torch_high)) for pair in members]
    for call in chains[0]:
        if id(call) in by_call and all(any(call is other for other in chain) for chain in chains):
            return by_call[id(call)]
    return None


def precision_rows(
    row: Row, outputs: Collection[str], coarse: Mapping[str, Rounding], dtype: str
) -> Iterator[Row]:
    """A row for a module, from its forward row: none in float32.

    ``coarse``: by output leaf and by input that the module gives to inner modules; ``outputs`` says which ones are
    outputs. The row's ``ratio`` is that of the two errors, its ``local`` their distance in the dtype over their mean.
    """
    if epsilon(dtype) <= epsilon("float32") or math.prod(row.shape) < _FEW:
        return
    ratios = {
        where: loss.floor / min(loss.torch, loss.jax)
        for where, loss in coarse.items()
        if min(loss.torch, loss.jax) > 0
    }
    if not ratios:
        return
    where = max(ratios, key=lambda name: ratios[name])
    ratio, worst = ratios[where], coarse[where]
    apart = max(2 * loss.between / (loss.torch + loss.jax) for loss in coarse.values() if loss.floor > 0)
    row = replace(
        row, stage="precision", error=worst.floor, floor=min(worst.torch, worst.jax), ratio=ratio, local=apart
    )
    if not ratio > COARSER:
        yield replace(row, verdict="same", cause="", note="")
        return
    side, other = ("JAX", "torch") if worst.jax > worst.torch else ("torch", "JAX")
    cause = (
        f"{side} loses {ratio:.2g} times as much to {dtype} as {other}: a part that one side keeps in float32"
    )
    note = "" if where in outputs else f"in what it gives as {where}"
    yield replace(row, verdict="introduced", cause=cause, note=note)


def odd_ones(rows: Sequence[Row]) -> Iterator[Row]:
    """The rows, with verdicts that depend on the other modules of a kind.

    A module that rounds differently although all others of its kind round alike is odd. If it loses more, as do others
    of its kind that round differently, it only reflects the two frameworks' kernels (BatchNorm), and is not odd.
    """
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        if row.stage == "precision":
            by_kind.setdefault(row.kind, []).append(row.local)
    for row in rows:
        if row.stage == "precision":
            others = list(by_kind[row.kind])
            others.remove(row.local)
            row = _among(row, others)
        yield row


def _among(row: Row, others: Sequence[float]) -> Row:
    if not others:
        return row
    alike = max(others) < _ALIKE
    if row.verdict == "introduced" and not alike:
        return replace(row, verdict="same", note=f"so do other {row.kind} modules: {row.cause}", cause="")
    if row.verdict == "same" and alike and row.local > _APART:
        cause = f"the two sides round differently, which no other {row.kind} does: a part that one of them keeps in "
        return replace(row, verdict="introduced", cause=f"{cause}float32")
    return row
