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


def on(lane: str, drawn: tuple[Span, ...]) -> list[tuple[str, float, float]]:
    return [(span.kind, span.start, span.end) for span in drawn if span.lane == lane]


def test_what_is_not_covered_is_waited_for() -> None:
    drawn = spans(
        Start("a", transfer(4)), products(1), memory(1), Start("b", transfer(1, "reduce_scatter")), Done("a")
    )
    assert on(DEVICE, drawn) == [("products", 0, 1), ("memory", 1, 2), ("waiting", 2, 5)]
    # Transfers share the links, and what nobody waits for ends with the program.
    assert on(LINKS, drawn) == [("all_gather", 0, 4), ("reduce_scatter", 4, 5)]


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
        flattened: list[Step] = []
        for step in listed:
            flattened += unrolled(step.steps) * step.times if isinstance(step, Loop) else [step]
        return tuple(flattened)

    looped, flat = spans(*steps), spans(*unrolled(steps))
    time = step_time(Program(steps), MACHINE, IDEAL)
    assert max(span.end for span in looped) == pytest.approx(time.total)
    for drawn in (looped, flat):
        sums = dict.fromkeys((*DOINGS, "all_gather"), 0.0)
        for span in drawn:
            sums[span.kind] += span.seconds
        assert sums == pytest.approx(
            {
                "products": time.products,
                "memory": time.memory,
                "waiting": time.exposed,
                "all_gather": time.communication,
            }
        )
        for lane in (DEVICE, LINKS):
            listed = on(lane, drawn)
            assert all(a[2] <= b[1] + 1e-9 for a, b in itertools.pairwise(listed)), "spans overlap"
    middle = time.total / 2 + 0.25
    for lane in (DEVICE, LINKS):
        at = [
            {activity for activity, start, end in on(lane, drawn) if start <= middle < end}
            for drawn in (looped, flat)
        ]
        assert at[0] == at[1]


def test_programs_of_a_step_follow_each_other(tmp_path: Path) -> None:
    text = program(*FACTORS, SHARD, GATHER_START, PRODUCT, GATHER_DONE)
    roofline = Roofline(10, None, efficiency=IDEAL)
    row = compiled(tmp_path, text, text)
    drawn, time = roofline.timeline(row), roofline.estimate(row).time
    assert time is not None
    assert max(span.end for span in drawn) == pytest.approx(time.total)
    gathers = [span for span in drawn if span.kind == "all_gather"]
    assert [span.start for span in gathers] == pytest.approx([0, time.total / 2])
    assert roofline.timeline(compiled(tmp_path, "no program")) == ()


def test_copies_inside_a_device_are_no_transfers() -> None:
    drawn = spans(Start("c", Transfer("copy", 20)), Work("p", {"bf16": 100}), Done("c"))
    assert on(LINKS, drawn) == []
    assert on(DEVICE, drawn) == [("products", 0, 1), ("memory", 1, 2)]
