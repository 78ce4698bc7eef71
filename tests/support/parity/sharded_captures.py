"""Captures of sharded models, for rank processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_impl
from bridge.parity import capture_torch

WIDTH, HIDDEN = 6, 8
ROWS = np.random.default_rng(5).standard_normal((6, WIDTH)).astype(np.float32)


class Net(nn.Module):
    """``small_twins.TorchMLP``, with a buffer that each forward changes; made without JAX."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, eps=eps)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.down(torch.nn.functional.gelu(self.norm(self.up(x))))


def square_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) ** 2).mean()


def fsdp2(model: nn.Module) -> None:
    for module in (model.up, model.down):
        fully_shard(module, mesh=_mesh())  # type: ignore[arg-type]
    fully_shard(model, mesh=_mesh())


def ours(model: nn.Module) -> None:
    for module in (model.up, model.down):
        torch_impl.fully_shard(module, mesh=_mesh(), strategy="optim_grads_params")  # type: ignore[type-var]
    torch_impl.fully_shard(model, mesh=_mesh(), strategy="optim_grads_params")


def tensor_parallel(model: nn.Module) -> None:
    _parallel(model, Replicate())


def without_reduction(model: nn.Module) -> None:
    """The second matrix's products stay sums of a part."""
    _parallel(model, Partial())


def unreduced_gradients(model: nn.Module) -> None:
    """Sums over a rank's own rows go on as if they were of all rows."""
    fsdp2(model)
    model.set_gradient_divide_factor(1.0)  # type: ignore[operator]


def _parallel(model: nn.Module, output: Placement) -> None:
    plan = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate(), output_layouts=output),
    }
    parallelize_module(model, _mesh(), plan)


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


WAYS: dict[str, Callable[[nn.Module], None]] = {
    one.__name__: one for one in (fsdp2, ours, tensor_parallel, without_reduction, unreduced_gradients)
}


def capture(way: str, path: str, options: dict[str, Any] | None = None) -> tuple[int, bool]:
    """Capture; how often the model's buffer counts a call, and whether its weights are as before."""
    options = dict(options or {})
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    WAYS[way](model)
    if options.pop("reference", False):
        options["reference"] = Net().double()
        WAYS[way](options["reference"])
    if options.get("loss") == "square":
        options["loss"] = square_loss
    capture_torch(model, rows_of(way), path, **options)
    after = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in model.state_dict().items()}
    return int(model.calls), all(torch.equal(before[name], one) for name, one in after.items())


def rows_of(way: str) -> np.ndarray:
    if way in ("tensor_parallel", "without_reduction"):
        return ROWS
    number = len(ROWS) // dist.get_world_size()
    return ROWS[dist.get_rank() * number :][:number]
