"""Ranks that begin the collectives of units in different orders are named, before these mix weights or gradients."""

from __future__ import annotations

import gc
import time
import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_impl
from tests.support.ranks import RankGroup
from torch_impl.comm import agreement, collective_order
from torch_impl.comm.agreement import require_all_ranks
from torch_impl.comm.mesh import DataParallelMesh


class Experts(nn.Module):
    """Three units of equal sizes, of which a call uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, names: str) -> torch.Tensor:
        for name in names:
            x = getattr(self, name)(x)
        return x


def sharded(strategy: str) -> Experts:
    torch.manual_seed(0)
    model = Experts()
    for module in (model.a, model.b, model.c, model):
        torch_impl.fully_shard(module, strategy=strategy)
    return model


def routed(strategy: str, routes: list[list[str]]) -> str:
    """What a rank says that trains through ``routes[rank][step]``."""
    model = sharded(strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for names in routes[dist.get_rank()]:
            model(torch.ones(2, 4), names).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("routes", [["ac", "bc"], ["abc", "bac"], ["abc", "bc"]], ids=str)
@pytest.mark.pairwise
def test_units_that_ranks_call_in_other_orders_are_named(
    ranks: RankGroup, routes: list[str], strategy: str
) -> None:
    said = ranks.run(2, routed, strategy, [[route] * 2 for route in routes], timeout=60)
    for rank, text in enumerate(said):
        assert f"on rank {rank}, but " in text
        assert f" on rank {1 - rank}: call the same units in the same order on all ranks" in text
        assert "(unit a)" in text
        assert "(unit b)" in text or "(unit c)" in text


def of_equal_names(apart: str) -> str:
    """What a rank says that calls units whose names are equal in another order: of two models, or each as a root."""
    first, second = sharded("optim_grads_params"), sharded("optim_grads_params")
    for step in range(3):
        calls = (
            [first.a, first.b]
            if apart == "units"
            else [partial(first, names="a"), partial(second, names="a")]
        )
        try:
            for call in reversed(calls) if step and dist.get_rank() else calls:
                call(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("apart", ["units", "models"])
@pytest.mark.each_value
def test_units_of_equal_names_are_told_apart(ranks: RankGroup, apart: str) -> None:
    for said in ranks.run(2, of_equal_names, apart, timeout=60):
        assert "call the same units in the same order on all ranks" in said


def late(routes: list[list[str]]) -> str:
    """``routed``, where all is compared once in 20 collectives."""
    before, collective_order._EVERY = collective_order._EVERY, 20
    try:
        return routed("no_shard", routes)
    finally:
        collective_order._EVERY = before


def test_also_where_each_of_their_steps_is_known(ranks: RankGroup) -> None:
    known = ["ac", "bc", "ac", "ac", "bc", "bc"]
    for said in ranks.run(2, late, [[*known, *["ac"] * 20], [*known, *["bc"] * 20]], timeout=60):
        assert "call the same units in the same order on all ranks" in said


def steady(strategy: str) -> int:
    """How often steps after the second compare anything."""
    model = sharded(strategy)
    count = 0

    def require(*args: object, **options: object) -> None:
        nonlocal count
        count += 1

    before = collective_order.require_all_ranks
    try:
        for step in range(5):
            if step == 2:
                collective_order.require_all_ranks = require
            model(torch.ones(2, 4), "abc").sum().backward()
    finally:
        collective_order.require_all_ranks = before
    return count


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.each_value
def test_known_steps_compare_nothing(ranks: RankGroup, strategy: str) -> None:
    assert ranks.run(2, steady, strategy, timeout=60) == [0, 0]


def unlike_flags(setter: str) -> str:
    """What a rank says whose gradients are reduced where the other's are kept, on a mesh of two axes."""
    torch.manual_seed(0)
    model, mesh = Experts(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for module in (model.a, model.b, model.c, model):
        torch_impl.fully_shard(module, mesh=mesh)
    getattr(model, setter)(dist.get_rank() != 3)
    try:
        model(torch.ones(2, 4), "abc").sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@pytest.mark.each_value
def test_a_sync_flag_of_one_rank_is_named(ranks: RankGroup, setter: str) -> None:
    said = ranks.run(4, unlike_flags, setter, timeout=60)
    assert all(f"{setter}()" in text for text in said)
    # Ranks 2 and 3 are one inner axis.
    assert "gradients of 'weight' (unit c) are reduced over all axes on rank 2, but " in said[2]
    assert "but gradients of 'weight' (unit c) are reduced over all axes on rank 2" in said[3]
    assert "or differed before" in said[0]


def mesh_is_freed() -> bool:
    mesh = DataParallelMesh(init_device_mesh("cpu", (2,)))
    order, freed = collective_order.CollectiveOrder(mesh), weakref.ref(mesh)
    order.begin("weights are gathered")
    del order, mesh
    gc.collect()
    return freed() is None


def test_a_history_lets_process_groups_end(ranks: RankGroup) -> None:
    assert ranks.run(2, mesh_is_freed) == [True, True]


def meeting() -> list[str]:
    """What a rank says that comes alone, then with others, then to something else than they."""
    group, rank, said = dist.group.WORLD, dist.get_rank(), []
    assert group is not None
    group.get_group_store().set_timeout(timedelta(seconds=1))
    mesh = DataParallelMesh(init_device_mesh("cpu", (3,)))

    def come(what: str) -> None:
        try:
            require_all_ranks(what, mesh, "the reason")
        except RuntimeError as error:
            said.append(str(error))

    if rank == 1:
        come("first")
    dist.barrier()
    group.get_group_store().set_timeout(timedelta(seconds=20))
    come("second")
    if rank:
        # Rank 0 is at the fifth before the others look what the error was.
        agreement.time = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(0.2))
    try:
        come("third" if rank else "fourth")
        come("fifth")
    finally:
        agreement.time = time
    return said


def test_a_rank_that_came_alone_may_come_again(ranks: RankGroup) -> None:
    differ = [
        "fourth on rank 0, but third on rank 1: the reason",
        "third on rank 1, but fourth on rank 0: the reason",
        "third on rank 2, but fourth on rank 0: the reason",
    ]
    alone = "first on rank 1, but not on ranks [0, 2] within 1 s: the reason"
    assert ranks.run(3, meeting, timeout=60) == [[differ[0]], [alone, differ[1]], [differ[2]]]
