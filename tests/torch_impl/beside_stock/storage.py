"""Items 7, 11 and 12: what programs train with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_impl
from tests.support.torch_impl.comparison import Design, Facts, Program
from tests.support.torch_impl.engines import Engine, rows, shared_folder, squares, trained, whole
from tests.support.torch_impl.zoo import Experts

ROOT = Path(__file__).parents[3]
HALF = torch.bfloat16


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False))


def steps(model: Any, optimizer: torch.optim.Optimizer, count: int = 3) -> list[float]:
    """Losses of this rank's data."""
    losses = []
    for step in range(count):
        loss = squares(model, rows(step)).float()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def offloaded(engine: Engine) -> Facts:
    """CPUOffloadPolicy on a CPU mesh: three steps with clipping, by AdamW, and here by MainWeightAdamW with half of its
    state offloaded besides; a reference model's forward in bfloat16.
    """
    facts = Facts()
    policy = engine.package.CPUOffloadPolicy(pin_memory=False)
    for label in ("AdamW", "offload_fraction=0.5"):
        torch.manual_seed(1)
        model = mlp()
        engine.shard_all(model[0], model[2], model, offload_policy=policy)
        if engine.ours and label != "AdamW":
            optimizer: Any = torch_impl.MainWeightAdamW(model.parameters(), lr=0.01, offload_fraction=0.5)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        facts(f"{label}: losses", steps(model, optimizer))
    squares(model, rows(3)).backward()
    devices = {
        tensor.to_local().device.type
        for param in model.parameters()
        for tensor in (param.detach(), param.grad)
    }
    facts("weights and gradients lie on", sorted(devices))
    low = engine.package.MixedPrecisionPolicy(param_dtype=HALF)
    with torch.no_grad():
        facts(
            "reference model",
            engine.shard(mlp(), offload_policy=policy, mp_policy=low)(rows(0)).float().sum(),
        )
    return facts


def pinned(engine: Engine) -> Facts:
    """CPUOffloadPolicy() pins memory where there is a GPU; here there is none."""
    facts = Facts()

    def run() -> list[float]:
        model = engine.shard(mlp(), offload_policy=engine.package.CPUOffloadPolicy())
        return steps(model, torch.optim.SGD(model.parameters(), lr=0.1))

    facts("losses", run)
    return facts


_JAX = """
import jax, jax_impl, sys
from flax import nnx
jax_impl.simulate_devices(2)
model = nnx.Linear(8, 8, param_dtype=jax.numpy.bfloat16, rngs=nnx.Rngs(0))
plan, weights = jax_impl.fully_shard(model, jax_impl.data_parallel_mesh(2), sys.argv[1])
print(*sorted({str(one.dtype) for one in jax.tree.leaves(weights)}))
"""
_POLICY = """
[mesh]
dp = "all"
[precision]
main = "given"
[[unit]]
match = ""
strategy = "optim_grads_params"
"""


def half_precision(engine: Engine) -> Facts:
    """A frozen bfloat16 base with float32 adapters; a bfloat16 model, as it is and with main_dtype. Noted: the dtype at
    rest and the losses.
    """
    facts = Facts()
    base = nn.Sequential(
        nn.Linear(8, 8, bias=False, dtype=HALF).requires_grad_(False), nn.Linear(8, 4, bias=False)
    )
    policy = engine.package.MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)
    engine.shard_all(base[0], base[1], base, mp_policy=policy)
    optimizer = torch.optim.AdamW(base[1].parameters(), lr=0.01)
    facts("LoRA: losses", steps(base, optimizer))
    facts("LoRA: dtypes of base and adapters", [base[0].weight.dtype, base[1].weight.dtype])
    facts("LoRA: bytes of the base on this rank", base[0].weight.to_local().nbytes)

    def of_dtype(**main: Any) -> str:
        torch.manual_seed(2)
        policy = engine.package.MixedPrecisionPolicy(reduce_dtype=torch.float32, **main)
        model = engine.shard(mlp().to(HALF), mp_policy=policy)
        losses = []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        for step in range(3):
            loss = squares(model, rows(step).to(HALF)).float()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(f"{loss.item():.6g}")
        return f"{str(model[0].weight.dtype).removeprefix('torch.')}: {', '.join(losses)}"

    facts("a bfloat16 model without a word", lambda: of_dtype())
    as_given = {"main_dtype": None} if engine.ours else {}
    facts("as given (here main_dtype=None)", lambda: of_dtype(**as_given))
    for dtype in (HALF, torch.float32, torch.float64):
        facts(f"main_dtype={dtype}", lambda dtype=dtype: of_dtype(main_dtype=dtype))
    return facts


def policy_file(engine: Engine) -> Facts:
    """main = "given" in a policy file, of a bfloat16 model: the dtype of main weights, here and in JAX."""
    facts = Facts()
    with shared_folder() as folder:
        path = folder / "policy.toml"
        if dist.get_rank() == 0:
            path.write_text(_POLICY)
        dist.barrier()

        def of_file() -> str:
            model = engine.package.ShardingPolicy.load(path).apply(mlp().to(HALF))
            return str(model[0].weight.dtype).removeprefix("torch.")

        def in_jax() -> str:
            # FSDP2 has neither.
            engine.package.ShardingPolicy.load(path)
            said = [""]
            if dist.get_rank() == 0:
                environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
                command = [sys.executable, "-c", _JAX, str(path)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                said = [done.stdout.strip() or done.stderr[-300:]]
            dist.broadcast_object_list(said)
            return said[0]

        facts("in PyTorch", of_file)
        facts("in JAX", in_jax)
    return facts


def placed(engine: Engine) -> Facts:
    """shard_placement_fn: Shard(1) of matrices."""
    model = engine.shard(mlp(), shard_placement_fn=lambda param: Shard(1))
    facts = Facts()
    facts("Shard(1): shape of a rank's part of (6, 8)", list(model[0].weight.to_local().shape))
    return facts


def experts(engine: Engine) -> Facts:
    """ShardPlacementResult, as torchtitan's MoE: experts are cut over "ep" and sharded over "efsdp", two ranks each;
    all else is sharded over the four ranks.
    """
    facts = Facts()
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model: Any = Experts(8, 8, 6)
    part = model.experts.detach().chunk(2)[root.get_local_rank("ep")].clone()
    model.experts = nn.Parameter(DTensor.from_local(part, root["ep"], [Shard(0)], run_check=False))

    def placement_of(param: nn.Parameter) -> Any:
        if param is not model.experts:
            return None
        return common.ShardPlacementResult(Shard(1), common.FSDPMeshInfo(root["efsdp"], shard_mesh_dim=0))

    engine.shard(model, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=placement_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    facts("losses", trained(model, optimizer, 0, 1, 2))
    squares(model, rows(3)).backward()
    facts("a norm over both meshes", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    facts("weights", [whole(model.experts)[k, 0, 0].item() for k in range(4)])
    return facts


NO_STOCK = Design("FSDP2 has no such option", "^bfloat16: |^float32: |^float64: ")

PROGRAMS = [
    Program(offloaded, item=7, title="CPUOffloadPolicy"),
    Program(
        pinned,
        item=7,
        title="CPUOffloadPolicy() on a machine without a GPU",
        by_design={"losses": Design("plain memory where none can be pinned", r"^[\d., ]+$")},
    ),
    Program(
        half_precision,
        item=11,
        title="half-precision weights as they are, and main_dtype",
        by_design={
            "a bfloat16 model without a word": Design(
                "main weights are float32 unless told otherwise", "^float32: "
            ),
            **{f"main_dtype={dtype}": NO_STOCK for dtype in (HALF, torch.float32, torch.float64)},
        },
    ),
    Program(
        policy_file,
        item=11,
        title='main = "given" in a policy file',
        by_design={
            "in PyTorch": Design("FSDP2 has no policy files", "^bfloat16$"),
            "in JAX": Design("FSDP2 has no other half", "^bfloat16$"),
        },
        slow=True,
    ),
    Program(
        placed,
        item=12,
        title="shard_placement_fn with Shard(1)",
        by_design={
            "Shard(1): shape of a rank's part of (6, 8)": Design(
                "a hint without influence: rows are cut", r"^\d, 8$"
            )
        },
    ),
    Program(
        experts,
        world=4,
        item=12,
        title="shard_placement_fn with ShardPlacementResult",
        torch="2.12.0a0",
        by_design={"a norm over both meshes": Design("norms here may be combined over meshes", r"^\d")},
    ),
]
