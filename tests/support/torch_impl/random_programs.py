"""Random training programs over units of every kind, drawn from a seed.

A seed draws which modules are units, their options, and then operations, which are methods of ``Player``. The text of a
program suffices to repeat a failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BLOCKS = 4
WORDS = 11
UNITS = [*(f"blocks.{k}.inner" for k in range(BLOCKS)), *(f"blocks.{k}" for k in range(BLOCKS))]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "optim_grads_params")
TWO_AXES = ("hsdp", "hfsdp", "hfsdp", "optim", "no_shard")
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
OPTIMIZERS = ("sgd", "momentum", "adamw")
TRANSFERS = ("as they come", "as they come", "late collectives", "late lanes")
BACKWARDS = ("train", "train", "two", "two apart", "two in reverse", "twice")
BETWEEN = (
    *BACKWARDS,
    "evaluate",
    "infer",
    "forward_raises",
    "backward_raises",
    "write",
    "load",
    "unshard",
    "reshard_after_forward",
    "training",
)


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
    ``transfers``: when what is communicated arrives, see ``late_transfers``. ``on_two_axes``: the strategy of four
    ranks, two by two.
    """

    strategy: str
    reshard_after_forward: bool | None
    pool: bool
    units: tuple[str, ...]
    prefetch: tuple[tuple[str, str, tuple[str, ...]], ...]
    ops: tuple[tuple[Any, ...], ...]
    ahead: int
    offload: bool
    optimizer: str
    transfers: str
    on_two_axes: str


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
        for index, call in enumerate(route):
            if call.recomputed is None:
                x = self._run(call, x)
            else:
                x = checkpoint(self._run, call, x, use_reentrant=call.recomputed == "reentrantly")
            x = between(index, x)
        return self.head(x)

    def _run(self, call: Call, x: torch.Tensor) -> torch.Tensor:
        out = self.blocks[call.block](x, call.what)
        return out["x"] if isinstance(out, dict) else out


class _Draw:
    """Everything that one seed draws. Routes repeat, because prefetching and the pool follow earlier routes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.units = (*(unit for unit in UNITS if self.rng.random() < 0.5), "")
        self._routes: list[Route] = []

    def route(self) -> Route:
        rng = self.rng
        if len(self._routes) < 3 or rng.random() < 0.2:
            calls = (
                Call(rng.randrange(BLOCKS), rng.choice(WHATS), rng.choice(RECOMPUTED))
                for _ in range(rng.randint(1, 5))
            )
            self._routes.append(tuple(calls))
        return rng.choice(self._routes)

    def operations(self, name: str) -> list[tuple[Any, ...]]:
        """An operation and its prerequisites."""
        rng = self.rng
        if name in BACKWARDS:
            routes = [self.route() for _ in range(2 if name.startswith("two") else 1)]
            return [("sync", rng.choice(tuple(SYNC))), (name.replace(" ", "_"), *routes)]
        arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
            "write": lambda: (rng.randrange(100), rng.choice(("mul", "copy", "foreach"))),
            "load": lambda: (rng.randrange(100),),
            "unshard": lambda: (rng.choice(self.units), rng.random() < 0.5),
            "reshard_after_forward": lambda: (rng.random() < 0.5,),
            "training": lambda: (rng.random() < 0.5,),
        }
        return [(name, *arguments.get(name, lambda: (self.route(),))())]

    def step(self) -> list[tuple[Any, ...]]:
        """The last backward before a step, the step, and operations on weights and gradients after the step."""
        rng = self.rng
        operations: list[tuple[Any, ...]] = [("sync", "all"), ("train", self.route())]
        if rng.random() < 0.3:
            operations.append(("clip", rng.choice((0.1, 10.0))))
        cleared = rng.choice(("to none", "to none", "to zero", "of the model", "kept"))
        operations.append(("skip_step",) if rng.random() < 0.1 else ("step", cleared))
        if cleared != "kept" and rng.random() < 0.3:
            operations.append(("freeze", rng.randrange(BLOCKS), rng.random() < 0.7))
        if rng.random() < 0.3:
            operations.append((rng.choice(("remember", "recall", "save_and_load")),))
        return operations


def draw(seed: int) -> Program:
    """The program of a seed."""
    drawn = _Draw(seed)
    rng, units = drawn.rng, drawn.units
    prefetch = tuple(
        (unit, direction, tuple(rng.sample(units, min(2, len(units)))))
        for unit in units
        for direction in ("forward", "backward")
        if rng.random() < 0.25
    )
    operations: list[tuple[Any, ...]] = []
    for _ in range(rng.randint(3, 6)):
        for _ in range(rng.randint(1, 4)):
            operations += drawn.operations(rng.choice(BETWEEN))
        operations += drawn.step()
    return Program(
        rng.choice(STRATEGIES),
        rng.choice((None, True, False)),
        rng.random() < 0.7,
        units,
        prefetch,
        tuple(operations),
        rng.choice((0, 1)),
        rng.random() < 0.3,
        rng.choice(OPTIMIZERS),
        rng.choice(TRANSFERS),
        rng.choice(TWO_AXES),
    )
