"""The plan of the pool: which buffers share memory, and how that is drawn."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from torch_impl.runtime.memory.pool import Slot
from torch_impl.runtime.memory.pool_plan import Lifetime, colour, plan_buffers

spans = st.integers(0, 30).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, 31)))


@given(st.lists(spans, max_size=20))
def test_no_two_overlapping_lifetimes_share_a_slot_and_slots_are_the_fewest(lifetimes: list[Any]) -> None:
    numbers = colour([[span] for span in lifetimes])
    for (a, slot), (b, other) in combinations(zip(lifetimes, numbers, strict=True), 2):
        assert slot != other or a[1] <= b[0] or b[1] <= a[0]
    depth = max((sum(a <= time < b for a, b in lifetimes) for time in range(31)), default=0)
    assert len(set(numbers)) == depth


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Lifetime], int, int]:
    """Buffers with one span in forward, one in backward, or both."""
    turn, duration = 12, 24
    lifetimes = []
    for index in range(draw(st.integers(1, 10))):
        passes = draw(
            st.sampled_from([[(0, turn)], [(turn, duration)], [(0, turn), (turn, duration)], [(0, duration)]])
        )
        its = []
        for first, last in passes:
            start = draw(st.integers(first, last - 1))
            its.append((start, draw(st.integers(start + 1, last))))
        nbytes = draw(st.sampled_from([8, 8, 24]))
        lifetimes.append(
            Lifetime(str(index), draw(st.sampled_from(["weights", "gradients"])), nbytes, tuple(its))
        )
    return lifetimes, turn, duration


def bytes_at(spans: list[tuple[tuple[int, int], int]], time: int) -> int:
    return sum(nbytes for (start, end), nbytes in spans if start <= time < end)


@given(steps())
@examples()
def test_a_plan_needs_no_more_memory_in_a_pass_than_buffers_of_their_own(step: Any) -> None:
    lifetimes, turn, duration = step
    plan = plan_buffers(lifetimes, turn, duration)
    for (a, slot), (b, other) in combinations(zip(lifetimes, plan.slots, strict=True), 2):
        if slot is not None and slot == other:
            assert (a.purpose, a.nbytes) == (b.purpose, b.nbytes)
            assert all(x[1] <= y[0] or y[1] <= x[0] for x in a.spans for y in b.spans)
    alone = [(span, lifetime.nbytes) for lifetime in lifetimes for span in lifetime.spans]
    pairs = list(zip(lifetimes, plan.slots, strict=True))
    planned = [(span, lifetime.nbytes) for lifetime, slot in pairs if slot is None for span in lifetime.spans]
    for slot, held in enumerate(plan.memory):
        assert all(end <= start for (_, end), (start, _) in pairwise(held))
        uses = [span for lifetime, its in pairs if its == slot for span in lifetime.spans]
        assert all(any(start <= a and b <= end for start, end in held) for a, b in uses)
        planned += [(span, plan.slot_bytes[slot]) for span in held]
    for times in range(turn), range(turn, duration):
        assert max(bytes_at(planned, t) for t in times) <= max(bytes_at(alone, t) for t in times)
    assert plan.peak == max(bytes_at(planned, t) for t in range(duration))
    assert plan.allocations == len(planned) <= len(alone)


class User:
    """A buffer without contents."""

    def lose_contents(self) -> None:
        pass


@given(steps())
@examples()
def test_slots_that_are_used_as_planned_have_memory_when_the_plan_says(step: Any) -> None:
    lifetimes, turn, duration = step
    plan = plan_buffers(lifetimes, turn, duration)
    user: Any = User()
    for number, held in enumerate(plan.memory):
        slot = Slot(
            plan.slot_bytes[number],
            torch.device("cpu"),
            (plan.keeps(number, False), plan.keeps(number, True)),
        )
        uses = sorted(
            s
            for lifetime, its in zip(lifetimes, plan.slots, strict=True)
            if its == number
            for s in lifetime.spans
        )
        # A use may last from forward into backward.
        if any(start < turn < end for start, end in uses):
            continue
        slot.begin(backward=False)
        for time in range(duration + 1):
            for _ in [end for _, end in uses if end == time]:
                slot.leave(user)
            if time == turn:
                assert slot.storage.nbytes() == 0
                slot.begin(backward=True)
            for _ in [start for start, _ in uses if start == time]:
                assert slot.take(user)
            expected = any(start <= time < end for start, end in held)
            assert (slot.storage.nbytes() > 0) == expected, (plan, number, time)


def test_only_the_user_of_a_slot_ends_its_use() -> None:
    slot, user, other = Slot(8, torch.device("cpu"), ((), ())), User(), User()
    slot.begin(backward=False)
    assert slot.take(user)
    assert not slot.take(other)
    slot.leave(other)
    assert (slot.user, slot.storage.nbytes()) == (user, 8)
    slot.leave(user)
    assert (slot.user, slot.storage.nbytes()) == (None, 0)


PICTURE = """\
2 slots for 4 of 6 buffers, 6 instead of 9 allocations a step, at most 36 B at once
               forward  backward
weights 0     |aaaa-ccc.ccc--aaaa..| 8 B
gradients 1   |..........ccc---aaa.| 16 B
weights own   |..bbbb.....bbbb.....| 8 B
gradients own |.........ddddddddddd| 4 B
a  layers.0
b  layers.1
c  layers.2
d  root"""


def test_a_plan_is_drawn_with_slots_as_rows_and_time_as_columns() -> None:
    lifetimes = [
        Lifetime("layers.0", "weights", 8, ((0, 4), (14, 18))),
        Lifetime("layers.1", "weights", 8, ((2, 6), (11, 15))),
        Lifetime("layers.2", "weights", 8, ((5, 8), (9, 12))),
        Lifetime("layers.0", "gradients", 16, ((16, 19),)),
        Lifetime("layers.2", "gradients", 16, ((10, 13),)),
        Lifetime("root", "gradients", 4, ((9, 20),)),
    ]
    assert str(plan_buffers(lifetimes, 9, 20)) == PICTURE
