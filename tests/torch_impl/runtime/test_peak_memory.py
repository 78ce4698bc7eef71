"""Bytes in use during a step, and after a model is deleted, seen by torch's allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import torch_impl
from tests.bench.torch_memory import live_bytes
from tests.support.ranks import RankGroup

WIDTH, LAYERS = 96, 6
UNIT = 4 * (WIDTH * WIDTH + WIDTH)
ALLOWED = 64 * 1024


def model_of(strategy: str, shape: tuple[int, ...]) -> nn.Module:
    names = ("outer", "inner")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))
    for layer in model:
        torch_impl.fully_shard(layer, mesh=mesh, strategy=strategy)
    return torch_impl.fully_shard(model, mesh=mesh, strategy=strategy)


def measured(strategy: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
    def build() -> Callable[[], Any]:
        model = model_of(strategy, shape)
        optimizer = torch_impl.MainWeightAdamW(model.parameters())
        x = torch.full((2, WIDTH), 0.1 * dist.get_rank())

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()

        return step

    live = live_bytes(build, torch.device("cpu"))
    return live.rest, live.peak, live.left


@pytest.mark.fast_cases("optim_grads_params-shape0-0.0-0.5", "hsdp-shape2-0.0-1.0")
@pytest.mark.parametrize(
    ("strategy", "shape", "compute", "main"),
    [
        ("optim_grads_params", (2,), 0.0, 0.5),
        ("optim_grads", (2,), 1.0, 0.5),
        ("hsdp", (2, 1), 0.0, 1.0),
        ("hfsdp", (2, 1), 1.0, 0.5),
    ],
)
def test_a_step_needs_what_is_there_at_rest_and_three_units_and_deletion_frees_all(
    ranks: RankGroup, strategy: str, shape: tuple[int, ...], compute: float, main: float
) -> None:
    """``compute``, ``main``: the fractions of compute weights, and of main weights and moments, that a rank keeps."""
    for rest, peak, left in ranks.run(2, measured, strategy, shape):
        # Gradients are sharded like the optimizer state, or over the inner axis only; those of the last step are there.
        kept = UNIT * LAYERS * (compute + 3 * main)
        gradients = UNIT * LAYERS * (1.0 if strategy == "hsdp" else 0.5)
        assert abs(rest - kept - gradients) < ALLOWED
        # A unit's buffers are its compute weights and its gradients.
        assert peak < rest + 3 * 2 * UNIT + ALLOWED
        assert left < ALLOWED


class Recomputed(nn.Module):
    """Units inside a unit that recomputes, as of one layer."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.parts = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(units)))

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.parts, x, use_reentrant=False)


def recomputed(units: int) -> int:
    """Bytes of a step's peak above what is there at rest."""

    def build() -> Callable[[], Any]:
        mesh = init_device_mesh("cpu", (2,))
        model = Recomputed(units)
        for part in model.parts:
            torch_impl.fully_shard(part, mesh=mesh)
        torch_impl.fully_shard(model, mesh=mesh)
        x = torch.full((2, WIDTH), 0.1 * dist.get_rank(), requires_grad=True)
        return lambda: model(x).square().mean().backward()

    live = live_bytes(build, torch.device("cpu"))
    return live.peak - live.rest


@pytest.mark.fast_cases("2")
@pytest.mark.parametrize("units", [2, 8])
def test_units_inside_a_recomputed_one_are_all_there_when_its_backward_begins(
    ranks: RankGroup, units: int
) -> None:
    """Two gathers each have this price; JAX keeps the last ones alone (``jax_impl/runtime/unit/order.py``)."""
    for peak in ranks.run(2, recomputed, units):
        # And one unit's gradients.
        assert units * UNIT < peak < (units + 2) * UNIT


def deleted_without_collection(strategy: str, pending: bool) -> int:
    """Live bytes of tensors that a deleted model leaves, with the garbage collector off."""
    model = model_of(strategy, (2,))
    optimizer = torch_impl.MainWeightAdamW(model.parameters())
    for _ in range(2):
        loss = model(torch.full((2, WIDTH), 0.1 * dist.get_rank())).square().mean()
        if not pending:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    gc.collect()
    gc.disable()
    try:
        del model, optimizer, loss
        return sum(s.nbytes() for s in storages())
    finally:
        gc.enable()


def storages() -> list[torch.UntypedStorage]:
    tensors = [tensor for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)]
    by_address = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage()
        for tensor in tensors
        if type(tensor) in TENSOR_CLASSES
    }
    return list(by_address.values())


TENSOR_CLASSES = (torch.Tensor, nn.Parameter)


@pytest.mark.fast_cases("False-optim_grads_params", "True-no_shard")
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("pending", [False, True])
def test_a_deleted_model_frees_its_storages_without_the_garbage_collector(
    ranks: RankGroup, strategy: str, pending: bool
) -> None:
    assert all(left < ALLOWED for left in ranks.run(2, deleted_without_collection, strategy, pending))
