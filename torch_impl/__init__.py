"""Per-module sharded training for PyTorch: ``fully_shard``, its optimizer, layouts and checkpoints."""

from torch_impl.api import FSDPModule, fully_shard
from torch_impl.checkpoint import load_checkpoint, save_checkpoint
from torch_impl.dtensor import full_tensor
from torch_impl.layout import Layout, plan_layout
from torch_impl.memory import MemoryReport
from torch_impl.optimizer import MainWeightAdamW
from torch_impl.precision import MixedPrecisionPolicy

__all__ = [
    "FSDPModule",
    "Layout",
    "MainWeightAdamW",
    "MemoryReport",
    "MixedPrecisionPolicy",
    "full_tensor",
    "fully_shard",
    "load_checkpoint",
    "plan_layout",
    "save_checkpoint",
]
