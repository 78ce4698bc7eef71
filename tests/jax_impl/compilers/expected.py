"""What a step's program should have: collectives by the table of strategies, and no less than a step by hand."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest

from tests.jax_impl.diagnostics.test_compiled_collectives import expected_of
from tests.support.compilers.setting import BY_HAND, Compiled, Setting

ZERO_3 = "optim_grads_params"
GATHER, SCATTER, REDUCE = "all_gather", "reduce_scatter", "psum"
# Temporary bytes over those of a step by hand. An engine that gathers twice and keeps no weights needs no more.
MEMORY_LIMIT = 1.1


def case(target: str, engine: str, size: str, strategy: str = ZERO_3, *marks: Any, **options: Any) -> Any:
    """A setting as a parameter of a test."""
    setting = Setting(target, engine, size, strategy=strategy, **options)
    return pytest.param(setting, id=str(setting), marks=marks)


def wrong(reason: str) -> Any:
    """Marks a case that is known to fail; once mended it must be unmarked."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


def by_hand(setting: Setting) -> Setting:
    """The same step without an engine."""
    return dataclasses.replace(setting, contestant=BY_HAND, units=())


def assert_collectives(setting: Setting, compiled: Compiled) -> None:
    """As many, of as many elements, as the table of strategies says, none lost and none added."""
    if setting.contestant == "shard_map":
        assert compiled.sizes() == _of_buffers(setting, compiled)
    else:
        _assert_of_parameters(setting, compiled)


def assert_gathers(setting: Setting, compiled: Compiled) -> None:
    """As many gathers as the table of strategies says, of shards that are padded to whole rows of 128 elements."""
    gathered = Counter(
        {size: times for (operation, size), times in compiled.sizes().items() if operation == GATHER}
    )
    whole = {stored.size for stored in compiled.stored}
    expected: Counter[int] = Counter()
    for (operation, size), times in _of_buffers(setting, compiled).items():
        if operation == GATHER:
            devices = compiled.shards[size not in whole]
            expected[devices * math.ceil(size / devices / 128) * 128] += times
    assert gathered == expected


def assert_payload_travels(setting: Setting, compiled: Compiled) -> None:
    """Gathers are of bytes but for vectors, and move no more than payload and scales twice, with padding."""
    gathered = [
        (array.dtype, array.size, collective.times)
        for collective in compiled.collectives
        if collective.kind == GATHER
        for array in collective.arrays
    ]
    wide = [size for dtype, size, _ in gathered if dtype not in ("u8", "s8")]
    elements = sum(stored.size * stored.layers for stored in compiled.stored)
    assert all(size < elements / 50 for size in wide), gathered
    payload = sum(size * times for dtype, size, times in gathered if dtype in ("u8", "s8"))
    # XLA leaves out what backward does not read.
    assert elements < payload <= 2.2 * elements, (payload, elements)


def assert_parts_travel(setting: Setting, compiled: Compiled) -> None:
    """Gathers and reductions of what each device has of what model axes cut; activations are reduced beside them."""
    expected, sizes = _of_buffers(setting, compiled), compiled.sizes()
    for operation in (GATHER, SCATTER):
        planned = {key: times for key, times in expected.items() if key[0] == operation}
        assert {key: times for key, times in sizes.items() if key[0] == operation} == planned
    assert {operation for operation, _ in sizes} == {GATHER, SCATTER, REDUCE}


def assert_reduce_scatters(setting: Setting, compiled: Compiled) -> None:
    """As many as the table of strategies says, and no all-reduce; XLA:TPU pads what it reduces."""
    expected = Counter(operation for operation, _ in _of_buffers(setting, compiled).elements())
    reduced = Counter(operation for operation, _ in compiled.sizes().elements())
    assert {reduction: reduced[reduction] for reduction in (SCATTER, REDUCE)} == {
        SCATTER: expected[SCATTER],
        REDUCE: 0,
    }


def _of_buffers(setting: Setting, compiled: Compiled) -> Counter[tuple[str, int]]:
    expected: Counter[tuple[str, int]] = Counter()
    mesh = "2x2" if setting.inner else "4"
    for stored in compiled.stored:
        each = expected_of(setting.strategy, mesh, stored.size, compiled.shards, setting.microbatches)
        expected.update({key: times * stored.layers for key, times in each.items()})
    return expected


def _assert_of_parameters(setting: Setting, compiled: Compiled) -> None:
    sizes, k = compiled.sizes(), setting.microbatches
    least: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for stored in compiled.stored:
        if stored.cut:
            uses = 2 * k if setting.strategy == "optim_grads_params" else 1
            # The backward of a lookup needs no table, and XLA may keep a small scale where it keeps activations.
            once = stored.name.endswith(("embedding", "scale"))
            most[stored.size] += stored.layers * (
                k if stored.name.endswith("embedding") and uses > 1 else uses
            )
            least[stored.size] += stored.layers * (k if once and uses > 1 else uses)
    gathered = Counter({size: times for (operation, size), times in sizes.items() if operation == GATHER})
    assert gathered.keys() == most.keys()
    assert {
        size: (least[size], gathered[size], most[size]) for size in most if gathered[size] < least[size]
    } == {}
    assert {
        size: (least[size], gathered[size], most[size]) for size in most if gathered[size] > most[size]
    } == {}
    reduced = {
        reduction: sum(size * n for (operation, size), n in sizes.items() if operation == reduction)
        for reduction in (SCATTER, REDUCE)
    }
    elements = {
        cut: sum(stored.size * stored.layers for stored in compiled.stored if stored.cut == cut)
        for cut in (True, False)
    }
    assert reduced[SCATTER] == k * elements[True]
    # XLA appends scalars, such as the loss, to an array that it reduces.
    assert 0 <= reduced[REDUCE] - k * elements[False] <= 8
    assert {operation for operation, _ in sizes} <= {GATHER, SCATTER, REDUCE}


def assert_no_more_memory_than_by_hand(compiled: Compiled, by_hand: Compiled) -> None:
    assert compiled.temporary <= MEMORY_LIMIT * by_hand.temporary


def assert_as_much_overlap_as_by_hand(
    compiled: Compiled, by_hand: Compiled, operations: tuple[str, ...]
) -> None:
    assert compiled.overlap(*operations) >= by_hand.overlap(*operations)
