"""Rank functions for the planner's tests of optimizers: train, and measure the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_impl
from tests.bench.torch_memory import live_bytes
from tests.support.parity.plan_runs import Spec, Whole
from torch_impl.dtensor.local import local_of
from torch_impl.models import Decoder, DecoderConfig, next_token_loss


def made(name: str, model: nn.Module, dtypes: tuple[str, str], offload: float) -> torch.optim.Optimizer:
    """An optimizer by its name in a plan. ``dtypes``, ``offload``: of optimizers of main weights."""
    if name == "adamw":
        first, second = (getattr(torch, dtype) for dtype in dtypes)
        return torch_impl.MainWeightAdamW(
            model.parameters(), exp_avg_dtype=first, exp_avg_sq_dtype=second, offload_fraction=offload
        )
    if name == "adafactor":
        return torch.optim.Adafactor(model.parameters())
    first, second = (getattr(torch, dtype) for dtype in dtypes)
    if name == "sgd-momentum":
        return torch_impl.MainWeightSGD(
            model.parameters(), momentum=0.9, momentum_dtype=first, offload_fraction=offload
        )
    if name == "muon":
        return torch_impl.MainWeightMuon(
            model.parameters(),
            momentum_dtype=first,
            exp_avg_dtype=first,
            exp_avg_sq_dtype=second,
            offload_fraction=offload,
        )
    return torch.optim.SGD(model.parameters())


def state_bytes(
    policy: str, parts: list[list[Spec]], own: list[Spec], name: str, dtypes: tuple[str, str], offload: float
) -> dict[str, int]:
    """Bytes of the state after two steps, on the device and in CPU memory, and as ``memory_report`` has it."""
    model = Whole(parts, own)
    torch_impl.ShardingPolicy.parse(policy, "test").apply(model)
    optimizer = made(name, model, dtypes, offload)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((3,), 0.1)).sum().backward()
        optimizer.step()
    report = model.memory_report(optimizer)
    nbytes = {"device": 0, "host": 0, "report": report.moments, "report host": report.on_host.moments}
    offloads = getattr(optimizer, "offloads", lambda _: False)
    moved = {param for param in optimizer.state if offloads(param)}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if key != "step":
                nbytes["host" if param in moved else "device"] += local_of(value).untyped_storage().nbytes()
    return nbytes


def update_bytes(
    policy: str, parts: list[list[Spec]], name: str, dtypes: tuple[str, str], offload: float
) -> int:
    """Most bytes that are live in an update beside what is live before it."""

    def build() -> Callable[[], Any]:
        model = Whole(parts, [])
        torch_impl.ShardingPolicy.parse(policy, "test").apply(model)
        optimizer = made(name, model, dtypes, offload)
        for group in optimizer.param_groups:
            if "ns_steps" in group:
                # Each step takes the same memory, and seconds on processors without instructions for bfloat16.
                group["ns_steps"] = 1
        model(torch.full((3,), 0.1)).sum().backward()
        return optimizer.step

    memory = live_bytes(build, torch.device("cpu"))
    return memory.peak - memory.rest


def peak_bytes(policy: str, name: str, dtype: str, frozen: list[str], batch: int, length: int) -> int:
    """Most bytes that are live in a step of the default decoder. ``frozen``: prefixes of parameters' names."""

    def build() -> Callable[[], Any]:
        torch.manual_seed(0)
        model = Decoder(DecoderConfig())
        for path, param in model.named_parameters():
            param.requires_grad_(not path.startswith(tuple(frozen)))
        torch_impl.ShardingPolicy.parse(policy, "test").apply(model)
        optimizer = made(name, model, (dtype, dtype), 0.0)
        tokens = torch.zeros(batch, length, dtype=torch.int64)

        def step() -> None:
            next_token_loss(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return live_bytes(build, torch.device("cpu")).peak
