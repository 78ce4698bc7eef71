"""``prefetch=0``: nothing runs beside a transfer, one unit's weights and gradients are there at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_impl
from tests.support.ranks import RankError, RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    Toy,
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    batch,
    mse,
    seeded,
    sharded_toy,
    whole,
)
from tests.torch_impl.runtime.test_schedule import UNITS, WORLD, Chain, live, logged, sharded_chain, step
from torch_impl import PolicyError, ShardingPolicy, UnitPolicy

STEPS, MICROBATCHES = 3, 2


def options_of(strategy: str) -> dict[str, Any]:
    two_axes = strategy in ("hsdp", "hfsdp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")) if two_axes else None
    return {"strategy": strategy, "mesh": mesh}


def train(strategy: str, prefetch: int) -> list[torch.Tensor]:
    """Gradients and weights after each step of AdamW; the same as of one process with the whole batch."""
    model, reference = sharded_toy(**options_of(strategy), prefetch=prefetch), Toy()
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    world, tensors = dist.get_world_size(), []
    for number in range(STEPS):
        tokens, targets = batch(number, world, MICROBATCHES)
        for k in range(MICROBATCHES):
            model.set_is_last_backward(k == MICROBATCHES - 1)
            mine = dist.get_rank(), k
            (mse(model, tokens[mine], targets[mine]) / MICROBATCHES).backward()
        mse(reference, tokens, targets).backward()
        assert_same_gradients(model, reference, rtol=1e-4, atol=1e-6)
        tensors += [whole(param.grad) for param in model.parameters()]
        optimizer.step()
        expected.step()
        assert_same_weights(model, reference)
        if strategy == "optim_grads_params":
            assert_at_rest(model)
        tensors += [whole(param) for param in model.parameters()]
        optimizer.zero_grad()
        expected.zero_grad()
    return tensors


@pytest.mark.fast_cases("optim_grads-3")
@pytest.mark.parametrize(
    ("strategy", "world"), [("optim_grads_params", 2), ("optim_grads", 3), ("hsdp", 4), ("hfsdp", 4)]
)
@on_ranks("world")
def test_gradients_and_weights_are_the_same_bits_with_and_without(strategy: str) -> None:
    serial, ahead = train(strategy, 0), train(strategy, 1)
    assert len(serial) == 2 * STEPS * len(list(Toy().parameters()))
    for tensor, other in zip(serial, ahead, strict=True):
        assert torch.equal(tensor, other)


@contextmanager
def fully_logged(model: Chain) -> Iterator[list[str]]:
    """``logged``, with the ends: ``ran k`` of layer k's forward, ``back k`` within its backward, ``reduced k``."""
    with logged(model) as events:
        groups = [layer._unit.groups[0] for layer in model.layers]
        handles = []
        for k, layer in enumerate(model.layers):

            def ran(*_: Any, k: int = k) -> None:
                events.append(f"ran {k}")

            def back(*_: Any, k: int = k) -> None:
                events.append(f"back {k}")

            def finish(
                reduction: Any = groups[k].reduction, end: Any = groups[k].reduction.finish, k: int = k
            ) -> None:
                if reduction.under_way:
                    events.append(f"reduced {k}")
                end()

            handles += [
                layer.register_forward_hook(ran),
                layer.linear.register_full_backward_pre_hook(back),
            ]
            groups[k].reduction.finish = finish
        try:
            yield events
        finally:
            for group in groups:
                del group.reduction.finish
            for handle in handles:
                handle.remove()


def second_step(inner: int | None, root: int | None) -> list[str]:
    model = seeded(Chain)
    for layer in model.layers:
        torch_impl.fully_shard(layer, prefetch=inner)
    torch_impl.fully_shard(model, prefetch=root)
    reference = seeded(Chain)
    step(model, reference)
    with fully_logged(model) as events:
        step(model, reference)
    return events


SERIAL = [
    *(f"{what} {k}" for k in range(UNITS) for what in ("gather", "run", "ran")),
    *(f"{what} {k}" for k in reversed(range(UNITS)) for what in ("gather", "back", "reduce", "reduced")),
]


@pytest.mark.parametrize("inner", [0, 1, None])
def test_a_unit_is_gathered_when_the_one_before_has_ended_and_reduced_before_the_next_goes_on(
    ranks: RankGroup, inner: int | None
) -> None:
    assert ranks.run(WORLD, second_step, inner, 0)[0] == SERIAL


@pytest.mark.parametrize(("inner", "root"), [(0, None), (0, 1), (None, None)])
def test_the_root_decides_and_transfers_run_ahead_by_default(
    ranks: RankGroup, inner: int | None, root: int | None
) -> None:
    events = ranks.run(WORLD, second_step, inner, root)[0]
    for k in range(UNITS - 1):
        assert events.index(f"gather {k + 1}") < events.index(f"run {k}")
        assert events.index(f"reduce {k + 1}") < events.index(f"back {k}") < events.index(f"reduced {k + 1}")


def by_name() -> list[str]:
    model, reference = sharded_chain(prefetch=0), seeded(Chain)
    layers = list(model.layers)
    layers[0].set_modules_to_forward_prefetch([layers[2]])
    layers[3].set_modules_to_backward_prefetch([layers[1]])
    step(model, reference)
    with logged(model) as events:
        step(model, reference)
    return events


def test_what_is_named_is_gathered_ahead_all_the_same(ranks: RankGroup) -> None:
    forward = ["gather 0", "gather 2", "run 0", "gather 1", "run 1", "run 2", "gather 3", "run 3"]
    backward = [
        "gather 3",
        "gather 1",
        "reduce 3",
        "gather 2",
        "reduce 2",
        "reduce 1",
        "gather 0",
        "reduce 0",
    ]
    assert ranks.run(WORLD, by_name)[0] == forward + backward


def live_on_two_axes(recompute: bool | None, prefetch: int) -> tuple[int, ...]:
    return live(recompute, 2, **options_of("hsdp"), prefetch=prefetch)[:2]


@pytest.mark.fast_cases("None")
@pytest.mark.parametrize("recompute", [None, False])
def test_one_units_weights_and_one_units_gradients_are_in_use_at_most(
    ranks: RankGroup, recompute: bool | None
) -> None:
    # Of two axes: on the CPU a reduction over one axis ends before the next buffer is made in any case.
    assert ranks.run(4, live_on_two_axes, recompute, 0) == [(1, 1)] * 4
    assert ranks.run(4, live_on_two_axes, recompute, 1) == [(2, 2)] * 4


def pooled(prefetch: int) -> dict[str, int]:
    """Bytes of the slots that the layers use in turn, in units of one layer's buffer."""
    model, reference = sharded_chain(prefetch=prefetch), seeded(Chain)
    for _ in range(3):
        step(model, reference)
    plan = model.buffer_plan()
    assert plan is not None
    weights = {
        slot
        for lifetime, slot in zip(plan.lifetimes, plan.slots, strict=True)
        if lifetime.purpose == "weights" and slot is not None
    }
    [nbytes] = {group.weights.compute.nbytes for layer in model.layers for group in layer._unit.groups}
    return {"slots": len(weights), "layers": sum(plan.slot_bytes[slot] for slot in weights) // nbytes}


def test_the_pool_plans_memory_for_one_unit_instead_of_two(ranks: RankGroup) -> None:
    assert ranks.run(WORLD, pooled, 0)[0] == {"slots": 1, "layers": 1}
    assert ranks.run(WORLD, pooled, 1)[0] == {"slots": 2, "layers": 2}


def disagreeing() -> None:
    torch_impl.fully_shard(Toy(), prefetch=dist.get_rank())


def test_ranks_must_agree(ranks: RankGroup) -> None:
    # Else their gathers would pair.
    with pytest.raises(RankError, match="prefetch: rank 0 has 0, rank 1 has 1"):
        ranks.run(WORLD, disagreeing)


@on_ranks(1)
def test_other_values_are_refused() -> None:
    for value in (2, -1, True, 1.0, "1"):
        with pytest.raises(ValueError, match=r"prefetch: expected 0, 1 or None \(the default\), got"):
            torch_impl.fully_shard(Toy(), prefetch=value)
    with pytest.raises(PolicyError, match=r"\[mesh\] prefetch: expected 0 or 1, got True"):
        ShardingPolicy((UnitPolicy(""),), prefetch=True)


def by_policy(prefetch: int | None) -> list[str]:
    policy = ShardingPolicy((UnitPolicy("layers.*"), UnitPolicy("")), prefetch=prefetch)
    model, reference = policy.apply(seeded(Chain)), seeded(Chain)
    step(model, reference)
    with fully_logged(model) as events:
        step(model, reference)
    return events


def test_a_policy_says_it(ranks: RankGroup) -> None:
    assert ranks.run(WORLD, by_policy, 0)[0] == SERIAL
    ahead, default = (ranks.run(WORLD, by_policy, value)[0] for value in (1, None))
    assert ahead == default != SERIAL
