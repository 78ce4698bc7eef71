"""PyTorch's test_fully_shard_autograd.py: unused outputs and modules, containers, hooks of gradients."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import (
    Engine,
    backward_as_one,
    gradients_are,
    rows,
    squares,
    train_as_one,
    weights_are,
)
from tests.support.torch_impl.zoo import MLP, Stack, TwoParts


@dataclass
class Carried:
    x: torch.Tensor
    step: int


class Pair(NamedTuple):
    x: torch.Tensor
    step: int


def unused_output(engine: Engine, reshard: bool) -> list[float]:
    """The loss uses another one of a unit's two outputs in each step."""

    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0
            self.first, self.other = MLP(), MLP(8, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x), self.other(x)

    model = TwoOutputs()

    def next_step(_: nn.Module) -> None:
        model.step += 1

    return train_as_one(
        model,
        lambda module: engine.shard_all(module.first, module.other, module, reshard_after_forward=reshard),
        loss=lambda module, x: module(x)[model.step % 2].square().sum(),
        before=next_step,
    )


def unused_module(engine: Engine, reshard: bool) -> list[bool]:
    """A unit whose output nothing uses has no gradients, and the next step finds it whole."""
    model = TwoParts()
    reference = copy.deepcopy(model)
    engine.shard_all(model.first, model.second, model, reshard_after_forward=reshard)
    engine.package.register_fsdp_forward_method(model, "encode")
    nones = []
    for step in range(3):
        model.second(model.encode(rows(step)).detach())
        model.encode(rows(step)).sum().backward()
        backward_as_one(reference, step, loss=lambda module, x: module.encode(x).sum())
        gradients_are(model, reference)
        nones += [param.grad is None for param in model.parameters()]
        for module in (model, reference):
            module.zero_grad()
    return nones


def containers(engine: Engine, container: str, reshard: bool) -> list[float]:
    """Units hand activations to each other in a container of their own."""

    class Through(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.mlp, self.last = MLP(), last

        def forward(self, inputs: Any) -> Any:
            if isinstance(inputs, torch.Tensor):
                x = inputs
            elif isinstance(inputs, dict):
                x = inputs["x"]
            elif isinstance(inputs, list):
                x = inputs[0]
            else:
                x = inputs.x
            x = self.mlp(x)
            if self.last:
                return x
            return {
                "dict": {"x": x, "step": 1},
                "list": [x, "word"],
                "dataclass": Carried(x, 1),
                "namedtuple": Pair(x, 1),
            }[container]

    model = nn.Sequential(Through(False), Through(False), Through(True))
    return train_as_one(
        model, lambda module: engine.shard_all(*module, module, reshard_after_forward=reshard)
    )


def hooks_of_gradients(engine: Engine) -> dict[str, int]:
    """A hook of a sharded parameter runs once a backward, when the reduced gradient is there."""
    model = Stack(2)
    engine.shard_all(*model.blocks, model)
    ran: Counter[str] = Counter()
    for name, param in model.named_parameters():

        def hook(param: torch.Tensor, name: str = name) -> None:
            assert param.grad is not None
            ran[name] += 1

        param.register_post_accumulate_grad_hook(hook)
    for step in range(2):
        squares(model, rows(step)).backward()
    return dict(sorted(ran.items()))


def optimizer_in_backward(engine: Engine) -> list[float]:
    """Updates in hooks of gradients are those of updates after the backward."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    engine.shard_all(*model.blocks, model)
    updates: dict[nn.Parameter, torch.optim.Optimizer] = {}

    def update(param: Any) -> None:
        updates[param].step()
        updates[param].zero_grad()

    for param in model.parameters():
        updates[param] = torch.optim.Adam([param], lr=1e-2)
        param.register_post_accumulate_grad_hook(update)
    plain = torch.optim.Adam(reference.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        loss = squares(model, rows(step))
        loss.backward()
        assert all(param.grad is None for param in model.parameters())
        backward_as_one(reference, step)
        plain.step()
        plain.zero_grad()
        weights_are(model, reference)
        losses.append(loss.item())
    return losses


PROGRAMS = [
    Program(unused_output, (True,), slow=True),
    Program(unused_output, (False,), slow=True),
    Program(unused_module, (True,)),
    Program(unused_module, (False,)),
    Program(containers, ("dict", True), slow=True),
    # FSDP2 before torch 2.13 does not look for outputs in dataclasses.
    Program(containers, ("dataclass", True), slow=True, torch="2.13.0a0"),
    Program(containers, ("namedtuple", False), slow=True),
    Program(containers, ("list", True), slow=True),
    Program(hooks_of_gradients),
    Program(optimizer_in_backward),
]
