"""Types of `twinshard.py`, whose names are imported when they are first used."""

import jax_impl as jax
import torch_impl as torch
from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.compare.ulp import Tolerance
from bridge.checkpoints.convert import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify import verify
from bridge.core.formats import CheckpointError, create_checkpoint, open_checkpoint
from bridge.core.version import __version__
from bridge.parity import parity
from bridge.parity.curves.compare import compare_runs as curves
from bridge.planning import Workload
from bridge.planning import make_plan as plan

__all__ = [
    "CheckpointError",
    "Selection",
    "Tolerance",
    "Workload",
    "__version__",
    "convert",
    "create_checkpoint",
    "curves",
    "diff",
    "inspect",
    "jax",
    "open_checkpoint",
    "parity",
    "plan",
    "torch",
    "verify",
]
