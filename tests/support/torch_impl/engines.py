"""Engines of one program: torch's FSDP2, this package, and one process with the data of all ranks."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import torch_impl

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Engine:
    """The package that a scenario takes ``fully_shard`` and its policies from."""

    package: Any
    ours: bool

    def shard(self, module: Any, **options: Any) -> Any:
        return self.package.fully_shard(module, **options)

    def shard_all(self, *modules: Any, **options: Any) -> Any:
        """Make each module a unit. The last one is the root, which is returned."""
        for module in modules:
            self.package.fully_shard(module, **options)
        return modules[-1]

    @contextmanager
    def refused(self, error: type[BaseException], match: str) -> Iterator[None]:
        """The block raises in this package and runs with FSDP2."""
        if not self.ours:
            yield
            return
        with pytest.raises(error, match=match):
            yield


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
ENGINES = (Engine(fsdp, False), Engine(torch_impl, True))


@contextmanager
def shared_folder() -> Iterator[Path]:
    """An empty folder that all ranks see. It is removed afterwards."""
    paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    try:
        yield Path(paths[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(paths[0])


@contextmanager
def counting(engine: Engine, model: nn.Module) -> Iterator[dict[str, int]]:
    """Calls of collectives while the context is open, filled in at its end, by kind."""
    calls: dict[str, int] = {}
    if engine.ours:
        with torch_impl.count_collectives(model) as counted:
            yield calls
        calls.update({collective: counted.calls[collective] for collective in COLLECTIVES})
        return
    with CommDebugMode() as mode:
        yield calls
    for collective in COLLECTIVES:
        named = {
            op: number
            for op, number in mode.get_comm_counts().items()
            if collective.replace("_", "") in plain(op)
        }
        calls[collective] = sum(named.values())


def plain(op: object) -> str:
    return str(op).replace("_", "")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rows(step: int, rank: int | None = None, *shape: int) -> torch.Tensor:
    """A rank's data for a step; no two ranks have the same."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    return torch.randn(shape or (3, 8), generator=generator)


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def backward_as_one(
    reference: nn.Module, step: int = 0, *, loss: Loss = squares, shape: tuple[int, ...] = (3, 8)
) -> None:
    """Add the gradients of the mean loss over all ranks' data of a step, in this process alone."""
    world = dist.get_world_size()
    for rank in range(world):
        (loss(reference, rows(step, rank, *shape)) / world).backward()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, *steps: int) -> list[float]:
    """Train on this rank's data of these steps; the loss of each."""
    losses = []
    for step in steps:
        loss = squares(model, rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gradients_are(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    """Assert that each parameter has the reference's gradient (or None) under the same name."""
    wanted = dict(reference.named_parameters())
    params = dict(model.named_parameters())
    assert list(params) == list(wanted)
    for name, param in params.items():
        grad = wanted[name].grad
        if grad is None or param.grad is None:
            assert param.grad is None, f"{name} has a gradient"
            assert grad is None, f"{name} has no gradient"
            continue
        torch.testing.assert_close(
            whole(param.grad), grad, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


def weights_are(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    wanted = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            whole(param.detach()),
            wanted[name].detach(),
            msg=lambda text, name=name: f"{name}: {text}",
            **tolerance,
        )


def train_as_one(
    model: nn.Module,
    shard: Callable[[nn.Module], Any],
    *,
    loss: Loss = squares,
    steps: int = 3,
    shape: tuple[int, ...] = (3, 8),
    reference: nn.Module | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    before: Callable[[nn.Module], Any] | None = None,
) -> list[float]:
    """Train sharded, and in one process with every rank's data: same losses, gradients and weights in every step.

    ``before`` is called with the sharded model ahead of each step. Returns this rank's losses.
    """
    optimizer = optimizer or (lambda params: torch.optim.Adam(params, lr=1e-2))
    reference = copy.deepcopy(model) if reference is None else reference
    shard(model)
    updates = [optimizer(module.parameters()) for module in (model, reference)]
    world, losses = dist.get_world_size(), []
    for step in range(steps):
        if before is not None:
            before(model)
        wanted = [loss(reference, rows(step, rank, *shape)) for rank in range(world)]
        (sum(wanted) / world).backward()
        own_loss = loss(model, rows(step, None, *shape))
        own_loss.backward()
        torch.testing.assert_close(own_loss, wanted[dist.get_rank()])
        gradients_are(model, reference)
        for update in updates:
            update.step()
        weights_are(model, reference)
        for update in updates:
            update.zero_grad()
        losses.append(own_loss.item())
    return losses
