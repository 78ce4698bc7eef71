"""A step's time on a machine of round numbers, by hand."""

from __future__ import annotations

import pytest

from bridge.compiling.machines.hardware import Fabric, Hardware, Machine
from bridge.compiling.timing.program import Done, Loop, Program, Start, Step, Work, read_program
from bridge.compiling.timing.step_time import Efficiency, StepTime, step_time, throughput
from bridge.core.hlo.collectives import COPY, Transfer
from tests.planning.programs import (
    FACTORS,
    GATHER_BYTES,
    GATHER_DONE,
    GATHER_START,
    PRODUCT,
    PRODUCT_BYTES,
    PRODUCT_FLOPS,
    SHARD,
    program,
)

# 100 flop/s in bfloat16, 10 bytes/s from memory, 8 bytes/s and direction between two devices.
MACHINE = Machine(Hardware("abacus", {"bf16": 100.0, "f32": 50.0}, 10.0, Fabric(8.0, 1.0)), (2,))
IDEAL = Efficiency(1, 1, 1)


def transfer(seconds: float, collective: str = "all_gather") -> Transfer:
    """Half of an all-gather's bytes come from the other of two devices."""
    return Transfer(collective, int(seconds * 16), ((0, 1),))


def products(seconds: float) -> Work:
    return Work("p", {"bf16": int(seconds * 100)}, 1)


def memory(seconds: float) -> Work:
    return Work("m", {}, int(seconds * 10))


def time(*steps: Step, efficiency: Efficiency = IDEAL) -> StepTime:
    return step_time(Program(steps), MACHINE, efficiency)


def parts(estimate: StepTime) -> tuple[float, float, float, float]:
    return estimate.products, estimate.memory, estimate.exposed, estimate.communication


def test_an_operation_takes_the_longer_of_products_and_memory() -> None:
    assert parts(time(products(3), memory(2), Work("both", {"bf16": 100, "f32": 100}, 20))) == (6, 2, 0, 0)
    assert parts(time(Work("both", {"bf16": 100, "f32": 100}, 40))) == (0, 4, 0, 0)


def test_a_covered_transfer_costs_nothing() -> None:
    estimate = time(Start("a", transfer(2)), products(3), Done("a"))
    assert parts(estimate) == (3, 0, 0, 2)
    assert estimate.total == 3


def test_a_half_covered_transfer_costs_its_rest() -> None:
    assert parts(time(Start("a", transfer(4)), products(1), memory(1), Done("a"))) == (1, 1, 2, 4)
    assert parts(time(Start("a", transfer(4)), Done("a"), products(1), memory(1))) == (1, 1, 4, 4)


def test_transfers_run_one_after_the_other() -> None:
    estimate = time(Start("a", transfer(2)), Start("b", transfer(2)), products(3), Done("b"), Done("a"))
    assert parts(estimate) == (3, 0, 1, 4)


def test_what_is_never_waited_for_ends_with_the_program() -> None:
    assert parts(time(Start("a", transfer(4)), products(1))) == (1, 0, 3, 4)


def test_a_copy_runs_beside_transfers_and_counts_as_memory() -> None:
    copy = Transfer(COPY, 20)
    assert parts(time(Start("a", transfer(2)), Start("c", copy), products(1), Done("c"), Done("a"))) == (
        1,
        1,
        0,
        2,
    )
    assert parts(time(Start("c", copy), Start("a", transfer(2)), products(1), Done("a"), Done("c"))) == (
        1,
        0,
        1,
        2,
    )
    assert parts(time(Start("c", copy), Start("d", copy), Done("d"))) == (0, 4, 0, 0)


def test_a_loop_multiplies() -> None:
    body = (Start("a", transfer(3)), products(1), Done("a"), memory(1))
    assert parts(time(Loop(5, body))) == (5, 5, 10, 15)
    assert parts(time(Loop(5, (Loop(3, body), products(1))))) == (20, 15, 30, 45)
    assert parts(time(Loop(5, body), products(1), Start("a", transfer(3)), Done("a"))) == (6, 5, 13, 18)


def test_a_transfer_that_a_turn_starts_for_the_next_one() -> None:
    body = (Done("a"), Start("a", transfer(3)), products(2))
    # The first turn has nothing to wait for; what the last turn starts is waited for at the end.
    for turns in (1, 2, 3, 1000):
        estimate = time(Loop(turns, body))
        assert parts(estimate) == pytest.approx((2 * turns, 0, turns, 3 * turns))
    assert parts(time(Loop(1000, body), products(5))) == pytest.approx((2005, 0, 999, 3000))
    queued = time(Loop(1000, body), Start("b", transfer(1)), Done("b"))
    assert parts(queued) == pytest.approx((2000, 0, 1001, 3001))


def test_a_backlog_that_grows_with_each_turn_is_not_cut_short() -> None:
    body = (Start("a", transfer(1)), Start("b", transfer(3)), products(2), Done("a"))
    expected = Program(body * 50)
    estimate, unrolled = time(Loop(50, body)), step_time(expected, MACHINE, IDEAL)
    assert parts(estimate) == pytest.approx(parts(unrolled))


def test_efficiency_stretches_each_part() -> None:
    estimate = time(
        products(3), memory(4), Start("a", transfer(2)), Done("a"), efficiency=Efficiency(0.75, 0.8, 0.5)
    )
    assert parts(estimate) == pytest.approx((4, 5, 4, 4))
    with pytest.raises(ValueError, match="efficiency of links: expected above 0 and up to 1, got 0"):
        Efficiency(links=0)


def test_a_text_becomes_a_time_and_an_overlap_taken_away_makes_it_longer() -> None:
    machine = Machine(Hardware("card", {"bf16": 1e9}, 1e12, Fabric(GATHER_BYTES * 7 / 8 / 0.1, 1.0)), (8,))
    beside = read_program(program(*FACTORS, SHARD, GATHER_START, PRODUCT, GATHER_DONE))
    before = read_program(program(*FACTORS, SHARD, GATHER_START, GATHER_DONE, PRODUCT))
    computed = PRODUCT_FLOPS / 1e9
    assert PRODUCT_BYTES / 1e12 < computed < 0.1
    assert parts(step_time(beside, machine, IDEAL)) == pytest.approx((computed, 0, 0.1 - computed, 0.1))
    assert parts(step_time(before, machine, IDEAL)) == pytest.approx((computed, 0, 0.1, 0.1))


def test_a_dtype_without_a_peak_is_refused() -> None:
    with pytest.raises(ValueError, match=r"abacus: expected matrix products in bf16, f32, .*, got f8"):
        time(Work("p", {"f8": 1}, 0))


def test_throughput() -> None:
    estimate = time(products(3), memory(2), Work("p", {"f32": 250}, 0))
    assert estimate.total == 10
    assert estimate.flops == {"bf16": 300, "f32": 250}
    # 10 tokens of a model of 5 parameters need 300 of the 2000 operations that two devices could do.
    expected = throughput(estimate, MACHINE, tokens=10, parameters=5, price=36)
    assert expected.tokens_per_second == 1
    assert expected.mfu == pytest.approx(0.15)
    assert expected.hfu == pytest.approx(0.8)
    # Two devices at 1 cent a second, for a million seconds.
    assert expected.dollars == pytest.approx(20_000)
    assert throughput(estimate, MACHINE, tokens=10, parameters=5).dollars is None
