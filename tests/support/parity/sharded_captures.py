"""Rank functions that capture sharded models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_impl
from bridge.parity import capture_torch
from bridge.parity.recorded.trace import TraceError
from bridge.parity.torch.side import TorchSide

WIDTH, HIDDEN = 6, 8
ROWS = np.random.default_rng(5).standard_normal((6, WIDTH)).astype(np.float32)


class Net(nn.Module):
    """``small_twins.TorchMLP``, with a buffer that each forward changes; made without JAX."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, eps=eps)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.calls: torch.Tensor
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


def fsdp2(model: nn.Module, dtype: str = "float32") -> None:
    low = getattr(torch, dtype)
    policy = MixedPrecisionPolicy(param_dtype=low if dtype == "bfloat16" else None)
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=_mesh(), mp_policy=policy)  # type: ignore[arg-type]


def ours(model: nn.Module, dtype: str = "float32") -> None:
    low = getattr(torch, dtype)
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=low if dtype == "bfloat16" else None)
    for module in (model.up, model.down, model):
        torch_impl.fully_shard(module, mesh=_mesh(), strategy="optim_grads_params", mp_policy=policy)  # type: ignore[type-var]


def tensor_parallel(model: nn.Module, dtype: str = "float32") -> None:
    _parallel(model, Replicate())


def without_reduction(model: nn.Module, dtype: str = "float32") -> None:
    """The second matrix's products stay sums of a part."""
    _parallel(model, Partial())


def unreduced_gradients(model: nn.Module, dtype: str = "float32") -> None:
    """The norm's gradients stay those of a rank's own rows."""
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=_mesh(), ignored_params=set(model.norm.parameters()))  # type: ignore[arg-type, union-attr]


def local_shards(model: nn.Module, dtype: str = "float32") -> None:
    """Each rank has its own features between the two matrices."""
    parallelize_module(model, _mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sharded_tensors(model: nn.Module, dtype: str = "float32") -> None:
    """As ``local_shards``, with DTensors between the two."""
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(model, _mesh(), plan)


def two_axes(model: nn.Module, dtype: str = "float32") -> None:
    """Tensor parallel within pairs of ranks, FSDP2 over them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh["dp"])  # type: ignore[arg-type]


def _parallel(model: nn.Module, output: Placement) -> None:
    plan = {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate(), output_layouts=output),
    }
    parallelize_module(model, _mesh(), plan)


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


WAYS: dict[str, Callable[[nn.Module, str], None]] = {
    function.__name__: function
    for function in (
        *(fsdp2, ours, two_axes, tensor_parallel, local_shards, sharded_tensors),
        *(without_reduction, unreduced_gradients),
    )
}


_WITHOUT_NORM = ("local_shards", "sharded_tensors")


def model_of(way: str, eps: float = 1e-5) -> Net:
    """The model that is sharded in this way: a norm needs all features."""
    model = Net(eps)
    if way in _WITHOUT_NORM:
        model.norm = nn.Identity()  # type: ignore[assignment]
    return model


def capture(way: str, path: str, options: dict[str, Any] | None = None) -> tuple[int, bool]:
    """Capture; how often the model's buffer counts a call, and whether its weights are as before."""
    options = dict(options or {})
    eps = options.pop("eps", 1e-5)
    model = model_of(way, eps)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    WAYS[way](model, options.get("dtype", "float32"))
    if options.pop("reference", False):
        options["reference"] = model_of(way, eps).double()
        WAYS[way](options["reference"], "float64")
    if options.get("loss") == "square":
        options["loss"] = square_loss
    capture_torch(model, rows_of(way), path, **options)
    after = {
        name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)()
        for name, tensor in model.state_dict().items()
    }
    return int(model.calls), all(torch.equal(before[name], tensor) for name, tensor in after.items())


def rows_of(way: str) -> np.ndarray:
    if way in ("tensor_parallel", "without_reduction", *_WITHOUT_NORM):
        return ROWS
    world, rank = dist.get_world_size(), dist.get_rank()
    if way == "two_axes":
        world, rank = world // 2, rank // 2
    number = len(ROWS) // world
    return ROWS[rank * number :][:number]


def refused(what: str, path: str) -> str:
    """The error that this rank raised, or nothing."""
    model = Net()
    fsdp2(model)
    rank = dist.get_rank()
    rows = ROWS[3 * rank : 3 * rank + 3]
    options: dict[str, Any] = {"loss": square_loss, "steps": 0}
    if what == "rows" and rank == 1:
        rows = rows[:2]
    if what == "replicas":
        rows = ROWS[:3] if rank < 2 else ROWS[3:]
    if what == "plain reference":
        options["reference"] = Net().double()
    if what == "float32 reference":
        options["reference"] = Net()
        fsdp2(options["reference"])
    if what == "gradients":
        square_loss(model, torch.from_numpy(rows)).backward()
    if what == "loss":
        options["loss"] = "cross"
    if what == "dtype":
        options["dtype"] = "float64"
    if what in ("samples", "unused samples", "five rows"):
        rows = np.concatenate([rows, rows + 1, rows + 2])[:5]
        options["samples"] = {"samples": {6: 6}, "unused samples": {5: 2}, "five rows": {10: 2}}[what]
    try:
        capture_torch(model, rows, path, **options)
    except (ValueError, TraceError) as error:
        return str(error)
    return ""


def failing(where: str, path: str) -> None:
    """Rank 1 fails in the run."""
    model = Net()
    model.down.register_forward_pre_hook(_fail_on_last_rank) if where == "forward" else None
    fsdp2(model)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        squared = square_loss(model, batch)
        if where == "loss" and dist.get_rank() == 1:
            raise RuntimeError("no loss")
        return squared

    if where == "other calls":
        model = Net()
        parallelize_module(model, _mesh(), {"down": ColwiseParallel(output_layouts=Replicate())})
        if dist.get_rank() == 1:
            model.forward = lambda x: model.down(nn.functional.gelu(model.norm(x @ model.up.weight.T)))  # type: ignore[method-assign]
    capture_torch(model, rows_of("fsdp2"), path, loss=loss, steps=0)


def _fail_on_last_rank(module: nn.Module, args: Any) -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("out of memory")


def compared_directly() -> str:
    """What a side of a sharded model says."""
    model = Net()
    fsdp2(model)
    try:
        TorchSide(model).record(ROWS)
    except ValueError as error:
        return str(error)
    return ""
