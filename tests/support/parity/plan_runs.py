"""Rank functions for the planner's tests: train a model of given shapes under a policy, and report the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_impl
from torch_impl.comm import collectives
from torch_impl.models.decoder import Decoder, DecoderConfig, next_token_loss

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Spec:
    """One parameter: its shape, and whether it is frozen or given in bfloat16."""

    shape: tuple[int, ...]
    frozen: bool = False
    narrow: bool = False


class Part(nn.Module):
    """Parameters of any shapes, all of which the output depends on."""

    def __init__(self, specs: list[Spec]) -> None:
        super().__init__()
        for number, spec in enumerate(specs):
            dtype = torch.bfloat16 if spec.narrow else torch.float32
            values = torch.full(spec.shape, 0.01, dtype=dtype)
            setattr(self, f"p{number}", nn.Parameter(values, requires_grad=not spec.frozen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(p.to(x.dtype).sum() for p in self.parameters(recurse=False))


class Whole(nn.Module):
    """Parts one after the other; the factor makes every part's input depend on a trained parameter."""

    def __init__(self, parts: list[list[Spec]], own: list[Spec]) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.own = Part(own)
        self.parts = nn.ModuleList(Part(specs) for specs in parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own(x * self.factor)
        for part in self.parts:
            x = part(x)
        return x


def train(policy: str, parts: list[list[Spec]], own: list[Spec], microbatches: int) -> dict[str, Any]:
    """Three steps; bytes at rest after the last, and its collectives by unit and by ranks of their group."""

    def backward(model: nn.Module) -> None:
        model(torch.full((3,), 0.1)).sum().backward()

    return _train(Whole(parts, own), policy, backward, microbatches)


def train_decoder(policy: str, sizes: dict[str, int], microbatches: int) -> dict[str, Any]:
    """``train`` of the shipped decoder."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**sizes))

    def backward(model: nn.Module) -> None:
        tokens = torch.randint(0, model.config.vocab_size, (2, 6))
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()

    return _train(model, policy, backward, microbatches)


def _train(
    model: Any, policy: str, backward: Callable[[nn.Module], None], microbatches: int
) -> dict[str, Any]:
    torch_impl.ShardingPolicy.parse(policy, "test").apply(model)
    optimizer = torch_impl.MainWeightAdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        with torch_impl.count_collectives(model) as count, by_group() as groups:
            for k in range(microbatches):
                model.set_is_last_backward(k == microbatches - 1)
                backward(model)
        optimizer.step()
    return {
        "memory": model.memory_report(optimizer),
        "calls": dict(count.calls_of),
        "bytes": dict(count.bytes_of),
        "groups": dict(groups),
        "fingerprints": [
            group.fingerprint for unit in torch_impl.layout_report(model).units for group in unit.groups
        ],
    }


@contextmanager
def by_group() -> Iterator[Counter[tuple[str, tuple[int, ...]]]]:
    """Count calls by kind and the ranks of their process group."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    originals = {collective: getattr(collectives, collective) for collective in KINDS}

    def counting(collective: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = args[1] if collective == "all_reduce" else args[2]
            counts[collective, tuple(dist.get_process_group_ranks(group))] += 1
            return originals[collective](*args, **kwargs)

        return call

    for collective in KINDS:
        setattr(collectives, collective, counting(collective))
    try:
        yield counts
    finally:
        for collective, original in originals.items():
            setattr(collectives, collective, original)
