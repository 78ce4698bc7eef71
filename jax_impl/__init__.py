"""Sharded training state in JAX: flat uneven buffers or logical arrays on data-parallel mesh axes, and model axes.

A flax nnx model, a linen module's parameters or any pytree goes in; pure functions over a pytree of arrays come out::

    plan, weights = fully_shard(model, data_parallel_mesh(4), strategy="optim_grads_params")
    optimizer = main_weight_adamw(1e-3)
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, lambda model, rows: loss(model(rows)), optimizer, microbatches=2)
    state, metrics = step(state, tokens)

``docs/explanation/unit-in-jax.md`` says what a program may rely on.
"""

from importlib import import_module

try:
    import_module("jax")
except ModuleNotFoundError as error:
    # If another module is missing, the installation is damaged, and the extra would not repair it.
    if error.name != "jax":
        raise
    from bridge.core.extras import install_advice

    raise ImportError(f"jax_impl needs JAX, which is not installed: {install_advice('jax')}") from error

from bridge.core.formats.saving.pending import PendingSave
from bridge.core.sharding import (
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
from jax_impl.checkpoint.checkpoint import save_checkpoint, save_checkpoint_async
from jax_impl.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from jax_impl.checkpoint.manager import CheckpointManager
from jax_impl.comm.mesh import data_parallel_mesh, simulate_devices
from jax_impl.diagnostics.collectives import count_collectives, count_compiled_collectives
from jax_impl.diagnostics.memory import MemoryReport, memory_report
from jax_impl.diagnostics.nonfinite import NonFinite, find_nonfinite
from jax_impl.diagnostics.norms import parameter_norms
from jax_impl.diagnostics.visualize import visualize
from jax_impl.evaluate import EvalStep, make_eval_step
from jax_impl.initialize import init_sharded
from jax_impl.modules.linen_model import apply_linen
from jax_impl.modules.module_tree import variable_leaves
from jax_impl.modules.stack import scan_layers, stack_layers
from jax_impl.modules.tree_model import call_unit
from jax_impl.optimizer.main_weight_adamw import AdamWState, main_weight_adamw
from jax_impl.optimizer.main_weight_muon import MuonState, main_weight_muon
from jax_impl.optimizer.main_weight_sgd import SGDState, main_weight_sgd
from jax_impl.optimizer.offload import Offload
from jax_impl.runtime.groups.layout_report import LayoutReport, layout_report
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from jax_impl.runtime.step.float8_products import float8_dot_general
from jax_impl.runtime.step.gradients import make_gradients
from jax_impl.runtime.step.outputs import NonFiniteOutput, watch_nonfinite_outputs
from jax_impl.train import make_train_step
from jax_impl.train_state import TrainState, abstract_state, init_state, pad_batch, shard_batch

__all__ = [
    "STRATEGIES", "AdamWState", "CheckpointManager", "EvalStep", "Layout", "LayoutReport", "LoadedCheckpoint",
    "MemoryReport", "MuonState", "NonFinite", "NonFiniteOutput", "Offload", "PendingSave", "Placements",
    "PolicyError", "PrecisionPolicy", "SGDState", "ShardingPlan", "ShardingPolicy", "TrainState",
    "UnitPolicy", "abstract_state", "apply_linen", "call_unit", "count_collectives",
    "count_compiled_collectives", "data_parallel_mesh", "find_nonfinite", "float8_dot_general", "fully_shard",
    "init_sharded", "init_state", "layout_report", "load_checkpoint", "main_weight_adamw", "main_weight_muon",
    "main_weight_sgd", "make_eval_step", "make_gradients", "make_train_step", "memory_report", "pad_batch",
    "parameter_norms", "plan_layout", "plan_sharding", "save_checkpoint", "save_checkpoint_async",
    "scan_layers", "shard_batch", "shard_weights", "simulate_devices", "stack_layers", "unshard",
    "variable_leaves", "visualize", "watch_nonfinite_outputs",
]  # fmt: skip
