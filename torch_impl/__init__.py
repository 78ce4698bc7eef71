"""Per-module sharded training for PyTorch: ``fully_shard``, its optimizer, layouts and checkpoints."""

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from bridge.sharding import Layout, Placements, PolicyError, PrecisionPolicy, UnitPolicy, plan_layout
from torch_impl.api import fully_shard
from torch_impl.apply_policy import ShardingPolicy
from torch_impl.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from torch_impl.diagnostics.collectives import CollectiveCount, count_collectives
from torch_impl.diagnostics.layout_report import LayoutReport, layout_report
from torch_impl.diagnostics.nonfinite import NonFinite, find_nonfinite, watch_nonfinite_outputs
from torch_impl.diagnostics.overlap import memory_overlaps
from torch_impl.diagnostics.tensors import parameter_norms
from torch_impl.dtensor.tensor import full_tensor
from torch_impl.fsdp2 import DataParallelMeshDims
from torch_impl.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch_impl.optimizer.main_weight_adamw import MainWeightAdamW
from torch_impl.runtime.memory import MemoryReport
from torch_impl.runtime.precision import MixedPrecisionPolicy

__all__ = [
    "CPUOffloadPolicy",
    "CollectiveCount",
    "DataParallelMeshDims",
    "FSDPModule",
    "Layout",
    "LayoutReport",
    "MainWeightAdamW",
    "MemoryReport",
    "MixedPrecisionPolicy",
    "NonFinite",
    "OffloadPolicy",
    "Placements",
    "PolicyError",
    "PrecisionPolicy",
    "ShardingPolicy",
    "UnitPolicy",
    "UnshardHandle",
    "count_collectives",
    "find_nonfinite",
    "full_tensor",
    "fully_shard",
    "layout_report",
    "load_checkpoint",
    "memory_overlaps",
    "parameter_norms",
    "plan_layout",
    "register_fsdp_forward_method",
    "save_checkpoint",
    "share_comm_ctx",
    "watch_nonfinite_outputs",
]
