"""Per-module sharded training for PyTorch: ``fully_shard``, its optimizer, layouts and checkpoints.

What a program may rely on:

**Parameters.** At rest ``parameters()`` shows DTensors over the main weights: float32, built from the values as given
(float64 stays), or in ``MixedPrecisionPolicy(main_dtype=...)``. Frozen ones stay in the dtype in which they were given:
one in half precision that is unfrozen after ``fully_shard`` raises at the next forward, unless ``main_dtype`` asks for
that dtype. During forward and backward the modules hold plain parameters in the compute dtype, as they do between both
where a unit does not reshard after its forward (``reshard_after_forward=False``; with gradients also the root by
default): a loss may use ``model.output.weight``. Optimizers, state dicts, and clipping after the backward see sharded
ones. What is written into plain weights is lost.

**A DTensor never lies.** These are right on uneven and empty shards: element-wise operators, whole-tensor reductions,
sums, means and norms along one of the last two dimensions, ``full_tensor()``, the optimizers of ``torch.optim`` but
LBFGS (for-loop, foreach, fused; Muon, transposes and products of matrices where each lies whole on one rank, as with
``granularity="tensor"``), ``clip_grad_norm_``, ``GradScaler``, ``torch.nn.init`` and ``reset_parameters()`` (with the
values one process would draw), items, slices, ``chunk`` and ``split`` of the first dimension, views that keep rows or
make a vector, ``new_zeros`` and its kind, ``state_dict()`` with plain ``dcp.save/load``, ``load_state_dict`` of sharded
or whole tensors, ``distribute_tensor`` and ``DTensor.from_local`` with a parameter's mesh and placements,
``load_state_dict`` of such tensors with ``assign=True``, ``torch.save`` of state dicts on each rank, torch's ``get_``
and ``set_model_state_dict`` and their optimizer twins, also with ``full_state_dict=True`` and
``broadcast_from_rank0=True``. Other operators that depend on the cut raise and name ``full_tensor()``: other views,
matrix products. ``tolist()``, ``numpy()`` and ``.data =`` raise, too.

**Programs that import FSDP2 themselves**, such as accelerate, transformers and TRL, get this package's ``fully_shard``
after ``torch_impl.install()``, until ``torch_impl.uninstall()``.

**Importing wraps no function of torch.** The first ``fully_shard`` of a process wraps ``distribute_tensor``,
``DTensor.from_local`` and private functions of ``torch.distributed.checkpoint.state_dict``, which offer no hook, so
that they know how sharded parameters are placed. With all other tensors they do what they did. It also wraps the
private function by which ``torch.autograd`` starts a backward: errors about weights that were freed or changed name the
unit.

**Updates.** The next forward uses the current main weights, whoever changed them. torch's version counters tell,
without communication, so a program edits local tensors on all ranks, as in any DTensor program. A change that torch
cannot count (``to_local().data``, NumPy views, collectives that write into ``to_local()``) is seen from the next
counted change on. ``torch.autograd.graph.increment_version(param.detach().to_local())`` counts one; call it on all
ranks.

**Microbatches.** ``optim``, ``no_shard``, ``hsdp`` and ``hfsdp`` reduce over axes that gradients are not sharded over
once a step when the last microbatch is marked: by ``no_sync()`` around the others, by ``set_is_last_backward`` or by
``set_requires_all_reduce``. Unmarked, every backward reduces over all axes, with the same result. ``no_sync()`` does
not stop strategies with sharded gradients from reducing over the axes that gradients are sharded over;
``set_requires_gradient_sync(False)`` does, for every strategy.

**Gradients** are summed over the ranks in ``reduce_dtype``, then averaged in the wider of that and ``grad_dtype``. In
float16 they are averaged first, while they are copied. Between two backwards ``.grad`` is the whole state: None, a
reduced DTensor, or a DTensor that is ``Partial`` on some axes, whose value cannot be read. ``zero_grad`` works in both
modes, also half-way through a step. Fused kernels may write gradients themselves: see
``FSDPModule.set_main_gradients``.

**Unused parameters.** A group is what one unit holds of one dtype and trainability; with float8 weights, its matrices
and its vectors are two. Ranks may use different inputs and parameters of a unit, but must agree on which groups take
part. A parameter that some rank used in a step has a gradient on every rank, one that no rank used has none: ``.grad``
stays None, and optimizers leave the weight alone. Where a rank has not used a parameter that it trains, it reads a
flag of the reduction, for which the program waits. A unit that the last microbatch does not use reduces what earlier
ones left at the end of that backward, as in FSDP2.

**Float8 weights.** With ``MixedPrecisionPolicy(gather_dtype=...)`` forward and backward compute with main weights that
were quantized to float8, under every strategy, and the gradients are applied to the main weights as they are.

**Remainders.** With ``MixedPrecisionPolicy(store_param_remainders=True)`` parameters are bfloat16 at rest, and
operators that change them change the float32 main weights; see ``torch_impl.dtensor.remainders``. ``MainWeightAdamW``
alone trains them, plain ``dcp.load`` is refused, and ``state_dict()`` shows the bfloat16 weights.

**Irregular programs.** A program may skip units, call them repeatedly, recompute them (both kinds of activation
checkpointing, with one gather for recomputation and backward), freeze and thaw them at any time (but see Parameters),
interrupt them by exceptions, and run forwards ahead of backwards. A backward through weights that were replaced since
its forward raises autograd's error. A backward that raised leaves what it had added in the gradients kept of earlier
microbatches: drop them with ``zero_grad`` and repeat the step.

**Derivatives of derivatives.** ``torch.autograd.grad(..., create_graph=True)`` by inputs, ``torch.func`` and forward
mode go through units, which gather their weights again for each backward. Gradients of parameters have no graph: a
backward that would make one raises. The weights of a unit whose inputs are hidden in objects stay after such a
backward. The first one turns the buffer pool off.

**What ranks must do alike.** All ranks call the same units in the same order, also without gradients. A forward on
some ranks only is safe under ``no_shard`` alone, in eval mode and without gradients. All ranks agree on whether any
input of a unit gets a gradient, and on the sync flags. Ranks compare the description of every unit once, in
``fully_shard``, and the order of their gathers and reductions whenever one follows another for the first time; on a
difference all raise, naming the first one. A rank that departs from a known order only later is found within 1,000
collectives, unless the backend waits for it until its timeout.

**Outputs.** Where parameters are sharded, a unit that returns its parameter or a view of it returns a copy, through
which gradients flow. Such a view inside an object that is no tuple, list or dict raises. An input that a unit passes
on comes out as the caller's own tensor.

**Overlap and the pool.** Two units' weights and two units' gradients are in use at most, besides the root's and those
of units around a unit; with ``prefetch=0`` of the root one unit's, and nothing runs during a transfer. From the second
or third step on, units of one size use the same memory in turn. Weights reached by a reference of one's own,
outside the unit's forward, backward and ``unshard()``, are not protected from that: ``set_buffer_pool(False)`` turns
the pool off. The pool leaves out the root's weights, weights that are not sharded, tensor-parallel parameters, and
sums kept between microbatches.

**Tensor parallelism.** Parameters that are DTensors, placed by ``Shard`` and ``Replicate`` on further axes of the same
named mesh, are sharded once more. At rest they are DTensors on all axes. Experts get a mesh of their own and
``grad_divisor``. A data-parallel mesh with axes named for model parallelism (``bridge.core.sharding.policy.mesh_axes``)
is refused, unless ``dp_mesh_dims`` names the axes. A ``shard_placement_fn`` may give a parameter, such as experts, a
mesh of its own. A policy cuts modules over such axes itself, see ``torch_impl.parallel``.

**Parameters with fsdp_pre_all_gather**, FSDP2's extension for float8 and quantized weights, keep their class, are cut
between slices of dimension 0 into equal parts, and gather what they say; see ``torch_impl.runtime.weights.extension``.

**Meta device.** Call ``fully_shard``, then ``model.to_empty(device=...)``, then ``init_weights()`` or
``reset_parameters()`` or load a state dict. The values are bit for bit those of one process seeded as rank 0. Ranks
that are seeded otherwise keep their own random state. What setters set and optimizers hold before ``to_empty`` stays.
Modules inside a unit may also be given memory and values by a ``to_empty`` of their own, one after the other.
A strict ``set_model_state_dict`` with ``full_state_dict=True`` makes the memory itself, as ``load_state_dict`` with
``assign=True`` does; one with ``strict=False`` asks for ``to_empty``. Only some ranks may be on the meta device, if all
load the first rank's weights then.

**CPU offload.** With ``offload_policy=CPUOffloadPolicy()`` main weights and gradients lie in CPU memory, where the
optimizer updates them; see ``torch_impl.runtime.ground.host_memory``. ``MainWeightAdamW(offload_fraction=...)`` keeps
optimizer state in CPU memory and updates on the device.

**torch.compile** works on blocks, before or after sharding, and on the whole model. The runtime's hooks are not
traced.

**Optimizers built before sharding** raise in ``step`` and ``zero_grad``: their parameters are not trained any more.
"""

from importlib import import_module

try:
    import_module("torch")
except ModuleNotFoundError as error:
    # Anything else that is missing is a damaged installation, which the extra would not mend.
    if error.name != "torch":
        raise
    raise ImportError(
        "torch_impl needs PyTorch, which is not installed: pip install 'twinshard[torch]'"
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
from torch_impl.dtensor.tensor import full_tensor
from torch_impl.fsdp2 import DataParallelMeshDims
from torch_impl.fsdp_module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch_impl.installation import Installation, install, uninstall
from torch_impl.optimizer.main_weight_adamw import MainWeightAdamW
from torch_impl.optimizer.main_weight_muon import MainWeightMuon
from torch_impl.optimizer.main_weight_sgd import MainWeightSGD
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy
from torch_impl.runtime.unit.memory_report import MemoryReport

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointManager",
    "CollectiveCount",
    "DataParallelMeshDims",
    "FSDPModule",
    "Installation",
    "Layout",
    "LayoutReport",
    "MainWeightAdamW",
    "MainWeightMuon",
    "MainWeightSGD",
    "MemoryReport",
    "MixedPrecisionPolicy",
    "NonFinite",
    "OffloadPolicy",
    "ParallelPolicy",
    "PendingSave",
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
    "install",
    "layout_report",
    "load_checkpoint",
    "memory_overlaps",
    "parameter_norms",
    "plan_layout",
    "register_fsdp_forward_method",
    "save_checkpoint",
    "save_checkpoint_async",
    "share_comm_ctx",
    "uninstall",
    "watch_nonfinite_outputs",
]
