"""A step as spans, by hand and against the sums of ``step_time``."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from bridge.compiling.target_time import Roofline
from bridge.compiling.timing.program import Done, Loop, Program, Start, Step, Work
from bridge.compiling.timing.step_time import step_time, timeline
from bridge.compiling.timing.timeline import DEVICE, DOINGS, LINKS, Span
from bridge.core.hlo.collectives import Transfer
from tests.planning.programs import FACTORS, GATHER_DONE, GATHER_START, PRODUCT, SHARD, program
from tests.planning.test_step_time import IDEAL, MACHINE, memory, products, transfer
from tests.planning.test_target_time import compiled


def spans(*steps: Step) -> tuple[Span, ...]:
    return timeline(Program(steps), MACHINE, IDEAL)


def on(lane: str, found: tuple[Span, ...]) -> list[tuple[str, float, float]]:
    return [(one.kind, one.start, one.end) for one in found if one.lane == lane]


def test_what_is_not_covered_is_waited_for() -> None:
    found = spans(
        Start("a", transfer(4)), products(1), memory(1), Start("b", transfer(1, "reduce_scatter")), Done("a")
    )
    assert on(DEVICE, found) == [("products", 0, 1), ("memory", 1, 2), ("waiting", 2, 5)]
    # Transfers share the links, and what nobody waits for ends with the program.
    assert on(LINKS, found) == [("all_gather", 0, 4), ("reduce_scatter", 4, 5)]


def test_neighbours_of_one_kind_are_one_span() -> None:
    assert on(DEVICE, spans(products(1), products(2), memory(1), products(1))) == [
        ("products", 0, 3),
        ("memory", 3, 4),
        ("products", 4, 5),
    ]


BODY = (Start("a", transfer(3)), products(1), Done("a"), memory(1))
AHEAD = (Done("a"), Start("a", transfer(3)), products(2))


@pytest.mark.parametrize(
    "steps",
    [(Loop(5, BODY), products(3)), (Loop(50, AHEAD),), (Loop(4, (Loop(3, BODY), products(1))), memory(2))],
    ids=["apart", "ahead", "nested"],
)
def test_turns_of_a_loop_are_all_there(steps: tuple[Step, ...]) -> None:
    def unrolled(listed: tuple[Step, ...]) -> tuple[Step, ...]:
        found: list[Step] = []
        for one in listed:
            found += unrolled(one.steps) * one.times if isinstance(one, Loop) else [one]
        return tuple(found)

    looped, flat = spans(*steps), spans(*unrolled(steps))
    time = step_time(Program(steps), MACHINE, IDEAL)
    assert max(one.end for one in looped) == pytest.approx(time.total)
    for found in (looped, flat):
        sums = dict.fromkeys((*DOINGS, "all_gather"), 0.0)
        for one in found:
            sums[one.kind] += one.seconds
        assert sums == pytest.approx(
            {
                "products": time.products,
                "memory": time.memory,
                "waiting": time.exposed,
                "all_gather": time.communication,
            }
        )
        for lane in (DEVICE, LINKS):
            listed = on(lane, found)
            assert all(a[2] <= b[1] + 1e-9 for a, b in itertools.pairwise(listed)), "spans overlap"
    middle = time.total / 2 + 0.25
    for lane in (DEVICE, LINKS):
        at = [
            {kind for kind, start, end in on(lane, found) if start <= middle < end}
            for found in (looped, flat)
        ]
        assert at[0] == at[1]


def test_programs_of_a_step_follow_each_other(tmp_path: Path) -> None:
    text = program(*FACTORS, SHARD, GATHER_START, PRODUCT, GATHER_DONE)
    roofline = Roofline(10, None, efficiency=IDEAL)
    row = compiled(tmp_path, text, text)
    found, time = roofline.timeline(row), roofline.estimate(row).time
    assert time is not None
    assert max(one.end for one in found) == pytest.approx(time.total)
    gathers = [one for one in found if one.kind == "all_gather"]
    assert [one.start for one in gathers] == pytest.approx([0, time.total / 2])
    assert roofline.timeline(compiled(tmp_path, "no program")) == ()


def test_copies_inside_a_device_are_no_transfers() -> None:
    found = spans(Start("c", Transfer("copy", 20)), Work("p", {"bf16": 100}), Done("c"))
    assert on(LINKS, found) == []
    assert on(DEVICE, found) == [("products", 0, 1), ("memory", 1, 2)]
