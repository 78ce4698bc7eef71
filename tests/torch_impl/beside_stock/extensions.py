"""PyTorch's test_fully_shard_extensions.py: parameters that say what is gathered of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.torch_impl.comparison import Program
from tests.support.torch_impl.engines import Engine, rows, squares, whole
from tests.support.torch_impl.extended import Halved, Rounded


def halved(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Rounded(module.weight.detach()))
    return model


def trained(engine: Engine, reshard: bool, replicas: bool) -> list[float]:
    """Weights kept in float32 and gathered in bfloat16: a run of one process that rounds them, and the calls of it."""
    options: dict[str, Any] = {"reshard_after_forward": reshard}
    if replicas:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    # Rows that divide evenly: FSDP2 computes another gradient of uneven ones.
    model: Any = halved(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)))
    reference = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    with torch.no_grad():
        for linear, other in zip((reference[0], reference[2]), (model[0], model[2]), strict=True):
            linear.weight.copy_(other.weight.values)
            linear.bias.copy_(other.bias)
    engine.shard_all(model[0], model[2], model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    world, losses = dist.get_world_size(), []
    Halved.calls.clear()
    for step in range(3):
        # What is computed with is rounded, what is updated is not.
        kept = {name: param.detach().clone() for name, param in reference.named_parameters()}
        with torch.no_grad():
            for linear in (reference[0], reference[2]):
                linear.weight.copy_(linear.weight.bfloat16().float())
        wanted = [squares(reference, rows(step, rank)) for rank in range(world)]
        grads = torch.autograd.grad(sum(wanted) / world, list(reference.parameters()))
        loss = squares(model, rows(step))
        loss.backward()
        torch.testing.assert_close(loss, wanted[dist.get_rank()])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for (name, param), grad in zip(reference.named_parameters(), grads, strict=True):
                param.copy_(kept[name] - 1e-2 * grad)
        for name, param in model.named_parameters():
            weight = whole(param.detach())
            weight = weight.values if isinstance(weight, Halved) else weight
            torch.testing.assert_close(weight, reference.get_parameter(name).detach())
        losses.append(loss.item())
    gathers = 2 * 3 * (2 if reshard else 1)
    assert Halved.calls["pre"] == gathers, Halved.calls
    return losses


def kept_class(engine: Engine) -> list[str]:
    """At rest a rank's rows are of the class, and so is what a module computes with where ``post`` says so."""
    model = engine.shard(halved(nn.Sequential(nn.Linear(8, 12))))
    local = model[0].weight.to_local()
    assert type(local) is Rounded
    squares(model, rows(0)).backward()
    return [type(model[0].weight.grad.full_tensor()).__name__, str(tuple(model[0].weight.shape))]


def patched_methods(engine: Engine) -> int:
    """Methods that a program sets on a plain local tensor are called by FSDP2 only: here a class has them."""
    model = engine.shard(nn.Linear(8, 8, bias=False))
    calls = []
    local = model.weight.to_local()

    def pre(mesh: Any) -> tuple[tuple[torch.Tensor, ...], None]:
        calls.append("pre")
        return (local.detach(),), None

    def post(gathered: Any, _: None, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is not None:
            return None
        return gathered[0].view(8, 8), gathered

    if engine.ours:
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post
        squares(model, rows(0)).backward()
        assert not calls
    else:
        held = model.weight._local_tensor
        held.fsdp_pre_all_gather, held.fsdp_post_all_gather = pre, post
        squares(model, rows(0)).backward()
        assert calls
    return 0


PROGRAMS = [
    Program(trained, (True, False)),
    Program(trained, (False, False)),
    Program(trained, (True, True), world=4, slow=True),
    Program(kept_class),
    Program(patched_methods),
]
