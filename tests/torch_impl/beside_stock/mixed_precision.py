"""PyTorch's test_fully_shard_mixed_precision.py: computed, reduced and cast as in one process that casts by hand."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import Engine, rows, squares, weights_are, whole
from tests.support.torch_impl.zoo import MLP, Stack

# FSDP2 then reduces in the dtype in which parameters were given, where reduce_dtype is None.
NEW = TorchVersion(torch.__version__) >= "2.15.0a0"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "none": None}


def low_gradients(
    reference: nn.Module, data: Sequence[torch.Tensor], param_dtype: Any, reduce_dtype: Any
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of each rank's data with weights in ``param_dtype``; gradients summed in ``reduce_dtype``, their mean."""
    computing = copy.deepcopy(reference)
    if param_dtype is not None:
        computing.to(param_dtype)
    reduce_dtype = reduce_dtype or param_dtype or torch.float32
    losses, sums = [], [torch.zeros_like(param, dtype=reduce_dtype) for param in reference.parameters()]
    for x in data:
        loss = squares(computing, x.to(param_dtype or x.dtype))
        for total, grad in zip(sums, torch.autograd.grad(loss, list(computing.parameters())), strict=True):
            total += grad.to(reduce_dtype)
        losses.append(loss.item())
    return losses, [(total / len(data)).float() for total in sums]


def trained(engine: Engine, param: str, reduce: str, reshard: bool) -> list[float]:
    """Three steps: main weights in float32, losses as cast by hand."""
    model = Stack()
    reference = copy.deepcopy(model)
    policy = engine.package.MixedPrecisionPolicy(param_dtype=DTYPES[param], reduce_dtype=DTYPES[reduce])
    engine.shard_all(*model.blocks, model, mp_policy=policy, reshard_after_forward=reshard)
    updates = [torch.optim.SGD(module.parameters(), lr=1e-2) for module in (model, reference)]
    world, own_losses = dist.get_world_size(), []
    for step in range(3):
        data = [rows(step, rank) for rank in range(world)]
        losses, grads = low_gradients(reference, data, DTYPES[param], DTYPES[reduce])
        loss = squares(model, data[dist.get_rank()])
        loss.backward()
        assert loss.item() == pytest.approx(losses[dist.get_rank()], rel=1e-6)
        for own, other, grad in zip(model.parameters(), reference.parameters(), grads, strict=True):
            assert own.grad is not None
            assert own.dtype == own.grad.dtype == torch.float32
            torch.testing.assert_close(whole(own.grad), grad)
            other.grad = grad
        for update in updates:
            update.step()
            update.zero_grad()
        weights_are(model, reference)
        own_losses.append(loss.item())
    return own_losses


def accumulated(engine: Engine, param: str, reduce: str) -> list[float]:
    """Sums of microbatches that are reduced once: FSDP2 keeps them in ``reduce_dtype``, this package in float32."""
    model = MLP()
    reference = copy.deepcopy(model)
    policy = engine.package.MixedPrecisionPolicy(param_dtype=DTYPES[param], reduce_dtype=DTYPES[reduce])
    engine.shard(model, mp_policy=policy)
    world, count, losses = dist.get_world_size(), 4, []
    low = DTYPES[reduce] or DTYPES[param] or torch.float32
    totals = [torch.zeros_like(param_, dtype=low) for param_ in reference.parameters()]
    for rank in range(world):
        kept = torch.float32 if engine.ours else low
        own = [torch.zeros_like(param_, dtype=kept) for param_ in reference.parameters()]
        for part in range(count):
            _, grads = low_gradients(reference, [rows(part, rank)], DTYPES[param], torch.float32)
            for total, grad in zip(own, grads, strict=True):
                # In place, which rounds once; from torch 2.15 on FSDP2's gradients are rounded before they are added.
                total += grad.to(low) if NEW and not engine.ours else grad
        for total, mine in zip(totals, own, strict=True):
            total += mine.to(low)
    for part in range(count):
        model.set_requires_gradient_sync(part == count - 1)
        loss = squares(model, rows(part))
        loss.backward()
        losses.append(loss.item())
    for own_param, total in zip(model.parameters(), totals, strict=True):
        assert own_param.grad is not None
        torch.testing.assert_close(whole(own_param.grad), (total / world).float())
    return losses


def dtypes_in_forward(engine: Engine, cast: bool) -> dict[str, list[str]]:
    """What modules of two units are given and hold; ``cast_forward_inputs=False`` leaves inputs to the caller."""
    seen: dict[str, list[str]] = {}

    class Watching(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.linear = name, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen[self.name] = [str(x.dtype), str(self.linear.weight.dtype)]
            return self.linear(x if cast else x.to(self.linear.weight.dtype))

    model = nn.Sequential(Watching("first"), Watching("second"), Watching("third"))
    half = engine.package.MixedPrecisionPolicy(param_dtype=torch.float16, cast_forward_inputs=cast)
    engine.shard(model[1], mp_policy=half)
    engine.shard(model[2], mp_policy=engine.package.MixedPrecisionPolicy(param_dtype=torch.float32))
    engine.shard(model)
    out = model(rows(0))
    seen["out"] = [str(out.dtype)]
    return seen


def outputs(engine: Engine, output: str) -> list[str]:
    """``output_dtype`` casts a root's outputs, also in a list, and gradients flow back through the cast."""

    class Listing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"values": [self.linear(x)], "index": x.argmax(dim=-1)}

    policy = engine.package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=DTYPES[output])
    model = engine.shard(Listing(), mp_policy=policy)
    out = model(rows(0))
    out["values"][0].float().sum().backward()
    grads = [str(param.grad.dtype) for param in model.parameters()]
    return [str(out["values"][0].dtype), str(out["index"].dtype), *grads]


def norms_apart(engine: Engine, low: str) -> list[str]:
    """Norms that compute in float32 between linear modules in half precision."""
    model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 8), nn.BatchNorm1d(8))
    make = engine.package.MixedPrecisionPolicy
    seen: list[str] = []
    for norm in (model[1], model[3]):
        norm.register_forward_hook(
            lambda module, args, out: seen.extend(
                [str(args[0].dtype), str(module.weight.dtype), str(out.dtype)]
            )
        )
        engine.shard(norm, mp_policy=make(param_dtype=torch.float32, output_dtype=DTYPES[low]))
    for linear in (model[0], model[2]):
        engine.shard(linear, mp_policy=make(param_dtype=DTYPES[low], reduce_dtype=torch.float32))
    engine.shard(model, mp_policy=make(param_dtype=DTYPES[low]))
    model(rows(0)).float().sum().backward()
    return [*seen, *(str(param.grad.dtype) for param in model.parameters())]


def structured(engine: Engine) -> list[str]:
    """Tensors in dataclasses and named tuples are cast as others are."""

    @dataclass
    class Inputs:
        x: torch.Tensor
        label: str

    class Pair(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    class Taking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, inputs: Inputs) -> Pair:
            assert inputs.label == "kept"
            return Pair(self.linear(inputs.x), inputs.x)

    policy = engine.package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = engine.shard(Taking(), mp_policy=policy)
    out = model(Inputs(rows(0), "kept"))
    out.x.sum().backward()
    return [type(out).__name__, *(str(tensor.dtype) for tensor in out)]


def reduction_of_another_dtype(engine: Engine) -> list[float]:
    """The default ``reduce_dtype``: the computing dtype; in FSDP2 from torch 2.15 on that of the parameters."""
    make = engine.package.MixedPrecisionPolicy
    source = MLP()
    grads = []
    default = torch.float32 if NEW and not engine.ours else torch.bfloat16
    for policy in (make(torch.bfloat16), make(torch.bfloat16, default), make(torch.bfloat16, torch.bfloat16)):
        model = engine.shard(copy.deepcopy(source), mp_policy=policy)
        squares(model, rows(0)).backward()
        grads.append([whole(param.grad) for param in model.parameters()])
    for grad, other in zip(*grads[:2], strict=True):
        torch.testing.assert_close(grad, other, rtol=0, atol=0)
    return [grad.norm().item() for grad in grads[2]]


def as_given(engine: Engine) -> list[str]:
    """bfloat16 weights without a policy: FSDP2 keeps them, this package does where it is told to."""
    model = MLP().to(torch.bfloat16)
    if engine.ours:
        engine.shard(model, mp_policy=engine.package.MixedPrecisionPolicy(main_dtype=None))
    else:
        engine.shard(model)
    squares(model, rows(0).bfloat16()).backward()
    return [str(tensor.dtype) for param in model.parameters() for tensor in (param, param.grad)]


def forward_derivative(engine: Engine, reshard: bool) -> list[str]:
    """``torch.func.jvp`` with respect to inputs runs a sharded module's forward."""
    model = engine.shard(MLP(), reshard_after_forward=reshard)
    out, tangent = torch.func.jvp(model, (rows(0),), (rows(1),))
    reference = MLP()
    reference.load_state_dict({name: whole(value) for name, value in model.state_dict().items()})
    wanted, wanted_tangent = torch.func.jvp(reference, (rows(0),), (rows(1),))
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(tangent, wanted_tangent)
    return [str(out.dtype)]


PROGRAMS = [
    # FSDP2 from torch 2.15 on reduces in the dtype in which parameters were given.
    Program(trained, ("bf16", "none", True), slow=True, below="2.15.0a0"),
    Program(trained, ("bf16", "fp32", True), slow=True),
    Program(trained, ("none", "bf16", False), slow=True),
    Program(trained, ("bf16", "fp32", False), slow=True),
    Program(trained, ("fp16", "fp32", True), slow=True),
    Program(accumulated, ("bf16", "fp32"), slow=True),
    Program(accumulated, ("none", "bf16")),
    Program(accumulated, ("bf16", "none"), slow=True, below="2.15.0a0"),
    Program(dtypes_in_forward, (True,)),
    Program(dtypes_in_forward, (False,), slow=True),
    Program(outputs, ("fp32",)),
    Program(outputs, ("none",), slow=True),
    Program(norms_apart, ("bf16",)),
    Program(norms_apart, ("fp16",), slow=True),
    Program(structured),
    Program(reduction_of_another_dtype),
    Program(as_given),
    # FSDP2 before torch 2.13 reads the storages that jvp's tensors lack.
    Program(forward_derivative, (True,), slow=True, torch="2.13.0a0"),
    # FSDP2 before torch 2.13 reads the storages that jvp's tensors lack.
    Program(forward_derivative, (False,), torch="2.13.0a0"),
]
