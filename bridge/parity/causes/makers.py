"""One fault that many modules show: an input without a twin, such as a rotary table, that was made above all of them.

Torch may give every layer's attention a table (cosines and sines) that JAX computes elsewhere or in another shape. If
the table is wrong, each attention differs when it runs alone, and none of them is to blame::

    model  --> rotary table --> layers.0.self_attn, layers.1.self_attn, ...       all differ: the model made the table

Where all modules of a kind that get the same such input differ, the difference is introduced by the module around them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from bridge.parity.partners.rows import Row
from bridge.parity.partners.runs import CallPair, Runs
from bridge.parity.recorded.recording import Call


def moved_to_makers(rows: Sequence[Row], runs: Runs, pairs: Sequence[CallPair]) -> list[Row]:
    """The rows, with the blame for such an input moved to the innermost pair around all that get it."""
    blamed = {(row.name, row.call) for row in rows if row.verdict == "introduced" and row.stage == "forward"}
    groups: dict[tuple[str, str], list[CallPair]] = {}
    for pair in pairs:
        if pair.without_twin:
            groups.setdefault((pair.torch.kind, _signature(pair)), []).append(pair)
    found = list(rows)
    for (kind, _), members in groups.items():
        names = {(pair.modules.torch, pair.number) for pair in members}
        if len(members) < 2 or not names <= blamed:
            continue
        maker = _around_all(members, runs, pairs)
        if maker is None:
            continue
        inputs = ", ".join(members[0].without_twin)
        note = f"in {inputs}, which every {kind} gets and which has no twin"
        for index, row in enumerate(found):
            if row.stage != "forward":
                continue
            if (row.name, row.call) in names and row.verdict == "introduced":
                found[index] = replace(
                    row, verdict="inherited", note=f"{inputs} made in {maker.modules.name}"
                )
            elif (row.name, row.call) == (maker.modules.torch, maker.number):
                worst = max(one.local for one in rows if (one.name, one.call) in names)
                found[index] = replace(row, verdict="introduced", local=worst, note=note)
    return found


def _signature(pair: CallPair) -> str:
    seen = hashlib.sha256()
    for name in pair.without_twin:
        seen.update(pair.torch.inputs[name].tobytes())
    return seen.hexdigest()


def _around_all(members: Sequence[CallPair], runs: Runs, pairs: Sequence[CallPair]) -> CallPair | None:
    """The innermost pair whose torch call has all these inside."""
    by_call = {id(pair.torch): pair for pair in pairs}
    chains = [_chain(pair.torch, runs) for pair in members]
    for call in chains[0]:
        if id(call) in by_call and all(any(call is other for other in chain) for chain in chains):
            return by_call[id(call)]
    return None


def _chain(call: Call, runs: Runs) -> list[Call]:
    """The calls around a call, from inside."""
    found = []
    parent = call.parent
    while parent is not None:
        found.append(runs.torch_high.calls[parent])
        parent = found[-1].parent
    return found
