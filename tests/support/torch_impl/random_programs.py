"""Random training programs over units of every kind, run sharded and, as the reference, on plain replicas.

A program is drawn from a seed: which modules are units and with what options, then operations like those in ``Player``.
Its text alone repeats a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

import torch_impl

BLOCKS = 4
WORDS = 11
PLACES = [*(f"blocks.{k}.inner" for k in range(BLOCKS)), *(f"blocks.{k}" for k in range(BLOCKS))]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params")
WHATS = (
    "plain",
    "plain",
    "inner recomputed",
    "inner recomputed reentrantly",
    "in place",
    "dict",
    "no linear",
)
RECOMPUTED = (None, None, "by hooks", "reentrantly")
SYNC = {
    "all": (True, True, True),
    "none": (False, True, True),
    "not last": (True, False, True),
    "not last, not reduced": (True, False, False),
}


@dataclass(frozen=True)
class Call:
    """A block, what it does, and whether it is recomputed in backward."""

    block: int
    what: str
    recomputed: str | None


Route = tuple[Call, ...]


@dataclass(frozen=True)
class Program:
    """``prefetch``: unit, direction, units; "" is the root. ``ops``: names of ``Player``'s methods, with arguments.

    ``ahead``: the ``prefetch`` of ``fully_shard``. ``offload``: main weights and gradients lie in the host's memory.
    """

    strategy: str
    reshard_after_forward: bool | None
    pool: bool
    units: tuple[str, ...]
    prefetch: tuple[tuple[str, str, tuple[str, ...]], ...]
    ops: tuple[tuple[Any, ...], ...]
    ahead: int
    offload: bool


class Stop(Exception):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Stop


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.bias = nn.Parameter(torch.randn(3))
        self.out = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(x @ self.weight.t() + self.bias))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.linear = nn.Linear(5, 5)
        self.inner = Inner()

    def forward(self, x: torch.Tensor, what: str) -> torch.Tensor | dict[str, torch.Tensor]:
        hidden = self.norm(x)
        if what.startswith("inner recomputed"):
            inner = checkpoint(self.inner, hidden, use_reentrant=what.endswith("reentrantly"))
        else:
            inner = self.inner(hidden)
        if what == "no linear":
            return x + inner
        total = self.linear(hidden) + inner
        if what == "in place":
            total = torch.relu_(total)
        return {"x": x + total, "seen": total.detach()} if what == "dict" else x + total


class Net(nn.Module):
    """Calls its blocks as a route says; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(5, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, route: Route, between: Callable[[int, Any], Any]) -> torch.Tensor:
        x = self.embed(tokens)
        for place, call in enumerate(route):
            if call.recomputed is None:
                x = self._run(call, x)
            else:
                x = checkpoint(self._run, call, x, use_reentrant=call.recomputed == "reentrantly")
            x = between(place, x)
        return self.head(x)

    def _run(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        out = self.blocks[call.block](x, call.what)
        return out["x"] if isinstance(out, dict) else out


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    units = (*(place for place in PLACES if rng.random() < 0.5), "")
    prefetch = tuple(
        (unit, direction, tuple(rng.sample(units, min(2, len(units)))))
        for unit in units
        for direction in ("forward", "backward")
        if rng.random() < 0.25
    )
    known: list[Route] = []

    def route() -> Route:
        # The same ones again and again: prefetching and the pool go by what was before.
        if len(known) < 3 or rng.random() < 0.2:
            length = rng.randint(1, 5)
            known.append(
                tuple(
                    Call(rng.randrange(BLOCKS), rng.choice(WHATS), rng.choice(RECOMPUTED))
                    for _ in range(length)
                )
            )
        return rng.choice(known)

    ops: list[tuple[Any, ...]] = []
    for _ in range(rng.randint(3, 5)):
        for _ in range(rng.randint(1, 4)):
            kind = rng.choice(("train", "train", "two", "evaluate", "forward_raises", "backward_raises"))
            if kind in ("train", "two"):
                ops.append(("sync", rng.choice(tuple(SYNC))))
            ops.append((kind, route(), route()) if kind == "two" else (kind, route()))
        ops += [("sync", "all"), ("train", route()), ("step", rng.random() < 0.5)]
        if rng.random() < 0.3:
            ops.append(("freeze", rng.randrange(BLOCKS), rng.random() < 0.7))
    return Program(
        rng.choice(STRATEGIES),
        rng.choice((None, True, False)),
        rng.random() < 0.7,
        units,
        prefetch,
        tuple(ops),
        rng.choice((0, 1)),
        rng.random() < 0.3,
    )


class Player:
    """Runs a program's operations on one model; ``program`` is None for the plain replica."""

    def __init__(self, program: Program | None) -> None:
        self._sharded = program is not None
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.model = Net().double()
        if program is not None:
            self._shard(program)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self._random = torch.Generator().manual_seed(100 + dist.get_rank())

    def _shard(self, program: Program) -> None:
        modules: dict[str, Any] = dict(self.model.named_modules())
        for unit in program.units:
            torch_impl.fully_shard(
                modules[unit],
                strategy=program.strategy,
                reshard_after_forward=program.reshard_after_forward,
                prefetch=program.ahead,
                offload_policy=CPUOffloadPolicy() if program.offload else None,
            )
        self.model.set_buffer_pool(program.pool)
        for unit, direction, others in program.prefetch:
            set_list = getattr(modules[unit], f"set_modules_to_{direction}_prefetch")
            set_list([modules[other] for other in others])

    def _loss(self, route: Route, between: Callable[[int, Any], Any] = lambda place, x: x) -> torch.Tensor:
        tokens = torch.randint(0, WORDS, (3,), generator=self._random)
        return nn.functional.cross_entropy(self.model(tokens, route, between), tokens)

    def sync(self, which: str) -> None:
        if self._sharded:
            synced, last, reduced = SYNC[which]
            self.model.set_requires_gradient_sync(synced)
            self.model.set_is_last_backward(last)
            self.model.set_requires_all_reduce(reduced)

    def train(self, route: Route) -> None:
        self._loss(route).backward()

    def two(self, first: Route, second: Route) -> None:
        """One backward of two forwards."""
        (self._loss(first) + self._loss(second)).backward()

    def evaluate(self, route: Route) -> None:
        with torch.no_grad():
            self._loss(route)

    def forward_raises(self, route: Route) -> None:
        def stop(place: int, x: torch.Tensor) -> torch.Tensor:
            if place == len(route) - 1:
                raise Stop
            return x

        with pytest.raises(Stop):
            self._loss(route, stop)

    def backward_raises(self, route: Route) -> None:
        def stop(place: int, x: torch.Tensor) -> torch.Tensor:
            return RaisesInBackward.apply(x) if place == len(route) // 2 else x

        with pytest.raises(Stop):
            self._loss(route, stop).backward()
        self._optimizer.zero_grad()

    def step(self, to_none: bool) -> None:
        if not self._sharded:
            for param in self.model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=to_none)

    def freeze(self, block: int, frozen: bool) -> None:
        self.model.blocks[block].requires_grad_(not frozen)
