"""What seven programs call of FSDP2, each call with the test that shows what becomes of it, and some of those tests.

``tests/torch_impl/programs/test_calls.py`` holds ``program_table`` against the programs' sources.
"""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

import torch_impl
from tests.support.ranks import on_ranks
from tests.support.torch_impl.program_table import PROGRAM_CALLS, PROGRAMS, Call
from tests.support.torch_impl.toy import assert_at_rest, assert_same_weights

ROOT = Path(__file__).parents[2]


def defined(test: str) -> bool:
    path, _, name = test.partition("::")
    return (
        re.search(rf"^def {name}\(", (ROOT / "tests" / "torch_impl" / path).read_text(), re.MULTILINE)
        is not None
    )


@pytest.mark.parametrize("call", PROGRAM_CALLS, ids=lambda call: call.name)
def test_each_call_of_a_program_is_shown_by_a_test_and_each_difference_is_told(call: Call) -> None:
    assert call.used_at
    assert call.used_at.keys() <= set(PROGRAMS)
    assert defined(call.shown_by), call.shown_by
    told = "".join(
        (ROOT / name).read_text() for name in ("torch_impl/fsdp2.py", "docs/reference/fsdp2-differences.md")
    )
    # Code has one backtick in Markdown, and two in docstrings.
    assert " ".join(call.told.replace("``", "`").split()) in " ".join(told.split())


def test_no_call_has_two_rows() -> None:
    names = [call.name for call in PROGRAM_CALLS]
    assert sorted(set(names)) == sorted(names)


class Fused(torch.autograd.Function):
    """As axolotl's kernels: base and adapters in one function, past the adapters' forwards."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, base: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, base, a, b)
        return F.linear(x, base) + F.linear(F.linear(x, a), b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, base, a, b = ctx.saved_tensors
        (grad,) = grads
        inner = grad @ b
        return grad @ base + inner @ a, None, inner.t() @ x, grad.t() @ F.linear(x, a)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(5, 3, bias=False), nn.Linear(3, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.a.weight, DTensor):
            self.a.unshard()
            self.b.unshard()
        return torch.tanh(Fused.apply(x, self.base.weight, self.a.weight, self.b.weight))


def adapted(fully_shard: Callable[..., Any] | None, reshard: bool) -> tuple[nn.Module, list[float]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(Adapted(), Adapted())
    if fully_shard is not None:
        for layer in model:
            for unit in (layer.a, layer.b, layer):
                fully_shard(unit, reshard_after_forward=reshard)
        fully_shard(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    inputs = torch.randn(dist.get_world_size(), 4, 5, generator=torch.Generator().manual_seed(1))
    mine = inputs.flatten(0, 1) if fully_shard is None else inputs[dist.get_rank()]
    losses = []
    for _ in range(3):
        loss = (model(mine) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_units_that_are_unsharded_by_hand_and_never_called_are_trained(reshard: bool) -> None:
    reference, _ = adapted(None, reshard)
    _, theirs = adapted(fsdp.fully_shard, reshard)
    model, ours = adapted(torch_impl.fully_shard, reshard)
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert_same_weights(model, reference)
    assert_at_rest(model)


class Abstract(nn.Linear, ABC):
    """verl puts another FSDPModule in torch's place for classes of this metaclass."""


class Packed(nn.Parameter):
    """As bitsandbytes' parameters, which have their quantization in attributes."""


@on_ranks(2)
def test_abstract_modules_are_sharded_and_parameters_of_other_classes_become_plain() -> None:
    module = Abstract(3, 4)
    module.weight = Packed(torch.ones(4, 3))
    module.weight.quant_state = "kept"
    torch_impl.fully_shard(module)
    module(torch.ones(1, 3)).sum().backward()
    module.unshard()
    assert type(module.weight) is nn.Parameter
    assert module.weight.quant_state == "kept"
    with pytest.raises(AttributeError, match="_get_fsdp_state"):
        module._get_fsdp_state()
    # verl's engines pass over modules without it.
    assert _get_module_fsdp_state(module) is None


@on_ranks(2)
def test_local_parts_are_told_apart_from_those_of_torch() -> None:
    module = torch_impl.fully_shard(nn.Linear(5, 5))
    weight = module.weight
    assert not any(placement.is_shard() or placement.is_replicate() for placement in weight.placements)
    values = torch.arange(25.0).view(5, 5)
    made = distribute_tensor(values, weight.device_mesh, weight.placements)
    copied = made.clone()
    assert torch.equal(copied.full_tensor(), values)
    # accelerate and axolotl look for parts that keep whole tensors alive.
    assert copied._local_tensor.untyped_storage().nbytes() == copied._local_tensor.nbytes
    assert copied._local_tensor.data_ptr() != made._local_tensor.data_ptr()
    # verl hands on what a rank holds.
    assert torch.equal(torch.cat(_all(weight.to_local().detach())), weight.full_tensor().detach())
    with pytest.raises(RuntimeError, match=r"aten\.mm\.default is not supported .* use full_tensor\(\)"):
        weight.detach() @ weight.detach()


def _all(local: torch.Tensor) -> list[torch.Tensor]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    return everyone
