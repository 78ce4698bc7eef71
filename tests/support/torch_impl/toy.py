"""A small model with awkward shapes, its data, and reference results.

The shapes make shards uneven and empty: rows of 5, 7 and 3 elements, a scalar, a stack, a single-row matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_impl
from torch_impl.comm import collectives
from torch_impl.runtime.ground.phase import Phase


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.stack = nn.Parameter(torch.randn(2, 3, 7) * 0.3)
        self.down = nn.Linear(3, 5, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        mixed = torch.einsum("bi,eoi->bo", hidden, self.stack)
        return x + self.gain * torch.tanh(self.down(mixed))


class Toy(nn.Module):
    def __init__(self, blocks: int = 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(9, 5)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.head = nn.Linear(5, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


def sharded_toy(blocks: int = 2, dtype: torch.dtype = torch.float32, **options: object) -> Toy:
    """Make each block a unit, then the root."""
    model = Toy(blocks).to(dtype)
    for block in model.blocks:
        torch_impl.fully_shard(block, **options)
    torch_impl.fully_shard(model, **options)
    return model


def batch(step: int, world: int, microbatches: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets ``[world, microbatches, size]``: different on every rank and microbatch."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (world, microbatches, size)
    return torch.randint(0, 9, shape, generator=generator), torch.randn(shape, generator=generator)


def mse(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(tokens.reshape(-1)).to(targets.dtype) - targets.reshape(-1)).square().mean()


def full_batch_loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    """Of all ranks' data of a step."""
    return mse(model, *batch(step, dist.get_world_size(), 1))


def local_loss(model: nn.Module, step: int = 0) -> torch.Tensor:
    """Of this rank's data of a step."""
    return mse(model, *(part[dist.get_rank()] for part in batch(step, dist.get_world_size(), 1)))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return torch_impl.full_tensor(tensor).detach()


def seeded(build: Callable[[], Any], seed: int = 11) -> Any:
    """The same module on every rank and as the reference."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


def rank_inputs() -> list[torch.Tensor]:
    """One input for each rank, of shape (4, 5)."""
    random = torch.Generator().manual_seed(5)
    return [torch.randn(4, 5, generator=random) for _ in range(dist.get_world_size())]


def assert_same_gradients(
    model: nn.Module, reference: nn.Module, rtol: float = 1e-5, atol: float = 1e-7
) -> None:
    """Missing gradients count as zeros, as in a group."""
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        want = expected[name].grad
        want = torch.zeros_like(expected[name]) if want is None else want
        got = torch.zeros_like(want) if param.grad is None else whole(param.grad)
        torch.testing.assert_close(
            got, want, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_weights(
    model: nn.Module, reference: nn.Module, rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    expected = dict(reference.named_parameters())
    assert list(expected) == [name for name, _ in model.named_parameters()]
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            whole(param),
            expected[name].detach(),
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_at_rest(model: nn.Module) -> None:
    """Sharded parameters are shown, and the compute weights of optim_grads_params have no memory."""
    for param in model.parameters():
        assert type(param) is torch_impl.dtensor.tensor.RowDTensor
    for module in model.modules():
        if isinstance(module, torch_impl.FSDPModule):
            assert module._unit.phase is Phase.REST
            assert not module._unit._backwards
            for group in module._unit.groups:
                assert group.gradient.collecting == []
                if group.strategy.shard_parameters:
                    assert group.weights.compute.flat.untyped_storage().nbytes() == 0


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts of the calls into ``torch.distributed`` inside the context."""
    targets = {
        "all_gather": (collectives, "all_gather"),
        "reduce_scatter": (collectives, "reduce_scatter"),
        "all_reduce": (dist, "all_reduce"),
    }
    counts = dict.fromkeys(targets, 0)
    originals = {name: getattr(*target) for name, target in targets.items()}

    def counting(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name, target in targets.items():
        setattr(*target, counting(name))
    try:
        yield counts
    finally:
        for name, target in targets.items():
            setattr(*target, originals[name])


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    mean = value.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()
