"""Sharded training state in JAX: flat uneven buffers on one or two data-parallel mesh axes, or logical arrays.

::

    plan, weights = fully_shard(model, data_parallel_mesh(4), strategy="optim_grads_params")
    optimizer = main_weight_adamw(1e-3)
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, lambda model, rows: loss(model(rows)), optimizer, microbatches=2)
    state, metrics = step(state, tokens)
"""

from importlib import import_module

try:
    import_module("jax")
except ModuleNotFoundError as error:
    # Anything else that is missing is a damaged installation, which the extra would not mend.
    if error.name != "jax":
        raise
    raise ImportError("jax_impl needs JAX, which is not installed: pip install 'twinshard[jax]'") from error

from bridge.sharding import (
    STRATEGIES,
    Layout,
    Placements,
    PolicyError,
    PrecisionPolicy,
    UnitPolicy,
    plan_layout,
)
from jax_impl.api import fully_shard, plan_sharding, shard_weights, unshard
from jax_impl.apply_policy import ShardingPolicy
from jax_impl.checkpoint.checkpoint import LoadedCheckpoint, load_checkpoint, save_checkpoint
from jax_impl.comm.mesh import data_parallel_mesh, simulate_devices
from jax_impl.diagnostics.collectives import count_collectives, count_compiled_collectives
from jax_impl.diagnostics.memory import MemoryReport, memory_report
from jax_impl.modules.linen_model import apply_linen
from jax_impl.modules.module_tree import variable_leaves
from jax_impl.modules.stack import scan_layers, stack_layers
from jax_impl.modules.tree_model import call_unit
from jax_impl.optimizer.main_weight_adamw import AdamWState, main_weight_adamw
from jax_impl.runtime.gradients import make_gradients
from jax_impl.runtime.sharding_plan import ShardingPlan
from jax_impl.train import TrainState, init_state, make_train_step, shard_batch

__all__ = [
    "STRATEGIES",
    "AdamWState",
    "Layout",
    "LoadedCheckpoint",
    "MemoryReport",
    "Placements",
    "PolicyError",
    "PrecisionPolicy",
    "ShardingPlan",
    "ShardingPolicy",
    "TrainState",
    "UnitPolicy",
    "apply_linen",
    "call_unit",
    "count_collectives",
    "count_compiled_collectives",
    "data_parallel_mesh",
    "fully_shard",
    "init_state",
    "load_checkpoint",
    "main_weight_adamw",
    "make_gradients",
    "make_train_step",
    "memory_report",
    "plan_layout",
    "plan_sharding",
    "save_checkpoint",
    "scan_layers",
    "shard_batch",
    "shard_weights",
    "simulate_devices",
    "stack_layers",
    "unshard",
    "variable_leaves",
]
