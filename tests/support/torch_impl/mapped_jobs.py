"""Rank functions of the tests of mappings at save and load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.support.torch_impl.checkpoint_jobs import TINY, decoder_run, step
from torch_impl import MainWeightAdamW, fully_shard, load_checkpoint, save_checkpoint, save_checkpoint_async
from torch_impl.dtensor.local import local_of

TRAIN = {"step": 2, "model": {"head_dim": TINY.head_dim}}

QKV = """
name = "fused"
[convention.fused]
[convention.split]
format = "safetensors"
[axes]
d = 4
k = "d"
v = "d"
r = 3
up = "gate"
[[rule]]
fused = "qkv.weight : (g (r interleaved(d) + interleaved(k) + v)) m"
split = ["q.weight : (g r d) m", "k.weight : (g k) m", "v.weight : (g v) m"]
[[rule]]
fused = "qkv.bias : (g (r interleaved(d) + interleaved(k) + v))"
split = ["q.bias : (g r d)", "k.bias : (g k)", "v.bias : (g v)"]
[[rule]]
fused = "experts : {e} (gate + up) m"
split = ["experts.{e}.gate : gate m", "experts.{e}.up : up m"]
[[rule]]
fused = "scale | times(4)"
split = "scale"
[[rule]]
fused = "hollow : a b"
split = "hollow : b a"
"""


class Fused(nn.Module):
    """A projection of two groups (three queries, a key, a value), a stack of experts, and a tensor without rows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.qkv = nn.Linear(7, 2 * (3 + 1 + 1) * 4)
        self.experts = nn.Parameter(torch.empty(3, 10, 7))
        self.scale = nn.Parameter(torch.empty(()))
        self.hollow = nn.Parameter(torch.empty(0, 3))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("bi,eji->bej", x, self.experts).tanh().flatten(1)
        return (self.qkv(x).tanh().sum(-1) + mixed.sum(-1)) * self.scale + self.hollow.sum()


def fused_run(seed: int, strategy: str, **options: Any) -> tuple[nn.Module, MainWeightAdamW]:
    model = fully_shard(Fused(seed), strategy=strategy)
    return model, MainWeightAdamW(model.parameters(), lr=0.01, **options)


def fused_step(model: nn.Module, optimizer: MainWeightAdamW, index: int) -> float:
    """A step on this rank's part of the global batch; the sum of the parts' losses."""
    rows = torch.from_numpy(np.random.default_rng(index).standard_normal((6, 7))).float()
    own = rows[dist.get_rank() :: dist.get_world_size()]
    loss = model(own).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item()


def _dtypes(dtype: str) -> dict[str, torch.dtype]:
    return {key: getattr(torch, dtype) for key in ("exp_avg_dtype", "exp_avg_sq_dtype")}


def save_both(model_name: str, strategy: str, dtype: str, mapping: str, path: str, asynchronous: bool) -> int:
    """Train, and save plainly and under the mapping; the parameters of which this rank has no rows."""
    if model_name == "decoder":
        model, optimizer = decoder_run(strategy, 1, **_dtypes(dtype))
        for index in range(2):
            step(model, optimizer, index)
    else:
        model, optimizer = fused_run(1, strategy, **_dtypes(dtype))
        for index in range(2):
            fused_step(model, optimizer, index)
    save_checkpoint(Path(path) / "plain", model, optimizer, TRAIN)
    if asynchronous:
        pending = save_checkpoint_async(Path(path) / "mapped", model, optimizer, TRAIN, mapping=mapping)
        # The checkpoint is of the state before this step.
        (step if model_name == "decoder" else fused_step)(model, optimizer, 2)
        pending.wait()
    else:
        save_checkpoint(Path(path) / "mapped", model, optimizer, TRAIN, mapping=mapping)
    return sum(not local_of(p).numel() for p in model.parameters() if p.numel())


def _local_bytes(model: nn.Module, optimizer: MainWeightAdamW) -> dict[str, np.ndarray]:
    """This rank's part of weights and optimizer states, as bytes, because gloo has no float8."""
    values = {f"model.{name}": value for name, value in model.named_parameters()}
    for name, parameter in model.named_parameters():
        values |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    flat = {name: local_of(value).detach().contiguous().reshape(-1) for name, value in values.items()}
    return {name: value.view(torch.uint8).numpy().copy() for name, value in flat.items()}


def go_on(
    model_name: str, strategy: str, dtype: str, mapping: str | None, path: str
) -> tuple[dict[str, np.ndarray], Any, list[float]]:
    """Load into another run that made a step; this rank's state, the train values, and losses of two steps."""
    if model_name == "decoder":
        model, optimizer = decoder_run(strategy, 5, **_dtypes(dtype))
        take = step
    else:
        model, optimizer = fused_run(5, strategy, **_dtypes(dtype))
        take = fused_step
    take(model, optimizer, 9)
    train = load_checkpoint(path, model, optimizer, mapping=mapping)
    state = _local_bytes(model, optimizer)
    return state, train, [take(model, optimizer, index) for index in (2, 3)]
