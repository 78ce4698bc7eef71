"""Items 13 and 14: what programs compute with sharded weights, and flags of single programs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from tests.support.torch_impl.comparison import Design, Facts, Program
from tests.support.torch_impl.engines import Engine, backward_as_one, rows, squares, whole
from tests.support.torch_impl.zoo import Headless
from tests.torch_impl.beside_stock.storage import mlp


def shown_weights(engine: Engine) -> Facts:
    """A fused loss by model.head.weight after the forward, in one piece; clip_grad_norm_(...).full_tensor(); then
    operators on a sharded matrix (12, 6), the values of which are those of the whole, or an error.
    """
    facts = Facts()
    model: Any = engine.shard(Headless(nn.Linear(8, 6), nn.Linear(6, 12, bias=False)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        hidden = model(rows(step))
        loss = functional.linear(hidden, model.head.weight).square().sum()
        loss.backward()
        facts(f"fused loss of step {step}", loss)
        facts(f"norm of step {step}", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
        optimizer.step()
        optimizer.zero_grad()
    param = model.head.weight
    with torch.no_grad():
        for name, compute in OPERATORS.items():
            facts(name, lambda compute=compute: [whole(tensor).sum().item() for tensor in compute(param)])
    return facts


OPERATORS: dict[str, Any] = {
    "p[:10]": lambda p: [p[:10]],
    "p.chunk(3)": lambda p: p.chunk(3),
    "p.mean(0)": lambda p: [p.mean(0)],
    "p.sum(1)": lambda p: [p.sum(1)],
    "p.norm()": lambda p: [p.norm()],
    "p.new_zeros(12, 6)": lambda p: [p.new_zeros(12, 6)],
    "p.new_empty(12, 6).fill_(1)": lambda p: [p.new_empty(12, 6).fill_(1)],
    "p * 2 + p": lambda p: [p * 2 + p],
    "p.t()": lambda p: [p.t()],
    "p @ p.T": lambda p: [p @ p.T],
    "p.std()": lambda p: [p.std()],
    "p.tolist()": lambda p: [torch.tensor(p.tolist())],
    "torch.linalg.svdvals(p)": lambda p: [torch.linalg.svdvals(p)],
    "p[1:4] + p[2:5]": lambda p: [p[1:4] + p[2:5]],
    "p[8:11] + p[9:12]": lambda p: [p[8:11] + p[9:12]],
}


def muon(engine: Engine) -> Facts:
    """torch.optim.Muon, here on granularity="tensor", beside one process that has all ranks' data."""
    facts = Facts()
    if not hasattr(torch.optim, "Muon"):
        facts("torch.optim.Muon", "not in this torch")
        return
    model, alone = mlp(), None
    alone = copy.deepcopy(model)
    engine.shard(model, **({"granularity": "tensor"} if engine.ours else {}))
    optimizers = [
        torch.optim.Muon(module.parameters(), lr=0.02, weight_decay=0.1) for module in (model, alone)
    ]
    for step in range(3):
        squares(model, rows(step)).backward()
        backward_as_one(alone, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        weights = [whole(model[0].weight.detach()), alone[0].weight.detach()]
        difference = (weights[0] - weights[1]).abs().max().item()
        # Of the updates, which are as large as the learning rate.
        facts(f"step {step}: distance from one process", f"{difference / 0.02:.1%} of lr")
    cut = engine.shard(mlp())
    squares(cut, rows(0)).backward()
    optimizer = torch.optim.Muon(cut.parameters(), lr=0.02)
    facts("matrices that are cut by rows", lambda: optimizer.step() or "a step")
    return facts


def flags(engine: Engine) -> Facts:
    """Tuple dp_mesh_dims on a mesh of two axes, and set_all_reduce_hook, as torchtitan and torchft use them; then what
    none of the seven programs uses.
    """
    facts = Facts()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "cp"))
    model: Any = mlp()
    for layer in (model[0], model[2]):
        on_mesh = distribute_tensor(layer.weight.detach(), mesh, [Replicate(), Replicate()])
        layer.weight = nn.Parameter(on_mesh)
    dims = engine.package.DataParallelMeshDims(shard=("dp", "cp"))
    engine.shard(model, mesh=mesh, dp_mesh_dims=dims)
    x = DTensor.from_local(rows(0), mesh, [Shard(0), Replicate()], run_check=False)
    loss = model(x).to_local().square().sum()
    loss.backward()
    facts('dp_mesh_dims shard=("dp", "cp"): loss', loss)
    facts('dp_mesh_dims shard=("dp", "cp"): gradient', whole(model[0].weight.grad)[0, 0])
    model = engine.shard(mlp())
    model.set_all_reduce_hook(lambda sums: sums.mul_(3))
    squares(model, rows(0)).backward()
    facts("set_all_reduce_hook that triples: gradient", whole(model[0].weight.grad)[0, 0])
    facts(
        "reshard_after_forward=1",
        lambda: squares(engine.shard(mlp(), reshard_after_forward=1), rows(0)).item(),
    )
    for name, value in UNUSED_SETTERS.items():
        facts(f"{name}({value})", lambda name=name, value=value: getattr(model, name)(value) or "accepted")
    return facts


UNUSED_SETTERS: dict[str, Any] = {
    "set_unshard_in_backward": False,
    "set_reduce_scatter_unused_params": True,
    "set_separate_reduce_scatter_group": True,
    "set_reduce_scatter_max_input_buffers": 3,
}
WAY_OUT = Design(
    "rows are cut where the layout says: one refusal, with the way out",
    r"^RuntimeError: .*use full_tensor\(\)",
)

PROGRAMS = [
    Program(
        shown_weights,
        item=13,
        title="plain weights after a forward, norms, operators on shards",
        by_design=dict.fromkeys(
            (
                "p.t()",
                "p @ p.T",
                "p.tolist()",
                "torch.linalg.svdvals(p)",
                "p[8:11] + p[9:12]",
            ),
            WAY_OUT,
        ),
    ),
    Program(
        muon,
        item=14,
        title="torch.optim.Muon",
        by_design={
            **{
                f"step {step}: distance from one process": Design(
                    "a matrix that lies whole on a rank is orthogonalized there, as on one device",
                    r"^[0-2]\.\d% of lr",
                )
                for step in range(3)
            },
            "matrices that are cut by rows": Design(
                "orthogonalizing would need a gather; FSDP2 makes one in each operator",
                "granularity='tensor', or use MainWeightMuon",
            ),
        },
    ),
    Program(
        flags,
        item=14,
        title="dp_mesh_dims, set_all_reduce_hook, and what none of the seven programs uses",
        torch="2.13.0a0",
        by_design={
            name: Design(
                "refused; none of the seven programs uses it", "^NotImplementedError: .* is not available: "
            )
            for name in (
                "reshard_after_forward=1",
                *(f"{name}({value})" for name, value in UNUSED_SETTERS.items()),
            )
        },
    ),
]
