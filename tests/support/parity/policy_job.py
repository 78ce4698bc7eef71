"""Rank functions for ``test_policy_runtimes``: shard a model by a policy file, and report everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import torch_impl
from bridge.relay.config import DataConfig, ModelConfig
from bridge.relay.corpus import Corpus, rank_slice
from torch_impl.comm import collectives
from torch_impl.dtensor.local import local_of
from torch_impl.models.decoder import Decoder, DecoderConfig, next_token_loss

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
VOCABULARY, WIDTH = 11, 5
# Of each layer: how many matrices it mixes by, and the inner size of its MLP. Sizes tell the units apart.
LAYERS = ((3, 7), (4, 13))
# kind, the ranks of the group of rank 0, dtype and bytes of the whole buffer.
Call = tuple[str, tuple[int, ...], str, int]


class Kernel(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.kernel


class Table(Kernel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel[x]


class Stack(Kernel):
    """In three dimensions a row is the last dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.einsum("bi,eio->beo", x, self.kernel)).sum(1)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class MLP(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.down = Kernel(inner, WIDTH)
        self.gate = Kernel(WIDTH, inner)
        self.up = Kernel(WIDTH, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, count: int, inner: int) -> None:
        super().__init__()
        self.mix = Stack(count, WIDTH, WIDTH)
        self.mlp = MLP(inner)
        self.norm = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.mix(self.norm(x)))


class Net(nn.Module):
    """Its modules hold parameters or modules, in alphabetical order, so that both frameworks list them alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Table(VOCABULARY, WIDTH)
        self.head = Kernel(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Layer(*sizes) for sizes in LAYERS)
        self.norm = Scale()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Of a parameter: all of a model are different."""
    random = np.random.default_rng(list(name.encode()))
    return (1 + random.normal(size=shape) * 0.3).astype(np.float32)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step: how many by unit and kind, and each call."""

    of_units: dict[tuple[str, str], int]
    calls: dict[Call, int]


@dataclass(frozen=True)
class Sharded:
    """What one rank holds and does under a policy; bytes of weights are with padding, those of moments without."""

    fingerprints: dict[str, list[str]]
    rows: dict[str, np.ndarray]
    main_weights: int
    moments: int
    padding: int
    steps: list[Traffic]


def sharded(policy: str, frozen: list[str], microbatches: int) -> Sharded:
    """Two steps of the twin model."""
    model = Net()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.from_numpy(values(name, tuple(param.shape))))
            param.requires_grad_(name not in frozen)
    torch_impl.ShardingPolicy.load(policy).apply(model)
    rows = {
        name: local_of(param).detach().flatten().numpy().copy() for name, param in model.named_parameters()
    }
    optimizer = torch_impl.MainWeightAdamW([p for p in model.parameters() if p.requires_grad])
    tokens = torch.arange(microbatches * 2).add(dist.get_rank()).view(microbatches, 2) % VOCABULARY
    steps = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch_impl.count_collectives(model) as count, recorded() as calls:
            for number, part in enumerate(tokens):
                model.set_is_last_backward(number == microbatches - 1)
                (model(part).square().mean() / microbatches).backward()
        steps.append(Traffic(dict(count.calls_of), dict(calls)))
        optimizer.step()
    memory = model.memory_report(optimizer)
    fingerprints = {
        unit.name: [group.fingerprint for group in unit.groups]
        for unit in torch_impl.layout_report(model).units
    }
    return Sharded(fingerprints, rows, memory.main_weights, memory.moments, memory.padding, steps)


@contextmanager
def recorded() -> Iterator[Counter[Call]]:
    """Every collective with the ranks that take part in it."""
    calls: Counter[Call] = Counter()
    originals = {collective: getattr(collectives, collective) for collective in KINDS}

    def recording(collective: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            whole = args[1] if collective == "reduce_scatter" else args[0]
            parts = [whole] if isinstance(whole, torch.Tensor) else whole
            ranks = dist.get_process_group_ranks(args[1] if collective == "all_reduce" else args[2])
            nbytes = sum(part.numel() * part.element_size() for part in parts)
            calls[collective, tuple(ranks), str(parts[0].dtype).removeprefix("torch."), nbytes] += 1
            return originals[collective](*args, **kwargs)

        return call

    for collective in KINDS:
        setattr(collectives, collective, recording(collective))
    try:
        yield calls
    finally:
        for collective, original in originals.items():
            setattr(collectives, collective, original)


def batch(data: DataConfig, step: int) -> np.ndarray:
    """The global batch of a step."""
    corpus = Corpus.of_standard_library()
    return corpus.global_batch(seed=data.seed, step=step, batch=data.batch, length=data.length)


def losses(
    policy: str,
    source: Path,
    model: ModelConfig,
    data: DataConfig,
    adamw: dict[str, Any],
    steps: range,
    microbatches: int,
) -> list[float]:
    """Train our decoder from a checkpoint on; the mean loss of each step over the global batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    decoder = torch_impl.ShardingPolicy.load(policy).apply(Decoder(DecoderConfig(**vars(model))))
    optimizer = torch_impl.MainWeightAdamW(decoder.parameters(), **adamw)
    torch_impl.load_checkpoint(source, decoder, optimizer)
    step_losses = []
    for step in steps:
        own = torch.from_numpy(rank_slice(batch(data, step), rank, world)).long()
        mean = torch.zeros((), dtype=torch.float64)
        for number, part in enumerate(own.chunk(microbatches)):
            decoder.set_is_last_backward(number == microbatches - 1)
            loss = next_token_loss(decoder(part[:, :-1]), part[:, 1:]) / microbatches
            loss.backward()
            mean += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean)
        step_losses.append(mean.item() / world)
    return step_losses


def cut_losses(
    policy: str,
    source: Path,
    destination: Path,
    model: ModelConfig,
    data: DataConfig,
    adamw: dict[str, Any],
    steps: range,
) -> list[float]:
    """``losses`` by a policy (its text) whose last mesh axis is ``tp``, and a checkpoint of what came of it."""
    world = dist.get_world_size()
    read = torch_impl.ShardingPolicy.parse(policy)
    alike = read.mesh_sizes(world)["tp"]
    decoder: Any = read.apply(Decoder(DecoderConfig(**vars(model))))
    optimizer = torch_impl.MainWeightAdamW(decoder.parameters(), **adamw)
    train = torch_impl.load_checkpoint(source, decoder, optimizer)
    step_losses = []
    for step in steps:
        rows = rank_slice(batch(data, step), dist.get_rank() // alike, world // alike)
        own = torch.from_numpy(rows).long()
        loss = next_token_loss(decoder(own[:, :-1]), own[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        step_losses.append(mean.item() / world)
    torch_impl.save_checkpoint(destination, decoder, optimizer, {**train, "step": steps.stop})
    return step_losses
