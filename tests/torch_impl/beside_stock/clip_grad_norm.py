"""PyTorch's test_fully_shard_clip_grad_norm_.py: norms and clipped gradients of one process."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import (
    Engine,
    backward_as_one,
    gradients_are,
    rows,
    squares,
    weights_are,
    whole,
)
from tests.support.torch_impl.zoo import Stack, Tied


def clipped(
    engine: Engine, norm_type: float, foreach: bool | None, replicas: bool, tied: bool
) -> list[float]:
    """Gradients that differ in size by unit, clipped before each of three steps."""
    options: dict[str, Any] = {}
    if replicas:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = Tied() if tied else Stack()
    shape = (2, 11) if tied else (3, 8)
    reference = copy.deepcopy(model)
    engine.shard_all(*model.blocks, model, **options)
    updates = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (model, reference)]
    norms = []
    for step in range(3):
        squares(model, rows(step, None, *shape)).backward()
        backward_as_one(reference, step, shape=shape)
        # Small enough that it clips, in every norm.
        limit = 1e-2
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), limit, norm_type, foreach=foreach)
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type, foreach=foreach)
        total = norm.full_tensor()
        assert wanted > limit
        torch.testing.assert_close(total, wanted)
        gradients_are(model, reference)
        # Clipped gradients are no longer than they may be.
        again = nn.utils.get_total_norm(
            [param.grad for param in model.parameters() if param.grad is not None], norm_type, foreach=foreach
        )
        assert whole(again).item() <= limit * (1 + 1e-5)
        norms.append(total.item())
        for update in updates:
            update.step()
            update.zero_grad()
        weights_are(model, reference)
    return norms


def not_finite(engine: Engine) -> list[float]:
    """A NaN on one rank is everywhere in the norm, and ``error_if_nonfinite`` raises on all ranks."""
    model = engine.shard(Stack(1))
    data = rows(0)
    if dist.get_rank() == 1:
        data[0, 0] = math.inf
    squares(model, data).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    return [float(total.isfinite().item())]


PROGRAMS = [
    Program(clipped, (2.0, None, False, False), slow=True),
    Program(clipped, (1.0, False, False, False), slow=True),
    Program(clipped, (math.inf, True, False, False), slow=True),
    Program(clipped, (2.0, True, False, True)),
    Program(clipped, (2.0, None, True, False), world=4, slow=True),
    Program(clipped, (1.0, True, True, False), world=4, slow=True),
    Program(clipped, (math.inf, False, False, True), slow=True),
    Program(not_finite),
]
