"""Meshes of two data-parallel axes: every legal combination of placements against the full batch on one process.

All four ranks get different data, also along the outer axis, so that a missing reduction shows.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    Toy,
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    batch,
    counted,
    mean_over_ranks,
    mse,
    sharded_toy,
    whole,
)
from torch_impl import Placements
from torch_impl.comm import mesh as mesh_module
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.dtensor.local import local_of

WORLD = 4
SHAPES = [(2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((4, 1), (1, 4)))]


def spelled_out(parameters: int, gradients: int, optimizer: int) -> Placements:
    """Placements that shard over so many of the innermost of two axes."""

    def axes(other: str, depth: int) -> tuple[str, ...]:
        return (other,) * (2 - depth) + ("shard",) * depth

    return Placements(axes("replicate", parameters), axes("partial", gradients), axes("replicate", optimizer))


COMBINATIONS = [depths for depths in itertools.product(range(3), repeat=3) if depths == tuple(sorted(depths))]


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))


@pytest.fixture(params=[3, pytest.param(10, marks=pytest.mark.slow)], ids=lambda n: f"{n} steps")
def steps(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def train(
    options: dict[str, Any], shape: tuple[int, int], microbatches: int, set_to_none: bool, steps: int
) -> None:
    """AdamW steps; only the last microbatch is marked as such."""
    model = sharded_toy(mesh=mesh_of(*shape), **options)
    reference = Toy()
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    rank = dist.get_rank()
    for step in range(steps):
        tokens, targets = batch(step, WORLD, microbatches)
        total = torch.zeros(())
        for k in range(microbatches):
            model.set_is_last_backward(k == microbatches - 1)
            loss = mse(model, tokens[rank, k], targets[rank, k]) / microbatches
            loss.backward()
            total += loss.detach()
        want = mse(reference, tokens, targets)
        want.backward()
        torch.testing.assert_close(mean_over_ranks(total), want.detach(), rtol=1e-5, atol=1e-6)
        assert_same_gradients(model, reference, rtol=1e-4, atol=1e-6)
        optimizer.step()
        expected.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        expected.zero_grad()
    assert_same_weights(model, reference)
    assert not torch.allclose(reference.head.weight, Toy().head.weight), (
        "nothing was learnt: a vacuous comparison"
    )
    model.reshard()
    assert_at_rest(model)


@pytest.mark.fast_cases("3 steps-2-2-2")
@pytest.mark.parametrize(("parameters", "gradients", "optimizer"), COMBINATIONS)
def test_every_combination_trains_like_one_process(
    ranks: RankGroup, parameters: int, gradients: int, optimizer: int, steps: int
) -> None:
    options = {"placements": spelled_out(parameters, gradients, optimizer)}
    for microbatches, set_to_none in ((1, True), (3, False)):
        ranks.run(WORLD, train, options, (2, 2), microbatches, set_to_none, steps)


@pytest.mark.fast_cases("3 steps-hsdp-shape0", "3 steps-hfsdp-shape0", "3 steps-optim-shape0")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "strategy", ["hsdp", "hfsdp", "optim_grads_params", "no_shard", "optim", "optim_grads"]
)
def test_named_strategies_train_on_any_mesh_of_two_axes(
    ranks: RankGroup, strategy: str, shape: tuple[int, int], steps: int
) -> None:
    ranks.run(WORLD, train, {"strategy": strategy}, shape, 2, True, steps)


@pytest.mark.slow
@on_ranks(WORLD)
def test_units_may_differ_and_microbatches_be_marked_in_any_way() -> None:
    """A strategy for each unit, and marks that change from step to step."""
    microbatches = 4
    mesh = mesh_of(2, 2)
    model, reference = Toy(3), Toy(3)
    for block, strategy in zip(model.blocks, ("hfsdp", "hsdp", "optim"), strict=True):
        torch_impl.fully_shard(block, mesh=mesh, strategy=strategy)
    torch_impl.fully_shard(model, mesh=mesh, strategy="no_shard")
    rank = dist.get_rank()
    for marks in itertools.product((False, True), repeat=microbatches - 1):
        tokens, targets = batch(len(marks), WORLD, microbatches)
        for k, last in enumerate((*marks, True)):
            # Reduced gradients, sums that wait for the outer axis and unreduced sums must all add up.
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last or k % 2 == 0)
            mse(model, tokens[rank, k], targets[rank, k]).div(microbatches).backward()
        mse(reference, tokens, targets).backward()
        assert_same_gradients(model, reference, rtol=1e-4, atol=1e-6)
        model.zero_grad()
        reference.zero_grad()


def waiting_gradients(strategy: str) -> tuple[str, str]:
    model = sharded_toy(mesh=mesh_of(2, 2), strategy=strategy)
    tokens, targets = batch(0, WORLD, 2)
    rank = dist.get_rank()
    model.set_requires_all_reduce(False)
    mse(model, tokens[rank, 0], targets[rank, 0]).backward()
    weight = model.head.weight
    with pytest.raises(RuntimeError, match="without reducing it over the ranks"):
        weight.grad.norm()
    optimizer = torch_impl.MainWeightAdamW(model.parameters())
    with pytest.raises(RuntimeError, match="not reduced"):
        optimizer.step()
    before = str([type(p).__name__ for p in weight.grad.placements])
    model.set_requires_all_reduce(True)
    mse(model, tokens[rank, 1], targets[rank, 1]).backward()
    reference = Toy()
    (mse(reference, tokens[:, 0], targets[:, 0]) + mse(reference, tokens[:, 1], targets[:, 1])).backward()
    assert_same_gradients(model, reference, rtol=1e-4, atol=1e-6)
    return before, str([type(p).__name__ for p in weight.grad.placements])


@pytest.mark.parametrize(
    ("strategy", "after"), [("hsdp", "['Replicate', 'RowShard']"), ("hfsdp", "['RowShard', 'RowShard']")]
)
def test_between_microbatches_gradients_wait_for_the_outer_axis_and_cannot_be_read(
    ranks: RankGroup, strategy: str, after: str
) -> None:
    for before, then in ranks.run(WORLD, waiting_gradients, strategy):
        assert (before, then) == ("['Partial', 'RowShard']", after)


def collectives_of(strategy: str, microbatches: int) -> dict[str, int]:
    model = sharded_toy(mesh=mesh_of(2, 2), strategy=strategy, reshard_after_forward=True)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.1)
    rank = dist.get_rank()
    for step in range(2):
        tokens, targets = batch(step, WORLD, microbatches)
        with counted() as counts:
            for k in range(microbatches):
                model.set_is_last_backward(k == microbatches - 1)
                mse(model, tokens[rank, k], targets[rank, k]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return counts


UNITS = 3


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("strategy", "gathers", "scatters", "reduces"),
    [
        # All-gathers: hsdp at every unshard; hfsdp also once over the outer axis, into the resident shard.
        ("hsdp", lambda k: 2 * k, lambda k: k, lambda k: 1),
        ("hfsdp", lambda k: 2 * k + 1, lambda k: k + 1, lambda k: 0),
        ("optim_grads", lambda k: 1, lambda k: k, lambda k: 1),
        ("optim", lambda k: 1, lambda k: 1, lambda k: 1),
        ("no_shard", lambda k: 0, lambda k: 0, lambda k: 2),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_outer_axis_is_reduced_once_per_step(
    ranks: RankGroup, strategy: str, gathers: Any, scatters: Any, reduces: Any, microbatches: int
) -> None:
    assert ranks.run(WORLD, collectives_of, strategy, microbatches)[0] == {
        "all_gather": UNITS * gathers(microbatches),
        "reduce_scatter": UNITS * scatters(microbatches),
        "all_reduce": UNITS * reduces(microbatches),
    }


def bytes_at_rest(strategy: str) -> tuple[dict[str, int], int, int, int]:
    """What is held on this rank by kind; padded elements of all units, elements of the rows held, parameters."""
    model = sharded_toy(
        mesh=mesh_of(2, 2),
        strategy=strategy,
        mp_policy=torch_impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    optimizer = torch_impl.MainWeightAdamW(model.parameters())
    tokens, targets = batch(0, WORLD, 1)
    mse(model, tokens[dist.get_rank()], targets[dist.get_rank()]).backward()
    optimizer.step()
    model.reshard()
    report = model.memory_report(optimizer)
    groups = [group for module in (*model.blocks, model) for group in module._unit.groups]
    held = {"main": report.main_weights, "compute": report.compute_weights}
    held |= {"gradients": report.gradients, "moments": report.moments}
    rows = sum(local_of(p).numel() for group in groups for p in group.params)
    padded = sum(group.layout.padded_size for group in groups)
    return held, padded, rows, sum(len(group.params) for group in groups)


@pytest.mark.parametrize(
    ("strategy", "parameters", "gradients", "optimizer"),
    [("hsdp", 0, 2, 2), ("hfsdp", 2, 4, 4), ("no_shard", 1, 1, 1), ("optim_grads", 1, 2, 2)],
)
def test_bytes_at_rest_are_those_of_the_placements(
    ranks: RankGroup, strategy: str, parameters: int, gradients: int, optimizer: int
) -> None:
    """The numbers say in how many parts compute weights, gradients and main weights are kept; 0: not at all."""
    for held, padded, rows, flags in ranks.run(WORLD, bytes_at_rest, strategy):
        assert held == {
            "main": 4 * padded // optimizer,
            "compute": 2 * padded // parameters if parameters else 0,
            "gradients": 4 * padded // gradients + 4 * flags,
            "moments": 8 * rows,
        }


@on_ranks(WORLD)
def test_shards_of_both_axes_lie_in_the_order_in_which_the_outer_axis_gathers_them() -> None:
    mesh = DataParallelMesh(mesh_of(2, 2))
    outer, inner = divmod(dist.get_rank(), 2)
    assert (mesh.shards(0), mesh.shards(1), mesh.shards(2)) == (1, 2, 4)
    assert (mesh.index(0), mesh.index(1), mesh.index(2)) == (0, inner, 2 * inner + outer)
    with pytest.MonkeyPatch.context() as patch:
        # As if torch had sorted the ranks of the groups of a mesh that lists them in falling order.
        ranks_of = dist.get_process_group_ranks
        patch.setattr(mesh_module.dist, "get_process_group_ranks", lambda group: ranks_of(group)[::-1])
        patch.setattr(mesh_module, "_ordered_meshes", {})
        with pytest.raises(ValueError, match="number the mesh in ascending order"):
            DataParallelMesh(mesh.mesh)


def checkpoint_of(path: str, strategy: str, shape: tuple[int, ...], save: bool) -> list[float]:
    """Train and save, or load and go on; losses of the two steps after that."""
    model = sharded_toy(mesh=mesh_of(*shape) if len(shape) == 2 else None, strategy=strategy)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.1)
    tokens, targets = batch(7, 1, 3)

    def step(k: int) -> float:
        loss = mse(model, tokens[0, k], targets[0, k])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if save:
        step(0)
        torch_impl.save_checkpoint(path, model, optimizer)
    else:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        torch_impl.load_checkpoint(path, model, optimizer)
    return [step(1), step(2)]


@pytest.mark.fast_cases("saver1-loader1")
@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (("hfsdp", (2, 2)), ("optim_grads_params", (3,))),
        (("optim", (2,)), ("hfsdp", (2, 2))),
        (("hsdp", (2, 2)), ("hfsdp", (1, 2))),
    ],
)
def test_checkpoints_move_between_meshes(ranks: RankGroup, tmp_path: Any, saver: Any, loader: Any) -> None:
    path = str(tmp_path / "checkpoint")

    def world(shape: tuple[int, ...]) -> int:
        return int(torch.tensor(shape).prod())

    saved = ranks.run(world(saver[1]), checkpoint_of, path, *saver, True)[0]
    loaded = ranks.run(world(loader[1]), checkpoint_of, path, *loader, False)[0]
    torch.testing.assert_close(loaded, saved, rtol=1e-6, atol=0)
    assert saved[0] != saved[1]


@on_ranks(WORLD)
def test_strategies_that_do_not_fit_the_mesh_are_refused() -> None:
    two_axes, one_axis = mesh_of(2, 2), init_device_mesh("cpu", (4,))
    for options, reason in (
        ({"mesh": one_axis, "strategy": "hsdp"}, "expected a mesh of two axes"),
        (
            {"mesh": one_axis, "placements": spelled_out(1, 1, 2)},
            "expected one entry for each of the 1 mesh axes",
        ),
        ({"mesh": two_axes, "placements": Placements("shard", "shard", "shard")}, "each of the 2 mesh axes"),
        ({"mesh": two_axes, "placements": spelled_out(1, 1, 1), "strategy": "optim"}, "got both"),
        ({"mesh": init_device_mesh("cpu", (1, 2, 2))}, "one or two data-parallel axes"),
    ):
        module = nn.Linear(3, 3)
        with pytest.raises(ValueError, match=reason):
            torch_impl.fully_shard(module, **options)
        assert type(module) is nn.Linear
    assert whole(torch_impl.fully_shard(nn.Linear(3, 3), mesh=two_axes).weight).shape == (3, 3)
