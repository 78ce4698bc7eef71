"""Buffers that units use in turn: the same results as without, whatever a program does after its plan was made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.pool_programs import (
    BLOCKS,
    STEPS,
    WARM_UP,
    WORLD,
    Tower,
    data,
    loss_of,
    plain,
    some,
)
from tests.support.torch_impl.toy import Block, assert_at_rest, assert_same_weights, seeded, whole
from torch_impl.comm.streams import CpuStreams
from torch_impl.runtime.gradients.gradient import GradientBuffer


def sharded_tower(pool: bool, **options: Any) -> Tower:
    model = seeded(Tower)
    for block in model.blocks:
        torch_impl.fully_shard(block, **options)
    torch_impl.fully_shard(model, **options)
    model.set_buffer_pool(pool)
    return model


def slots_in_use(model: Tower) -> int:
    return sum(block._unit.groups[0].weights.compute._slot is not None for block in model.blocks)


def assert_no_memory_at_rest(model: Tower) -> None:
    assert_at_rest(model)
    for slot in model._unit.schedule.pool._slots.values():
        assert slot.storage.nbytes() == 0
    assert model.memory_report().compute_weights == 0


def train(model: Tower, step_of: Any, seen: list[torch.Tensor]) -> None:
    """Steps as planned, then others, then as planned again; all weights to ``seen``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sharded = isinstance(model, torch_impl.FSDPModule)
    for step in range(WARM_UP + 5):
        first, second = (data(step)[dist.get_rank()] if sharded else data(step).transpose(0, 1))[:2]
        departs = WARM_UP <= step < WARM_UP + 3
        (step_of if departs else STEPS["plain"])(model, first, second)
        if sharded:
            assert_no_memory_at_rest_if_resharded(model)
            seen += [whole(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if sharded and step == WARM_UP - 1:
            pooled = model.buffer_plan() is not None
            assert slots_in_use(model) == (BLOCKS if pooled else 0)
    if sharded:
        seen += [whole(p).clone() for p in model.parameters()]


def assert_no_memory_at_rest_if_resharded(model: Tower) -> None:
    if all(block._unit.reshard_after_forward is None for block in model.blocks):
        assert_no_memory_at_rest(model)


def compare_with_and_without(name: str, compute: str) -> None:
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=getattr(torch, compute), reduce_dtype=torch.float32)
    results: list[list[torch.Tensor]] = [[], []]
    for pool in (True, False):
        model = sharded_tower(pool, mp_policy=policy)
        train(model, STEPS[name], results[pool])
        assert (model.buffer_plan() is not None) == pool
    for tensor, other in zip(*results, strict=True):
        assert torch.equal(tensor, other)
    if compute == "float32":
        reference = seeded(Tower)
        train(reference, STEPS[name], [])
        assert_same_weights(model, reference)


# Every sixth program in the normal run: each trains twice.
PROGRAMS = [
    name if index % 6 == 0 else pytest.param(name, marks=pytest.mark.slow) for index, name in enumerate(STEPS)
]


@pytest.mark.fast_cases("crossing")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_departs_from_its_plan_gets_the_same_results_as_without(
    ranks: RankGroup, name: str
) -> None:
    ranks.run(WORLD, compare_with_and_without, name, "float32")


@pytest.mark.slow
def test_low_precision_buffers_are_pooled_with_the_same_results(ranks: RankGroup) -> None:
    ranks.run(WORLD, compare_with_and_without, "accumulating", "bfloat16")


def plain_step(model: Tower, step: int) -> None:
    loss_of(model, data(step)[dist.get_rank(), 0]).backward()


def warmed_up(pool: bool = True, **options: Any) -> tuple[Tower, torch.optim.Optimizer]:
    model = sharded_tower(pool, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(WARM_UP):
        plain_step(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class Stash(Block):
    """Leaves a tensor where the runtime does not see it."""

    stash: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stash = (self.gain * self.down(x[:, :3])).sum()
        return super().forward(x)


def enter_unnoticed() -> None:
    model = seeded(Tower)
    for k in range(BLOCKS):
        model.blocks[k] = seeded(Stash)
        torch_impl.fully_shard(model.blocks[k])
    torch_impl.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(WARM_UP):
        plain_step(model, step)
        optimizer.step()
    assert slots_in_use(model) == BLOCKS

    def early(grad: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(model.blocks[0].stash, entry)

    entry = torch.randn(4, 5, requires_grad=True)

    def program(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        x = plain(blocks[:4], entry)
        x.register_hook(early)
        return plain(blocks[4:], x)

    loss_of(model, entry.detach(), program).backward()


def test_a_backward_that_enters_a_unit_unnoticed_is_refused_not_wrong(ranks: RankGroup) -> None:
    ranks.run(WORLD, enter_unnoticed)


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Sizes that freed storages get inside the context."""
    original, sizes = torch.UntypedStorage.resize_, []

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.nbytes() == 0 and size:
            sizes.append(size)
        return original(storage, size)

    torch.UntypedStorage.resize_ = resize
    try:
        yield sizes
    finally:
        torch.UntypedStorage.resize_ = original


def count_allocations(copies: bool) -> list[int]:
    """Slots, and how often they get memory in a step; ``copies`` as of the CPU's streams."""
    CpuStreams.copies = copies
    try:
        return counted_allocations()
    finally:
        CpuStreams.copies = True


def counted_allocations() -> list[int]:
    model, _ = warmed_up()
    plan = model.buffer_plan()
    planned = sum(map(len, plan.memory))
    with allocations() as sizes:
        plain_step(model, 9)
    # The root's weights, once a step, are in no slot.
    assert len(sizes) == planned + 1, (sizes, str(plan))
    model.set_buffer_pool(False)
    assert model.buffer_plan() is None
    other, _ = warmed_up(pool=False)
    with allocations() as sizes:
        plain_step(other, 9)
    assert len(sizes) == 2 * BLOCKS + 1
    return [len(plan.memory), planned]


def test_a_step_allocates_as_often_as_the_plan_says(ranks: RankGroup) -> None:
    # Two for weights in turn; gradients need one, since a reduction is finished before the next buffer is made.
    assert ranks.run(WORLD, count_allocations, False) == [[3, 5]] * WORLD
    # Where what is reduced was copied, gradients need none, and weights do not keep their memory beside such a buffer.
    assert ranks.run(WORLD, count_allocations, True) == [[2, 8]] * WORLD


def live_bytes(model: Tower, gradients: Sequence[weakref.ref[torch.Tensor]]) -> int:
    """Of compute weights, gradient buffers and slots."""
    storages = [unit.groups[0].weights.compute.flat.untyped_storage() for unit in model._units(True)]
    storages += [flat.untyped_storage() for ref in gradients if (flat := ref()) is not None]
    storages += [slot.storage for slot in model._unit.schedule.pool._slots.values()]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def peak_of(pool: bool) -> list[int]:
    """Bytes at the beginning and the end of every block, and when its first gradient arrives."""
    model, _ = warmed_up(pool)
    seen: list[int] = []
    gradients: list[weakref.ref[torch.Tensor]] = []
    take = GradientBuffer.take

    def noting(memory: GradientBuffer) -> torch.Tensor:
        flat = take(memory)
        gradients.append(weakref.ref(flat))
        note()
        return flat

    def note(*_: Any) -> None:
        seen.append(live_bytes(model, gradients))

    def program(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            note()
            x = block(x)
            note()
            x.register_hook(note)
        return x

    for block in model.blocks:
        block.up.register_forward_hook(note)
    GradientBuffer.take = noting
    try:
        loss_of(model, data(9)[dist.get_rank(), 0], program).backward()
    finally:
        GradientBuffer.take = take
    assert len(gradients) == BLOCKS + 1
    return seen


@on_ranks(WORLD)
def test_the_peak_of_live_buffers_is_not_above_that_without_a_pool() -> None:
    pooled, alone = peak_of(True), peak_of(False)
    assert len(pooled) == len(alone) == 5 * BLOCKS + 1
    forward = 3 * BLOCKS
    assert max(pooled[:forward]) <= max(alone[:forward])
    assert max(pooled[forward:]) <= max(alone[forward:]), (pooled, alone)
    # When the last block has ended, its root computes with as much memory as without a pool.
    assert pooled[forward - 1] == alone[forward - 1]


@on_ranks(WORLD)
def test_a_deleted_model_frees_its_slots_without_the_garbage_collector() -> None:
    # What torch imports at the first use of a process keeps the frames of its callers until a collection.
    warmed_up()
    gc.collect()
    gc.disable()
    try:
        model, optimizer = warmed_up()
        loss = loss_of(model, data(9)[dist.get_rank(), 0])
        pool = model._unit.schedule.pool
        watched = [weakref.ref(owner) for owner in (pool, *pool._slots.values())]
        assert len(watched) > BLOCKS
        del pool, model, optimizer, loss
        assert all(ref() is None for ref in watched)
    finally:
        gc.enable()


@on_ranks(WORLD)
def test_a_program_that_changed_for_good_is_planned_anew() -> None:
    model, optimizer = warmed_up()
    planned = model.buffer_plan()
    for step in range(8):
        loss_of(model, data(step)[dist.get_rank(), 0], some).backward()
        optimizer.step()
        optimizer.zero_grad()
    plan = model.buffer_plan()
    assert plan != planned
    assert {lifetime.name for lifetime in plan.lifetimes if lifetime.purpose == "weights"} == {
        "root",
        "blocks.0",
        "blocks.2",
        "blocks.4",
    }
    assert slots_in_use(model) >= 3


@on_ranks(WORLD)
def test_a_program_that_alternates_between_steps_keeps_its_plan() -> None:
    model, optimizer = warmed_up()
    plans = []
    for step in range(8):
        loss_of(model, data(step)[dist.get_rank(), 0], some if step % 2 else plain).backward()
        optimizer.step()
        plans.append(model.buffer_plan())
    assert all(plan is plans[5] for plan in plans[5:])
    assert {lifetime.name for lifetime in plans[5].lifetimes if lifetime.purpose == "weights"} == {
        "root",
        *(f"blocks.{k}" for k in range(BLOCKS)),
    }
