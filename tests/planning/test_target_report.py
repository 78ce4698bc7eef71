"""Verdicts, the cheapest that fits and what the table says, of rows as if they had been compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

from bridge.compiling.machines.targets import target_named
from bridge.compiling.target_leg import exhausted
from bridge.compiling.target_plan import TargetPlan, TargetRow, Task
from bridge.compiling.target_report import notes, table, unrolled_layers
from bridge.planning import load_policy
from bridge.planning.models.model import Model, Parameter


def row_of(
    policy: str, target: str, peak: int, gathered: int = 0, reduced: int = 0, **more: Any
) -> TargetRow:
    """As if it had been compiled."""
    collectives = [
        {"kind": collective, "times": 1, "bytes": size, "overlaps": collective == "all_gather"}
        for collective, size in (("all_gather", gathered), ("psum", reduced))
        if size
    ]
    held = dict.fromkeys(("weights", "moments", "gradients"), 1)
    memory = {"gradients": {"peak": peak, "temporary": peak - 3}, "update": {"peak": 3, "temporary": 9}}
    answer = {"held": held, "memory": memory, "collectives": collectives, "seconds": 2.0, "warnings": []}
    task = Task(dataclasses.replace(load_policy("fsdp"), source=policy), target_named(target), "shard_map")
    return TargetRow(task, 1000, {**answer, "cached": False, **more})


def test_the_cheapest_fits_with_the_reserve_and_sends_least() -> None:
    rows = (
        row_of("a", "h100:8", 901),
        row_of("b", "h100:8", 900, gathered=90),
        row_of("c", "h100:8", 100, reduced=50),
        row_of("d", "v5e:4x4", 1500),
        row_of("e", "v5e:4x4", 0, exhausted=1400),
    )
    plan = TargetPlan(rows)
    assert [row.fits for row in rows] == [False, True, True, False, False]
    assert [(target.name, row and row.task.policy.source) for target, row in plan.cheapest()] == [
        ("h100:8", "b"),
        ("v5e:4x4", None),
    ]
    assert plan.good
    assert not TargetPlan((*rows, TargetRow(rows[0].task, 1000, failed="no"))).good
    assert not TargetPlan(rows[3:]).good
    lines = list(notes(plan))
    assert "v5e:4x4: nothing fits with 10% of the memory kept in reserve" in lines
    assert (
        "e for v5e:4x4, shard_map: the compiler refused the program because it does not fit the device"
        in lines
    )
    headings, cells = table(plan)
    assert {len(row) for row in cells} == {len(headings)}
    assert cells[4][headings.index("peak")] == "> 1.4 kB"


def test_a_row_whose_text_cannot_be_read_has_memory_and_is_never_cheaper_than_a_known_one() -> None:
    known, unread = row_of("a", "h100:8", 900, gathered=90), row_of("b", "h100:8", 100, unread="async-update")
    assert unread.found is not None
    del unread.found["collectives"]
    plan = TargetPlan((unread, known))
    assert (unread.fits, unread.sent) == (True, None)
    assert [row and row.task.policy.source for _, row in plan.cheapest()] == ["a"]
    assert any("b for h100:8, shard_map: its collectives are unknown" in line for line in notes(plan))
    headings, cells = table(plan)
    start = headings.index("gathers")
    assert cells[0][start : start + 4] == ("", "", "", "")
    assert cells[1][start] != ""
    assert "h100:8: b (shard_map) is the cheapest that fits, an unknown number" in "\n".join(
        notes(TargetPlan((unread,)))
    )


def test_what_a_step_needs_at_least_is_read_from_a_compilers_refusal() -> None:
    held = {"weights": 100, "moments": 200, "gradients": 100, "batch": 4, "variables": 0}
    used = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.50G of "
        "15.75G hbm. Exceeded hbm capacity by 1.75G."
    )
    assert exhausted(used, held, "gradients") == int(17.5 * 2**30) + 200
    assert exhausted(used, held, "update") == int(17.5 * 2**30)
    temporary = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (135.90G) exceeds available HBM (15.75G). HLO module: jit_gradients."
    )
    assert exhausted(temporary, held, "gradients") == int(135.9 * 2**30) + 404
    assert exhausted("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: in other words", held, "update") == 404
    assert exhausted("INTERNAL: no such thing", held, "update") is None


def test_many_unrolled_layers_are_seen_and_scanned_ones_are_not() -> None:
    parameters = [Parameter(f"layers.{n}.w", (2,)) for n in range(9)]
    model = Model.of("m", parameters)
    assert unrolled_layers(model) == ("layers", 9)
    assert unrolled_layers(dataclasses.replace(model, stacks=("layers",))) is None
    assert unrolled_layers(Model.of("m", parameters[:8])) is None
