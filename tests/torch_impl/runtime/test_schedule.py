"""Prefetching and the order of reductions: what is issued when, and how much memory is in use at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    assert_at_rest,
    assert_same_gradients,
    counted,
    rank_inputs,
    seeded,
)
from torch_impl.comm import collectives
from torch_impl.comm.streams import CpuStreams
from torch_impl.runtime.ground.buffer import lane_of

WORLD = 2
UNITS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Runs its layers in ``order``; ``recompute`` None, True (reentrant) or False."""

    order: tuple[int, ...] = tuple(range(UNITS))
    recompute: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(UNITS))
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in self.order:
            if self.recompute is None:
                x = self.layers[k](x)
            else:
                x = checkpoint(self.layers[k], x, use_reentrant=self.recompute)
        return self.head(x)


def sharded_chain(**options: Any) -> Chain:
    model = seeded(Chain)
    for layer in model.layers:
        torch_impl.fully_shard(layer, **options)
    torch_impl.fully_shard(model, **options)
    return model


@contextmanager
def logged(model: Chain) -> Iterator[list[str]]:
    """What happens, in order: ``gather k`` and ``reduce k`` when issued, ``run k`` when layer k computes."""
    events: list[str] = []
    groups = [layer._unit.groups[0] for layer in model.layers]
    units = {group.weights.compute.flat.untyped_storage()._cdata: k for k, group in enumerate(groups)}
    handles = []
    for k, layer in enumerate(model.layers):
        handles.append(layer.linear.register_forward_pre_hook(lambda *_, k=k: events.append(f"run {k}")))
    gather = collectives.all_gather
    starts = [group.reduction.start for group in groups]

    def all_gather(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        k = units.get(outputs[0].untyped_storage()._cdata)
        if k is not None:
            events.append(f"gather {k}")
        return gather(outputs, *args, **kwargs)

    def start_of(k: int) -> Callable[..., None]:
        def start(*args: Any) -> None:
            starts[k](*args)
            events.append(f"reduce {k}")

        return start

    collectives.all_gather = all_gather
    for k, group in enumerate(groups):
        group.reduction.start = start_of(k)  # type: ignore[method-assign]  # restored below
    try:
        yield events
    finally:
        collectives.all_gather = gather
        for group in groups:
            del group.reduction.start  # type: ignore[attr-defined]  # the instance's own
        for handle in handles:
            handle.remove()


def step(model: Chain, reference: Chain, scale: float = 1.0) -> None:
    inputs = rank_inputs()
    (model(inputs[dist.get_rank()] * scale)).square().mean().backward()
    for part in inputs:
        ((reference(part * scale)).square().mean() / len(inputs)).backward()
    assert_same_gradients(model, reference)
    assert_at_rest(model)
    for module in (model, reference):
        module.zero_grad()


def pipelined() -> tuple[list[str], list[str]]:
    model, reference = sharded_chain(), seeded(Chain)
    logs = []
    for _ in range(2):
        with logged(model) as events:
            step(model, reference)
        logs.append(events)
    return logs[0], logs[1]


def test_from_the_second_step_on_the_next_unit_is_gathered_while_one_computes(ranks: RankGroup) -> None:
    first, second = ranks.run(WORLD, pipelined)[0]
    forward = ["gather 0", "run 0", "gather 1", "run 1", "gather 2", "run 2", "gather 3", "run 3"]
    # The first backward expects the reverse of the forward.
    backward = [
        "gather 3",
        "gather 2",
        "reduce 3",
        "gather 1",
        "reduce 2",
        "gather 0",
        "reduce 1",
        "reduce 0",
    ]
    assert first == forward + backward
    ahead = ["gather 0", "gather 1", "run 0", "gather 2", "run 1", "gather 3", "run 2", "run 3"]
    assert second == ahead + backward


def beginning_of_backward(copies: bool) -> list[str]:
    model, reference = sharded_chain(), seeded(Chain)
    CpuStreams.copies = copies
    try:
        step(model, reference)
        with logged(model) as events:
            head = model._unit.groups[0].unsharded[0]
            handle = head.register_post_accumulate_grad_hook(lambda _: events.append("head"))
            step(model, reference)
            handle.remove()
    finally:
        CpuStreams.copies = True
    return events[events.index("run 3") + 1 :][:2]


def test_nothing_is_gathered_beside_the_first_unit_of_a_backward_where_gloo_would_copy_it(
    ranks: RankGroup,
) -> None:
    assert ranks.run(WORLD, beginning_of_backward, True) == [["head", "gather 3"]] * WORLD
    # As on CUDA.
    assert ranks.run(WORLD, beginning_of_backward, False) == [["gather 3", "head"]] * WORLD


@pytest.mark.parametrize(
    "orders",
    [
        [(0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 2, 3)],
        [(0, 1, 2, 3), (0, 1), (0, 1, 2, 3), (0, 2, 3)],
        [(0, 1, 0, 1), (0, 1, 2, 3), (3, 3, 3)],
        [(), (0, 1, 2, 3), ()],
    ],
)
@on_ranks(WORLD)
def test_programs_that_depart_from_the_record_train_alike_and_leave_nothing_behind(
    orders: list[tuple[int, ...]],
) -> None:
    model, reference = sharded_chain(), seeded(Chain)
    for order in orders:
        model.order = reference.order = order
        step(model, reference)
        for shorter in (order, order[:1]):
            model.order = shorter
            with torch.no_grad():
                model(rank_inputs()[0])
            assert_at_rest(model)


def explicit() -> list[str]:
    model, reference = sharded_chain(), seeded(Chain)
    layers = list(model.layers)
    layers[0].set_modules_to_forward_prefetch([layers[2], layers[3]])
    layers[1].set_modules_to_forward_prefetch([])
    layers[2].set_modules_to_forward_prefetch([])
    layers[3].set_modules_to_backward_prefetch([layers[0]])
    layers[2].set_modules_to_backward_prefetch([])
    layers[1].set_modules_to_backward_prefetch([])
    step(model, reference)
    with logged(model) as events:
        step(model, reference)
    return [event for event in events if event[:3] != "red"]


def test_explicit_lists_replace_the_record(ranks: RankGroup) -> None:
    forward = ["gather 0", "gather 2", "gather 3", "run 0", "gather 1", "run 1", "run 2", "run 3"]
    backward = ["gather 3", "gather 0", "gather 2", "gather 1"]
    assert ranks.run(WORLD, explicit)[0] == forward + backward


def live(recompute: bool | None, microbatches: int, **options: Any) -> tuple[int, int, int, int]:
    """The most compute buffers and gradient buffers of layers in use at a time, in the second step, and collectives."""
    model, reference = sharded_chain(**options), seeded(Chain)
    model.recompute = reference.recompute = recompute
    if recompute:
        inputs_need = [x.requires_grad_() for x in rank_inputs()]
        assert len(inputs_need) == WORLD
    step(model, reference)
    most = [0, 0]
    groups = [layer._unit.groups[0] for layer in model.layers]

    def look(*_: Any) -> None:
        most[0] = max(most[0], sum(group.weights.compute.allocated for group in groups))
        reducing = [group.reduction.under_way for group in groups]
        collecting = [bool(group.gradient.collecting) for group in groups]
        most[1] = max(most[1], sum(reducing) + sum(collecting))

    handles = [group.unsharded[0].register_post_accumulate_grad_hook(look) for group in groups]
    handles += [layer.linear.register_forward_pre_hook(look) for layer in model.layers]
    with counted() as counts:
        inputs = rank_inputs()[dist.get_rank()].requires_grad_()
        for _ in range(microbatches):
            model(inputs).square().mean().backward()
    for handle in handles:
        handle.remove()
    return most[0], most[1], counts["all_gather"], counts["reduce_scatter"]


@pytest.mark.parametrize("recompute", [None, True, False])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_two_units_weights_and_two_units_gradients_are_in_use_at_most(
    ranks: RankGroup, recompute: bool | None, microbatches: int
) -> None:
    weights, gradients, gathers, scatters = ranks.run(WORLD, live, recompute, microbatches)[0]
    # A reduction that only needs waiting for, as on one axis on the CPU, is finished before the next buffer is made.
    assert (weights, gradients) == (2, 1)
    # Recomputation happens while the weights are there for backward; the root keeps its own from forward on.
    assert gathers == microbatches * (2 * UNITS + 1)
    assert scatters == microbatches * (UNITS + 1)


class Detour(Chain):
    """Recomputes a layer in backward that no gradient reaches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.detour, x, use_reentrant=bool(self.recompute))
        return self.head(x)

    def detour(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x).detach() + self.layers[1](x)


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(WORLD)
def test_weights_that_were_gathered_for_a_recomputation_without_a_backward_are_freed(reentrant: bool) -> None:
    model, reference = seeded(Detour), seeded(Detour)
    for layer in model.layers:
        torch_impl.fully_shard(layer)
    torch_impl.fully_shard(model)
    model.recompute = reference.recompute = reentrant
    inputs = rank_inputs()
    for _ in range(2):
        model(inputs[dist.get_rank()].clone().requires_grad_()).square().mean().backward()
        assert_at_rest(model)
        for part in inputs:
            (reference(part.clone().requires_grad_()).square().mean() / len(inputs)).backward()
        assert_same_gradients(model, reference)


class Breaks(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        if Breaks.armed:
            raise ValueError("planned")
        return grads[0]


@on_ranks(WORLD)
def test_a_backward_that_raised_leaves_no_reduction_and_no_prefetched_weights() -> None:
    model, reference = sharded_chain(), seeded(Chain)
    step(model, reference)
    for where in (1, 2):
        handle = model.layers[where].register_forward_hook(lambda _m, _a, output: Breaks.apply(output))
        Breaks.armed = True
        with pytest.raises(ValueError, match="planned"):
            model(rank_inputs()[dist.get_rank()]).square().mean().backward()
        Breaks.armed = False
        # What was being reduced when the backward raised must not turn up in the next step's gradients.
        model.zero_grad()
        handle.remove()
        model.order = ()
        with torch.no_grad():
            model(rank_inputs()[0])
        assert not any(layer._unit.groups[0].reduction.under_way for layer in model.layers), "memory is held"
        model.order = Chain.order
        step(model, reference)


@on_ranks(WORLD)
def test_weights_that_change_after_they_were_prefetched_are_gathered_again() -> None:
    """Weights of a unit that is being gathered ahead change before it runs."""
    model, reference = sharded_chain(), seeded(Chain)
    step(model, reference)

    def edit(*_: Any) -> None:
        with torch.no_grad():
            model.layers[1]._unit.groups[0].params[0].mul_(2)

    handle = model.layers[0].linear.register_forward_pre_hook(edit)
    mine = rank_inputs()[dist.get_rank()]
    got = model(mine)
    handle.remove()
    with torch.no_grad():
        reference.layers[1].linear.weight.mul_(2)
    torch.testing.assert_close(got, reference(mine))


@on_ranks(WORLD)
def test_a_root_may_become_an_inner_unit() -> None:
    """A sharded module inside a plain one is a root, until an outer unit takes over."""
    last = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for linear in last:
        linear.load_state_dict({"weight": torch.full((1, 1), 0.5), "bias": torch.zeros(1)})
    outer, reference = nn.Sequential(sharded_chain(), last[0]), nn.Sequential(seeded(Chain), last[1])
    mine = rank_inputs()[dist.get_rank()]
    torch.testing.assert_close(outer[0](mine), reference[0](mine))
    torch_impl.fully_shard(outer)
    for _ in range(2):
        output = outer(mine)
        assert not any(group.weights.compute.allocated for group in outer[0]._unit.groups), (
            "kept as a root's weights"
        )
        output.square().mean().backward()
        for part in rank_inputs():
            (reference(part).square().mean() / WORLD).backward()
        assert_same_gradients(outer, reference)
        assert_at_rest(outer)
        for module in (outer, reference):
            module.zero_grad()


def count_gathers_under_way() -> None:
    model, reference = sharded_chain(), seeded(Chain)
    step(model, reference)
    original, open_now, most = collectives._gather_one, [0], [0]

    class Noted:
        def __init__(self, work: Any) -> None:
            self.work = work
            open_now[0] += 1
            most[0] = max(most[0], open_now[0])

        def wait(self) -> None:
            self.work.wait()
            open_now[0] -= 1

    def noting(*args: Any, async_op: bool, **kwargs: Any) -> Any:
        work = original(*args, async_op=async_op, **kwargs)
        return Noted(work) if async_op else work

    collectives._gather_one = noting
    try:
        step(model, reference)
    finally:
        collectives._gather_one = original
    assert open_now == [0]
    assert most[0] == max(len(layer._unit.groups[0].layout.shard_sizes) for layer in model.layers)


def test_the_next_unit_is_gathered_when_the_own_weights_have_come(ranks: RankGroup) -> None:
    """Backends hold a copy of what they gather."""
    ranks.run(WORLD, count_gathers_under_way)


def weights_beside_new_buffers() -> list[bool]:
    """Whether a layer's weights were there when its gradients got their buffer."""
    model, reference = sharded_chain(), seeded(Chain)
    allocated = []
    for layer in model.layers:
        group = layer._unit.groups[0]

        def noting(keep: bool, group: Any = group, make: Any = group.gradient._make_buffer) -> None:
            allocated.append(group.weights.compute.allocated)
            make(keep)

        group.gradient._make_buffer = noting
    step(model, reference)
    return allocated


def test_gradients_that_came_together_get_their_buffer_when_the_weights_are_freed(ranks: RankGroup) -> None:
    assert ranks.run(WORLD, weights_beside_new_buffers)[0] == [False] * UNITS


def test_collectives_over_outer_axes_have_a_lane_of_their_own() -> None:
    assert [lane_of(axis) for axis in range(3)] == ["gather", "outer", "outer"]
