"""PyTorch's test_fully_shard_ignore_params.py: parameters that stay plain, beside DistributedDataParallel or alone."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import (
    Engine,
    backward_as_one,
    gradients_are,
    rows,
    squares,
    weights_are,
)
from tests.support.torch_impl.zoo import MLP


def replicated_around(engine: Engine) -> list[float]:
    """The middle one of three modules is sharded, DistributedDataParallel keeps the others equal."""
    model = nn.Sequential(MLP(), MLP(8, 6), MLP(8, 5))
    reference = copy.deepcopy(model)
    ignored = {*model[0].parameters(), *model[2].parameters()}
    engine.shard(model[1])
    names = [name for name, _ in model.named_parameters() if name.startswith("1.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    replicated = DistributedDataParallel(model)
    assert all(not isinstance(param, DTensor) for param in ignored)
    updates = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (model, reference)]
    losses = []
    for step in range(3):
        loss = squares(replicated, rows(step))
        loss.backward()
        backward_as_one(reference, step)
        gradients_are(model, reference)
        for update in updates:
            update.step()
            update.zero_grad()
        weights_are(model, reference)
        losses.append(loss.item())
    return losses


def alone(engine: Engine) -> list[bool]:
    """Ignored parameters keep their object and their local gradient, of a root as of a unit below."""
    model = nn.Sequential(MLP(), MLP(8, 6))
    reference = copy.deepcopy(model)
    ignored = {model[0].inner.weight, model[1].outer.bias}
    engine.shard(model[0], ignored_params=ignored)
    engine.shard(model, ignored_params=ignored)
    own = {id(param) for param in ignored}
    assert own <= {id(param) for param in model.parameters()}
    squares(model, rows(0)).backward()
    world = dist.get_world_size()
    for param in ignored:
        # What each rank has until the program reduces it.
        dist.all_reduce(param.grad)
        assert param.grad is not None
        param.grad /= world
    backward_as_one(reference)
    gradients_are(model, reference)
    return [isinstance(param, DTensor) for param in model.parameters()]


def whole_modules(engine: Engine) -> list[str]:
    """A unit all of whose parameters are ignored runs as it is; its buffers and dtypes stay."""
    model = nn.Sequential(nn.BatchNorm1d(8), MLP())
    engine.shard(model[0], ignored_params=set(model[0].parameters()))
    engine.shard(
        model,
        ignored_params=set(model[0].parameters()),
        mp_policy=engine.package.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
    )
    out = model[0](rows(0))
    assert all(not isinstance(value, DTensor) for value in model[0].state_dict().values())
    return [str(out.dtype), *(str(value.dtype) for value in model.state_dict().values())]


PROGRAMS = [
    Program(replicated_around),
    Program(alone),
    Program(whole_modules),
]
