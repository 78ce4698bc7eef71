"""PyTorch's test_fully_shard_frozen.py: parameters that need no gradient, inside a unit and as whole units."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.torch_impl.comparison import RETURNED, Design, Program
from tests.support.torch_impl.engines import (
    Engine,
    backward_as_one,
    counting,
    gradients_are,
    rows,
    squares,
    train_as_one,
)
from tests.support.torch_impl.zoo import MLP, Stack


def in_one_group(engine: Engine, biases: bool, reshard: bool) -> list[float]:
    """Frozen weights, or biases, beside trained ones of the same unit."""
    model = Stack()
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias") != biases)

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([param for param in params if param.requires_grad], lr=1e-2)

    return train_as_one(
        model,
        lambda module: engine.shard_all(*module.blocks, module, reshard_after_forward=reshard),
        optimizer=optimizer,
    )


def whole_units(engine: Engine, pattern: str, reshard: bool) -> list[float]:
    """Units that are frozen, after and before ones that are trained."""
    model = nn.Sequential(*(MLP(8, 9 + index) for index in range(len(pattern))))
    for block, letter in zip(model, pattern, strict=True):
        block.requires_grad_(letter == "t")

    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([param for param in params if param.requires_grad], lr=1e-2)

    return train_as_one(
        model,
        lambda module: engine.shard_all(*module, module, reshard_after_forward=reshard),
        optimizer=optimizer,
    )


def several_forwards(engine: Engine, checkpointed: bool) -> list[float]:
    """Two forwards of units, of which some are frozen and one input needs a gradient, before one backward."""
    model = nn.Sequential(MLP(), MLP(8, 6), MLP(8, 5))
    model[1].requires_grad_(False)
    reference = copy.deepcopy(model)
    engine.shard_all(*model, model)
    world, losses = dist.get_world_size(), []

    def loss_of(module: nn.Module, step: int, rank: int | None) -> torch.Tensor:
        total = torch.zeros(())
        for part in range(2):
            x = rows(step + 5 * part, rank).requires_grad_(part == 1)
            if checkpointed:
                total = (
                    total + torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).square().sum()
                )
            else:
                total = total + squares(module, x)
        return total

    for step in range(2):
        loss = loss_of(model, step, None)
        loss.backward()
        for rank in range(world):
            (loss_of(reference, step, rank) / world).backward()
        gradients_are(model, reference)
        losses.append(loss.item())
    return losses


def toggled(engine: Engine) -> list[float]:
    """As in a GAN: what is trained changes from step to step, between forwards."""
    model = nn.Sequential(MLP(), MLP(8, 6))
    reference = copy.deepcopy(model)
    engine.shard_all(*model, model)
    updates = [torch.optim.SGD(module.parameters(), lr=1e-2) for module in (model, reference)]
    losses = []
    for step in range(4):
        for module in (model, reference):
            module[0].requires_grad_(step % 2 == 0)
            module[1].requires_grad_(step % 2 == 1)
        loss = squares(model, rows(step))
        loss.backward()
        backward_as_one(reference, step)
        gradients_are(model, reference)
        losses.append(loss.item())
        for update in updates:
            update.step()
            update.zero_grad()
    return losses


def counted(engine: Engine) -> dict[str, int]:
    """A unit without trained parameters is gathered, also ahead of a backward that never comes, and reduces nothing."""
    model = nn.Sequential(MLP(), MLP(8, 6), MLP(8, 5))
    model[0].requires_grad_(False)
    engine.shard_all(*model, model)
    with counting(engine, model) as calls:
        squares(model, rows(0)).backward()
    return calls


def gathers_beside_the_first_of_a_backward(engine: Engine) -> int:
    """On a CPU nothing is gathered ahead of a backward that never comes, see ``weights.schedule``."""
    model = nn.Sequential(MLP(), MLP(8, 6))
    model[0].requires_grad_(False)
    engine.shard_all(*model, model)
    with counting(engine, model) as calls:
        squares(model, rows(0)).backward()
    return calls["all_gather"]


PROGRAMS = [
    Program(in_one_group, (True, True), slow=True),
    Program(in_one_group, (False, True)),
    Program(in_one_group, (True, False), slow=True),
    Program(in_one_group, (False, False), slow=True),
    Program(whole_units, ("tft", True), slow=True),
    Program(whole_units, ("fftf", True), slow=True),
    Program(whole_units, ("ftft", False), slow=True),
    Program(whole_units, ("ft", True), slow=True),
    Program(several_forwards, (False,)),
    Program(several_forwards, (True,), slow=True),
    Program(toggled),
    Program(counted),
    Program(
        gathers_beside_the_first_of_a_backward,
        by_design={RETURNED: Design("FSDP2 gathers the frozen unit ahead, in vain", "^3$", "^4$")},
    ),
]
