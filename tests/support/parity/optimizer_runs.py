"""What rank processes do for the planner's tests of optimizers: train, and measure the optimizer's state."""

from __future__ import annotations

from typing import Any

import torch

import torch_impl
from tests.support.parity.plan_runs import Spec, Whole
from torch_impl.dtensor.local import local_of

MADE: dict[str, Any] = {
    "adamw": torch_impl.MainWeightAdamW,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda params: torch.optim.SGD(params, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


def state_bytes(
    policy: str,
    parts: list[list[Spec]],
    own: list[Spec],
    name: str,
    dtypes: tuple[str, str],
    offload: float,
) -> dict[str, int]:
    """Bytes of the state after two steps, on the device and in CPU memory, and as ``memory_report`` has it."""
    model = Whole(parts, own)
    torch_impl.ShardingPolicy.parse(policy, "test").apply(model)
    if name == "adamw":
        first, second = (getattr(torch, one) for one in dtypes)
        optimizer = torch_impl.MainWeightAdamW(
            model.parameters(), exp_avg_dtype=first, exp_avg_sq_dtype=second, offload_fraction=offload
        )
        moved = optimizer._offloaded
    else:
        optimizer, moved = MADE[name](model.parameters()), set()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((3,), 0.1)).sum().backward()
        optimizer.step()
    found = {"device": 0, "host": 0, "report": model.memory_report(optimizer).moments}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if key != "step":
                found["host" if param in moved else "device"] += local_of(value).untyped_storage().nbytes()
    return found
