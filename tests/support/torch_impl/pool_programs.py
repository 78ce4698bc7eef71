"""Programs that follow the plan of the pool for some steps and then deviate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_impl
from tests.support.torch_impl.toy import Block, whole

WORLD = 2
BLOCKS = 6
WARM_UP = 5


class Tower(nn.Module):
    """``BLOCKS`` blocks of one size, called as ``program`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(5, 5)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, program: Callable[[Any, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return self.head(program(self.blocks, x))


def plain(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


def reordered(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    return plain([blocks[k] for k in (3, 0, 5, 2, 4, 1)], x)


def skipping(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for k, block in enumerate(blocks):
        x = torch.tanh(block(x) + (2 * x if k in (1, 4) else 0))
    return x


def parallel(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for k in range(0, BLOCKS, 3):
        x = torch.tanh(blocks[k](x) + blocks[k + 2](x) * blocks[k + 1](x))
    return x


def detached(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    """Blocks without a gradient, with paths around them that have one."""
    a = blocks[0](x)
    b = blocks[1](a)
    c = blocks[2](b.detach())
    d = blocks[3](c)
    return a + b + blocks[4](d.detach()) * blocks[5](a + d)


def twice(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    return plain(blocks, plain(blocks, x))


def crossing(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    """Each block's output is combined repeatedly with the output of the block two before it."""
    before = x
    for _ in range(2):
        for block in blocks:
            before, x = x, torch.tanh(block(x) * before)
    return x


def some(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    return plain([blocks[k] for k in (0, 2, 4)], x)


def others(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    return plain([blocks[k] for k in (1, 5)], x)


def recomputing(reentrant: bool, segment: int) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    def program(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, BLOCKS, segment):
            x = checkpoint(plain, blocks[first : first + segment], x, use_reentrant=reentrant)
        return x

    return program


def data(step: int) -> torch.Tensor:
    """``[world, 2 microbatches, 4, 5]``, different on every rank."""
    return torch.randn(WORLD, 2, 4, 5, generator=torch.Generator().manual_seed(step))


def loss_of(model: Tower, x: torch.Tensor, program: Any = plain) -> torch.Tensor:
    return model(x.reshape(-1, 5).requires_grad_(), program).square().mean()


class Stop(Exception):
    pass


def stopping(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    def stop(grad: torch.Tensor) -> None:
        raise Stop

    x = plain(blocks[:3], x)
    x.register_hook(stop)
    return plain(blocks[3:], x)


def with_program(program: Any) -> Any:
    def step(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
        loss_of(model, first, program).backward()

    return step


def accumulating(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    loss_of(model, first).backward()
    loss_of(model, second, skipping).backward()


def kept_unreduced(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    if isinstance(model, torch_impl.FSDPModule):
        model.set_requires_gradient_sync(False)
    loss_of(model, first).backward()
    if isinstance(model, torch_impl.FSDPModule):
        model.set_requires_gradient_sync(True)
    loss_of(model, second).backward()


def kept_after_half_a_backward(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    """Change the option while a block collects gradients."""

    def unsync(grad: torch.Tensor) -> None:
        if isinstance(model, torch_impl.FSDPModule):
            model.set_requires_gradient_sync(False)

    def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(unsync)

    inner = model.blocks[3].up.register_forward_hook(watch)
    loss_of(model, first).backward()
    inner.remove()
    if isinstance(model, torch_impl.FSDPModule):
        model.set_requires_gradient_sync(True)
    loss_of(model, second).backward()


def evaluating(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    loss = loss_of(model, first)
    for training, program in [(True, plain), (False, reordered), (False, parallel)]:
        model.train(training)
        with torch.no_grad():
            loss_of(model, second, program)
    with torch.inference_mode():
        loss_of(model, second.clone())
    model.train()
    loss.backward()


def evaluating_first(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    """Gather changed weights in inference mode."""
    model.eval()
    with torch.inference_mode():
        loss_of(model, second.clone(), reordered)
    model.train()
    loss_of(model, first).backward()


def two_backwards(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    losses = [loss_of(model, first), loss_of(model, second, reordered)]
    for loss in losses:
        loss.backward()


def two_backwards_in_reverse(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    losses = [loss_of(model, first), loss_of(model, second)]
    for loss in reversed(losses):
        loss.backward()


def one_backward_of_two(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    (loss_of(model, first) + loss_of(model, second, skipping)).backward()


def the_same_backward_twice(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    loss = loss_of(model, first)
    loss.backward(retain_graph=True)
    loss_of(model, second).backward()
    loss.backward()


def backward_raises(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    with pytest.raises(Stop):
        loss_of(model, first, stopping).backward()
    model.zero_grad()
    loss_of(model, second).backward()


def forward_raises(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    def program(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        plain(blocks[:4], x)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loss_of(model, first, program)
    loss_of(model, second, reordered).backward()


def other_shapes(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    loss_of(model, first[..., :1, :]).backward()
    loss_of(model, torch.cat([first, second], dim=-2)).backward()


def frozen(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    for k in (0, 2, 3):
        model.blocks[k].requires_grad_(False)
    loss_of(model, first).backward()


def explicitly_gathered(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    """Weights that a program shows stay unchanged while other weights are gathered."""
    loss = loss_of(model, second)
    sharded = isinstance(model, torch_impl.FSDPModule)
    before = whole(model.blocks[3].down.weight) if sharded else None
    if sharded:
        model.blocks[3].unshard()
    loss_of(model, first, others).backward()
    if sharded:
        assert torch.equal(model.blocks[3].down.weight, before)
        model.blocks[3].reshard()
    del loss


def kept_after_forward(model: Tower, first: torch.Tensor, second: torch.Tensor) -> None:
    if isinstance(model, torch_impl.FSDPModule):
        model.set_reshard_after_forward(False)
    loss_of(model, first).backward()
    loss_of(model, second, reordered).backward()


STEPS: dict[str, Any] = {
    "plain": with_program(plain),
    "reordered": with_program(reordered),
    "skipping": with_program(skipping),
    "parallel": with_program(parallel),
    "detached": with_program(detached),
    "twice": with_program(twice),
    "crossing": with_program(crossing),
    "some": with_program(some),
    **{
        f"recomputing {segment} {'reentrant' if reentrant else 'by hooks'}": with_program(
            recomputing(reentrant, segment)
        )
        for reentrant in (True, False)
        for segment in (1, 3)
    },
    **{
        step.__name__: step
        for step in (
            accumulating,
            kept_unreduced,
            kept_after_half_a_backward,
            evaluating,
            evaluating_first,
            two_backwards,
            two_backwards_in_reverse,
            one_backward_of_two,
            the_same_backward_twice,
            backward_raises,
            forward_raises,
            other_shapes,
            frozen,
            explicitly_gathered,
            kept_after_forward,
        )
    },
}
