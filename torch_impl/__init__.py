"""Per-module sharded training for PyTorch: ``fully_shard``, its optimizer, layouts and checkpoints.

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = MainWeightAdamW(model.parameters(), lr=3e-4)      # after sharding
    loss_of(model, batch).backward()
    optimizer.step()

``docs/explanation/unit-in-torch.md`` says what a program may rely on.
"""

from importlib import import_module

try:
    import_module("torch")
except ModuleNotFoundError as error:
    # Anything else that is missing is a damaged installation, which the extra would not mend.
    if error.name != "torch":
        raise
    from bridge.core.extras import install_advice

    raise ImportError(
        f"torch_impl needs PyTorch, which is not installed: {install_advice('torch')}"
    ) from error

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from bridge.core.formats.saving.pending import PendingSave
from bridge.core.sharding import (
    Layout,
    ParallelPolicy,
    Placements,
    PolicyError,
    PrecisionPolicy,
    UnitPolicy,
    plan_layout,
)
from torch_impl.api import fully_shard
from torch_impl.apply_policy import ShardingPolicy
from torch_impl.checkpoint.checkpoint import load_checkpoint, save_checkpoint, save_checkpoint_async
from torch_impl.checkpoint.manager import CheckpointManager
from torch_impl.diagnostics.collectives import CollectiveCount, count_collectives
from torch_impl.diagnostics.layout_report import LayoutReport, layout_report
from torch_impl.diagnostics.nonfinite import NonFinite, find_nonfinite, watch_nonfinite_outputs
from torch_impl.diagnostics.tensors import memory_overlaps, parameter_norms
from torch_impl.diagnostics.visualize import visualize
from torch_impl.dtensor.tensor import full_tensor
from torch_impl.fsdp2 import DataParallelMeshDims
from torch_impl.fsdp_module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from torch_impl.installation import Installation, install, uninstall
from torch_impl.optimizer.main_weight_adamw import MainWeightAdamW
from torch_impl.optimizer.main_weight_muon import MainWeightMuon
from torch_impl.optimizer.main_weight_sgd import MainWeightSGD
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy
from torch_impl.runtime.unit.memory_report import MemoryReport

__all__ = [
    "CPUOffloadPolicy", "CheckpointManager", "CollectiveCount", "DataParallelMeshDims", "FSDPModule",
    "Installation", "Layout", "LayoutReport", "MainWeightAdamW", "MainWeightMuon", "MainWeightSGD",
    "MemoryReport", "MixedPrecisionPolicy", "NonFinite", "OffloadPolicy", "ParallelPolicy", "PendingSave",
    "Placements", "PolicyError", "PrecisionPolicy", "ShardingPolicy", "UnitPolicy", "UnshardHandle",
    "count_collectives", "find_nonfinite", "full_tensor", "fully_shard", "install", "layout_report",
    "load_checkpoint", "memory_overlaps", "parameter_norms", "plan_layout", "register_fsdp_forward_method",
    "save_checkpoint", "save_checkpoint_async", "share_comm_ctx", "uninstall", "visualize",
    "watch_nonfinite_outputs",
]  # fmt: skip
