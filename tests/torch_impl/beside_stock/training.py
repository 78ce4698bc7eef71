"""PyTorch's test_fully_shard_training.py: losses, gradients and weights of one process, by both engines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import (
    Engine,
    backward_as_one,
    gradients_are,
    rows,
    squares,
    train_as_one,
    weights_are,
)
from tests.support.torch_impl.zoo import MLP, Stack, Tied, TwoParts


def of_blocks(engine: Engine, model: Any, **options: Any) -> Any:
    return engine.shard_all(*model.blocks, model, **options)


def one_group(engine: Engine, hidden: int) -> list[float]:
    return train_as_one(MLP(8, hidden), engine.shard)


def one_linear(engine: Engine) -> list[float]:
    """A bias smaller than the number of ranks leaves a rank without rows."""
    return train_as_one(nn.Sequential(nn.Linear(8, 1), nn.ReLU(), nn.Linear(1, 1)), engine.shard)


def largest_dimension(engine: Engine) -> list[float]:
    def placement_of(param: nn.Parameter) -> Shard:
        return Shard(max(range(param.ndim), key=lambda dim: param.shape[dim]))

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return train_as_one(model, lambda module: engine.shard(module, shard_placement_fn=placement_of))


def several_groups(engine: Engine, reshard: bool | None, offload: bool) -> list[float]:
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    return train_as_one(Stack(), lambda model: of_blocks(engine, model, **options))


def nested_units(engine: Engine) -> list[float]:
    """Units nested in units, of which the outer ones have parameters of their own."""
    inner = nn.ModuleList([Stack(1), Stack(2)])

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.ones(5))
            self.last = nn.Linear(5, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for stack in self.inner:
                x = self.last(stack(x) * self.scale)
            return x

    def shard(model: Any) -> Any:
        for stack in model.inner:
            of_blocks(engine, stack)
        return engine.shard(model)

    return train_as_one(Nested(), shard)


def tied(engine: Engine, checkpointed: bool) -> list[float]:
    model = Tied()
    if checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, MLP))

    def shard(module: Any) -> Any:
        of_blocks(engine, module)
        assert module.head.weight is module.embedding.weight

    return train_as_one(model, shard, shape=(2, 11))


def recomputed(engine: Engine, checkpointing: str, reshard: bool) -> list[float]:
    """The wrapper that replaces modules, the one that hooks them, and calls of the function."""

    class Around(nn.Module):
        def __init__(self, stack: Stack) -> None:
            super().__init__()
            self.scale, self.blocks, self.head = stack.scale, stack.blocks, stack.head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=checkpointing == "reentrant")
            return self.head(x)

    model: Any = Stack()
    if checkpointing == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, MLP))
    elif checkpointing == "module":
        for block in model.blocks:
            composable_checkpoint(block)
    else:
        model = Around(model)
    return train_as_one(model, lambda module: of_blocks(engine, module, reshard_after_forward=reshard))


def non_root_first(engine: Engine) -> list[float]:
    """A backward through a unit alone, then one through the root: gradients of both add up."""
    model = Stack()
    reference = copy.deepcopy(model)
    of_blocks(engine, model)
    backward_as_one(reference)
    backward_as_one(reference.blocks[0], 1)
    squares(model, rows(0)).backward()
    squares(model.blocks[0], rows(1)).backward()
    gradients_are(model, reference)
    return []


def several_forwards(engine: Engine) -> list[float]:
    """A unit runs twice in one forward of the root."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = MLP(), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x) + self.inner(x * 2))

    return train_as_one(Twice(), lambda module: engine.shard_all(module.inner, module))


def partial_forward_twice(engine: Engine) -> dict[str, bool]:
    """Two forwards of a part, one backward: the other part has no gradient."""
    model = TwoParts()
    reference = copy.deepcopy(model)
    engine.shard(model)
    engine.package.register_fsdp_forward_method(model, "encode")
    world = dist.get_world_size()
    for step in range(2):
        for rank in range(world):
            first, second = reference.encode(rows(step, rank)), reference.encode(rows(step + 7, rank))
            ((first.square().sum() + second.sum()) / world).backward()
        first, second = model.encode(rows(step)), model.encode(rows(step + 7))
        (first.square().sum() + second.sum()).backward()
        gradients_are(model, reference)
        model.zero_grad()
        reference.zero_grad()
    squares(model, rows(3)).backward()
    return {name: param.grad is None for name, param in model.named_parameters()}


def explicit_prefetch(engine: Engine) -> list[float]:
    model = Stack(4)

    def shard(module: Any) -> Any:
        of_blocks(engine, module)
        blocks = list(module.blocks)
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
            block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])

    return train_as_one(model, shard)


def microbatches(
    engine: Engine, mode: str, reshard_after_backward: bool, offload: bool, hsdp: bool
) -> list[float]:
    """Sums over microbatches, of all modules or some, whose gradients travel in the last one only."""
    options: dict[str, Any] = {}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if hsdp:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Stack()
    reference = copy.deepcopy(model)
    of_blocks(engine, model, **options)
    updates = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in (model, reference)]
    losses, count = [], 3
    for step in range(2):
        for part in range(count):
            last = part == count - 1
            chosen = model.blocks[0] if mode == "some" else model
            if mode == "all_reduce":
                model.set_requires_all_reduce(last)
            else:
                chosen.set_requires_gradient_sync(last, recurse=True)
            model.set_is_last_backward(last)
            model.set_reshard_after_backward(last or reshard_after_backward)
            loss = squares(model, rows(10 * step + part)) / count
            loss.backward()
            losses.append(loss.item())
            backward_as_one(reference, 10 * step + part, loss=lambda module, x: squares(module, x) / count)
        gradients_are(model, reference)
        for update in updates:
            update.step()
            update.zero_grad()
        weights_are(model, reference)
    return losses


def one_forward_one_backward(engine: Engine) -> list[float]:
    """The order of a pipeline: the second microbatch's forward runs before the first one's backward."""
    model = Stack(2)
    reference = copy.deepcopy(model)
    of_blocks(engine, model, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    count = 4
    losses = [squares(model, rows(0))]
    for part in range(1, count):
        losses.append(squares(model, rows(part)))
        losses[part - 1].backward()
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    losses[-1].backward()
    for part in range(count):
        backward_as_one(reference, part)
    gradients_are(model, reference)
    return [loss.item() for loss in losses]


def unused(engine: Engine) -> list[bool]:
    """Parameters that no rank used have no gradient, and AdamW leaves them alone."""
    model = TwoParts()
    reference = copy.deepcopy(model)

    class Skipping(nn.Module):
        def __init__(self, parts: TwoParts) -> None:
            super().__init__()
            self.first, self.second = parts.first, parts.second

        def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
            x = self.first(x)
            return x if skip else self.second(x)

    sharded, whole_model = Skipping(model), Skipping(reference)
    engine.shard(sharded)
    updates = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (sharded, whole_model)]
    nones = []
    for step in range(3):
        skip = step > 0
        sharded(rows(step), skip).square().sum().backward()
        backward_as_one(whole_model, step, loss=lambda module, x, skip=skip: module(x, skip).square().sum())
        gradients_are(sharded, whole_model)
        nones += [param.grad is None for param in sharded.parameters()]
        for update in updates:
            update.step()
            update.zero_grad()
        weights_are(sharded, whole_model)
    return nones


def registered(engine: Engine, reshard: bool | None, moment: str) -> dict[str, list[bool]]:
    """Which attributes are DTensors after a forward, and after a backward: root's and blocks' apart.

    ``parameters()`` of ours are sharded in between, too: clipping and averages see what the optimizer updates.
    """
    model = Stack(2)
    of_blocks(engine, model, reshard_after_forward=reshard)

    def sharded(module: nn.Module) -> list[bool]:
        if engine.ours:
            assert all(isinstance(param, DTensor) for param in module.parameters())
        names = [name.rpartition(".") for name, _ in module.named_parameters()]
        return [isinstance(getattr(module.get_submodule(path), name), DTensor) for path, _, name in names]

    out = model(rows(0))
    if moment == "backward":
        out.sum().backward()
    are_dtensors = {"head": sharded(model.head), "blocks": sharded(model.blocks)}
    if moment == "forward":
        model.reshard()
        for block in model.blocks:
            block.reshard()
        assert all(sharded(model))
        out.sum().backward()
    return are_dtensors


def partial_group(engine: Engine) -> list[float]:
    """A unit's weights stay whole through the calls of a loss in parts (torchtitan's chunked loss)."""
    model = nn.ModuleDict({"body": MLP(), "head": nn.Linear(8, 5, bias=False)})
    reference = copy.deepcopy(model)
    engine.shard_all(model["body"], model["head"])
    head: Any = model["head"]
    world, losses = dist.get_world_size(), []
    hidden = model["body"](rows(0, None, 4, 8))
    parts = [part.detach().requires_grad_() for part in hidden.detach().chunk(2)]
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False)
    for index, part in enumerate(parts):
        if index == len(parts) - 1:
            head.set_requires_gradient_sync(True)
            head.set_reshard_after_backward(True)
        loss = head(part).square().sum()
        loss.backward()
        losses.append(loss.item())
    hidden.backward(torch.cat([part.grad for part in parts if part.grad is not None]))
    for rank in range(world):
        out = reference["head"](reference["body"](rows(0, rank, 4, 8)))
        (out.square().sum() / world).backward()
    gradients_are(model, reference)
    return losses


def moved_inputs(engine: Engine) -> list[str]:
    """Tensors in nested arguments of the root arrive on the mesh's device."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(
            self, inputs: dict[str, list[torch.Tensor]], *, other: tuple[torch.Tensor, str]
        ) -> torch.Tensor:
            return self.linear(inputs["x"][0] + other[0])

    model = engine.shard(Nested())
    out = model({"x": [rows(0)]}, other=(rows(1), "kept"))
    return [out.device.type, str(tuple(out.shape))]


def to_float64(engine: Engine) -> list[str]:
    """FSDP2 converts a sharded module that has not run; here it is converted first."""
    model = Stack(1)
    of_blocks(engine, model)
    with engine.refused(TypeError, "convert the module before fully_shard"):
        model.to(torch.float64)
    before = of_blocks(engine, Stack(1).to(torch.float64))
    before(rows(0).double()).sum().backward()
    return [str(param.grad.dtype) for param in before.parameters()]


def own_forward_methods(engine: Engine) -> list[float]:
    """A root's other methods gather and free as forward does."""
    model = TwoParts()
    reference = copy.deepcopy(model)
    engine.shard_all(model.first, model)
    for name in ("encode", "decode"):
        engine.package.register_fsdp_forward_method(model, name)
    engine.package.register_fsdp_forward_method(nn.Linear(2, 2), "forward")
    with pytest.raises(ValueError, match="missing"):
        engine.package.register_fsdp_forward_method(model, "missing")
    out = model.decode(model.encode(rows(0))).square().sum()
    out.backward()
    backward_as_one(reference)
    gradients_are(model, reference)
    return [out.item()]


def shared_streams(engine: Engine) -> list[float]:
    """Roots of a pipeline that share their streams train as one model does."""
    stages = nn.Sequential(MLP(), MLP(8, 6))

    def shard(model: Any) -> None:
        for stage in model:
            engine.shard_all(stage.inner, stage)
        engine.package.share_comm_ctx(list(model))

    with pytest.raises(ValueError, match="Linear"):
        engine.package.share_comm_ctx([nn.Linear(2, 2)])
    return train_as_one(stages, shard)


def two_axes(engine: Engine, reshard: bool) -> list[float]:
    """HSDP on two by two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train_as_one(
        Stack(2), lambda module: of_blocks(engine, module, mesh=mesh, reshard_after_forward=reshard)
    )


def one_rank(engine: Engine) -> list[float]:
    return train_as_one(Stack(2), lambda module: of_blocks(engine, module))


def tensor_parallel(engine: Engine) -> list[float]:
    """Modules that torch's parallelize_module has cut, sharded over the other axis."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(MLP(8, 12), MLP(8, 16))
    reference = copy.deepcopy(model)
    for block in model:
        parallelize_module(block, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
        engine.shard(block, mesh=mesh["dp"])
    engine.shard(model, mesh=mesh["dp"])
    loss = squares(model, rows(0, mesh["dp"].get_local_rank()))
    loss.backward()
    for rank in range(2):
        (squares(reference, rows(0, rank)) / 2).backward()
    gradients_are(model, reference)
    return [loss.item()]


PROGRAMS = [
    Program(one_group, (13,)),
    Program(one_group, (2,), slow=True),
    Program(one_linear, slow=True),
    Program(largest_dimension, slow=True),
    Program(several_groups, (True, False), slow=True),
    Program(several_groups, (False, False), slow=True),
    Program(several_groups, (None, False), slow=True),
    Program(several_groups, (True, True), slow=True),
    Program(several_groups, (False, True), slow=True),
    Program(nested_units, slow=True),
    Program(tied, (False,), slow=True),
    Program(tied, (True,)),
    Program(recomputed, ("wrapper", True)),
    Program(recomputed, ("wrapper", False), slow=True),
    Program(recomputed, ("module", True), slow=True),
    Program(recomputed, ("module", False), slow=True),
    Program(recomputed, ("non-reentrant", True), slow=True),
    Program(recomputed, ("reentrant", True), slow=True),
    Program(recomputed, ("reentrant", False), slow=True),
    Program(non_root_first, slow=True),
    Program(several_forwards),
    Program(partial_forward_twice, slow=True),
    Program(explicit_prefetch),
    Program(microbatches, ("all", True, False, False)),
    Program(microbatches, ("some", False, False, False), slow=True),
    Program(microbatches, ("all", True, True, False), slow=True),
    Program(microbatches, ("all_reduce", True, False, True), world=4, slow=True),
    Program(microbatches, ("all", False, False, True), world=4, slow=True),
    Program(one_forward_one_backward, slow=True),
    Program(unused, item=4, title="an unused parameter of a used unit"),
    Program(registered, (True, "forward"), slow=True),
    Program(registered, (False, "forward"), slow=True),
    Program(registered, (None, "forward"), slow=True),
    Program(registered, (True, "backward"), slow=True),
    Program(registered, (None, "backward"), slow=True),
    Program(partial_group, slow=True),
    Program(moved_inputs, slow=True),
    Program(to_float64, slow=True),
    Program(own_forward_methods, slow=True),
    Program(shared_streams),
    Program(two_axes, (True,), world=4, slow=True),
    Program(two_axes, (False,), world=4, slow=True),
    Program(one_rank, world=1, slow=True),
    Program(tensor_parallel, world=4, slow=True),
]
