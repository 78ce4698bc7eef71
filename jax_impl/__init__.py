"""Sharded training state in JAX: flat uneven buffers on data-parallel mesh axes, or logical arrays; and model axes.

A flax nnx model, a linen module's parameters or any pytree goes in; pure functions over a pytree of arrays come out::

    plan, weights = fully_shard(model, data_parallel_mesh(4), strategy="optim_grads_params")
    optimizer = main_weight_adamw(1e-3)
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, lambda model, rows: loss(model(rows)), optimizer, microbatches=2)
    state, metrics = step(state, tokens)

What a program may rely on:

**Units.** A unit is a submodule that a pattern names; the root unit owns all other parameters. A unit's trainable
parameters lie in one flat array (in the default engine), in float32 by default, or in several, one for each dtype of
main weights. An array is cut into equal shards. Frozen parameters have arrays of their own, one a dtype, without
gradient and moments. They keep the dtype in which they were given, which may be float8, an integer's or bool: so they
are at rest, on the wire, in compute and in a checkpoint, bit for bit. Trainable ones of these are refused.
``replicated=["*/router/*"]`` names parameters that every device has whole, whatever the strategy: no gather moves them,
their gradients are averaged once a step, and a label or mask gives them an optimizer of their own. The unit's
``Layout`` says where each parameter lies, and so who owns which rows. ``granularity`` ("row", "block(n)", "tensor")
keeps whole blocks of rows on one rank, for all parameters or by path: ``fully_shard(...,
granularity={"layers/0/mlp/up/kernel": "block(32)"})``. ``align=128`` makes every shard a multiple of 128 elements,
without which XLA:TPU turns all-gathers into all-reduces. A layout has up to three buffers with a shard size each. A
rank's part of the array is its shard of each buffer in turn, so each array still has one gather and one reduction. In a
policy every unit may have a strategy of its own.

**Steps.** A step of K microbatches cuts every rank's rows into K contiguous parts. Loss and gradients are means over
all ranks and parts, so ``loss_fn`` must return a mean over equally many things for each part, or ``(sum, weight)``.
Gradients accumulate in the grad dtype, by default the main weights'. A step donates the state that it is given, unless
``donate=False``. A step is two programs: gradients, then the update. Inside of ``jax.jit`` or ``jax.lax.scan`` a step
is a part of that one program; ``step.lower(abstract_state(plan, optimizer), shapes)`` compiles it ahead.

**Collectives** are those of the strategy (bridge/core/sharding/README.md), with one all-reduce an axis for ``no_shard``
on two axes. Tests count them in the jaxpr and in the program that XLA compiled, with sizes and dtypes.

**Engines.** ``engine="shard_map"``, the default, has flat uneven arrays and writes every collective.
``engine="pjit"`` has one logical array a parameter, states how arrays must lie and leaves the collectives to XLA. It
cuts a parameter along its largest dimension that divides. A parameter without such a dimension is whole on every
device; ``plan.whole_parameters`` names those. Both engines give the same gradients and steps.

**Model axes.** After one or two data-parallel axes a mesh may have one or two model axes (``tp``, ``ep``, ...), which
cut the parameters that annotations of the model, a policy's ``[[parallel]]`` or ``parallel=`` name
(``modules/partitioning.py``). A step is automatic on these axes: the model is as without them, and XLA partitions it as
its weights lie. What lies on a device of a parameter is in a flat buffer of its own, so that collectives over
data-parallel axes move only that, and none over a model axis moves weights. Rows, losses and random numbers are the
same on all devices of a model axis.

**Models.** Any flax nnx model works unchanged. Units are called or used by their methods; they may be nested, reused or
unused, take any pytrees and Python flags, hold batch statistics and random streams, and be set to ``eval()`` inside the
loss. Only a unit's own calls may use its weights. A penalty on ``nnx.state(model, nnx.Param)`` would see shards, so it
is refused before anything is compiled, with unit and line: use ``optax.add_decayed_weights``. Variables that appear
during a call (``sow``) are refused by name.

**Default units.** Without ``units`` the blocks that a model repeats are units: ``layers/*``, ``blocks/*``, ``h/*``,
``Block_*``, ``layers_*`` and the like, by the rule in ``help("jax_impl.modules.repeated_blocks")``. A model without
such blocks is refused with its modules. ``units`` with a policy take the place of the policy's patterns.

**Pytrees.** ``fully_shard`` takes any pytree of parameters: dictionaries, lists, named tuples, registered dataclasses.
The loss gets the pytree back. It uses a subtree that is a unit by ``call_unit(function, subtree, *args)``, which calls
``function(subtree, *args)`` with the subtree's weights gathered, and just so when nothing is sharded. A stack is
scanned by ``jax.lax.scan`` over its subtree, with ``call_unit`` in the body. Arrays that depend on weights, or on the
passes of a loop, must be arguments: a function may not close over them. Leaves that are no arrays stay as they are. A
Python float is one of them where it belongs to a node that can be called (a module); elsewhere it is refused.

**equinox.** A module of equinox is a pytree, so ``fully_shard(model, ...)`` takes it whole, and its own ``__call__``
works: units are called as the submodules that they stand for, by ``__call__`` or any method. Their attributes cannot be
read outside, and ``eqx.nn.inference_mode`` does not reach into units: apply it before sharding. Integer arrays must be
``frozen``, and ``eqx.nn.State`` (BatchNorm) has no place in a sharded model. ``jax.vmap(model)(rows)`` gathers each
unit once and reduces the sum over the rows; units may use the name of the axis. Where a loop such as ``lax.scan`` lies
between ``vmap`` and a unit, a gradient of each row is kept and reduced, which is right, but as many times as large.

**haiku.** Keys with ``/`` are paths: ``"mlp/~/linear_0"`` has the parameter ``mlp/~/linear_0/w``. An unedited
``transformed.apply(params, ...)`` works with one unit (``units=[]``). With units for single modules of haiku it is
right, too, but haiku reads parameters one by one: a unit is gathered for each, and its weights are kept until backward.
Layers that are worth a unit are transformed each: ``call_unit(layer.apply, params["layers"][0], None, x)``. A prefix
such as ``transformer/layer_0`` that is no key of its own is no unit.

**linen.** A loss calls ``apply_linen(module, {"params": params}, *args)`` where it would call ``module.apply``.
Submodules at the paths of units then run with weights gathered, also layer by layer under ``nn.scan``. With
``mutable=["batch_stats"]`` the result has what modules wrote. The docstring of ``apply_linen`` has examples and what is
refused.

**Stacked layers.** A stack is a module whose parameters have a leading axis over layers (``nnx.vmap`` or
``stack_layers``, linen's ``nn.scan``) and that the model scans (``nnx.scan`` or ``scan_layers``). With
``fully_shard(..., stacked=["layers"])`` a pattern ``layers/*`` means the stack's layers. Each layer is gathered and
reduced in its turn, and compile time does not grow with depth. The members of an ensemble, which the model maps
(``nnx.vmap``, ``nn.vmap``), are gathered together. Without ``stacked``, an nnx module that a pattern like ``layers/*``
names is recognized as a stack where flax's own layers in it (``nnx.Linear``) show the axis.

**Recomputation.** With ``recompute=True``, or in a policy, a unit saves its inputs only, with "dots_saveable" or
"dots_with_no_batch_dims_saveable" the results of such products as well. Of units inside a recomputed unit the last one
is gathered twice, with ``prefetch=1`` the last two; the others are gathered three times, or their weights would all be
there at once, as in PyTorch. With ``recompute`` on the inner units alone each is gathered twice, and more activations
are saved: each one's inputs. A recomputed root runs the model's forward three times.

**Precision.** ``param_dtype="bfloat16"`` (or ``jnp.bfloat16``) casts each shard before the gather.
``gather_dtype="mxfp8"`` quantizes matrices for it, and forward and backward compute with the quantized values. Modules
with ``dot_general=float8_dot_general`` multiply them in float8 as well, best with ``gather_dtype="float8_e4m3fn"``.
``reduce_dtype`` is the dtype of the summation; left out, it is ``param_dtype``'s, as in PyTorch. ``param_dtype=None``
computes in the main weights' dtype, also for a model that was given in bfloat16. In the pjit engine XLA sums in the
dtype in which it multiplied.

**Main weights** are float32, or float64 where the given parameters are. ``main_dtype="bfloat16"`` (or "float16") rounds
given ones once, to nearest even, and then at the end of each update: half the bytes at rest, but updates below the last
bit of a weight are lost. ``main_dtype=None`` keeps each parameter's own dtype. ``main_weight_adamw``,
``main_weight_sgd`` and ``main_weight_muon`` compute in float32 with both, with float32 moments. ``[precision] main``
of a policy says the same, "given" for None.

**Other variables**, such as batch statistics, start as they are in the model that ``fully_shard`` got; ``init_state``
takes others as its last argument, such as ``variable_leaves(model)``. ``plan.merge(unshard(plan, state))`` is the model
with those of the state. Within a step each device has its own: it normalises its own rows and draws its own random
numbers. After the step there is one value again: batch statistics are the mean over the devices, rows of a decode cache
stay with their device, counters are the same anyway. Of others ``fully_shard(..., variables={"counts": "sum"})`` says
how, by pattern of paths or type: "mean", "sum" (of what rows add), "max" or "rows". A variable that depends on rows and
has no such rule is refused before anything is compiled. The pjit engine computes on the whole microbatch instead.

**Optimizers.** Any optax transformation trains as on the unsharded model. One that does the same to each element,
wherever the element lies, runs on the arrays as they are: one flat array a unit in the shard_map engine, ``{path:
array}`` in the pjit engine. Masks by unit (``optax.masked(optimizer, {"layers/0": True, ...})``) work, and so do masks
and labels made of the model's own pytree, or of ``nnx.to_pure_dict(nnx.state(model, nnx.Param))``. Global norms are
right, because padding is zero and arrays are global. A transformation that looks at shapes or names (Muon, lamb,
adafactor, a decay mask by ``ndim``) or that draws random numbers by shape is given the model's own tree of trainable
parameters. Its moments are cut along a dimension that divides by the number of shards, or whole where there is none, of
which a warning tells. Each step then gathers weights and gradients unit by unit for the update, which an elementwise
one does not need. Which of the two an optimizer is shows in its programs, which are traced over all parameters with
their names and shapes, branches of later steps included. nnx models' masks and labels get what flax's own optimizer
gives, ``nnx.as_pure(nnx.state(model, nnx.Param))``. Refused is what needs more than gradients, state, weights and the
loss (a line search). A program that calls ``optimizer.update`` itself decides for itself.

**AdamW.** ``main_weight_adamw`` equals ``torch.optim.AdamW(fused=True)`` on CPU bit for bit, given the same gradients,
in float32 and float64, wherever shards end. The exceptions, in ``help("jax_impl.optimizer.main_weight_adamw")``, are
the last few second moments of each tensor, denormals, and other platforms than CPUs with AVX2 or AVX-512.
``adam_w_mode=False`` is Adam with L2 decay. ``mu_dtype`` and ``nu_dtype`` store moments in bfloat16, or in float16 or
float8 with a float32 scale for each row of a parameter, as ``torch_impl`` does: see
``help("jax_impl.optimizer.moments")``.

**Forward only.** ``make_eval_step(plan, fn)`` evaluates losses, and gives what ``fn`` has for each row (logits,
samples), from weights that stay sharded: units are gathered one at a time, and nothing is reduced but a loss.

**Inputs.** A batch is cut over the devices. What comes after it, ``step(state, batch, key, teacher)``, is whole on
every device. ``pad_batch`` fills up a last batch, and tells which rows count.

**Initial values.** ``init_sharded(make, mesh)`` is ``fully_shard(make(), mesh)`` for models that fit nowhere: each
device makes the values, a unit at a time, and keeps its own rows.

**Checkpoints.** ``save_checkpoint`` writes one logical array a parameter, in Orbax's format; ``load_checkpoint`` reads
it onto any mesh, strategy and engine, also from DCP and safetensors with the same names. It also takes what other JAX
programs saved by stock Orbax: parameters at the top or below ``params`` or ``model``, states of nnx modules and of
``nnx.Optimizer``, linen train states with optax states. Of a directory of steps it takes the latest complete one. A
checkpoint must fit the plan and the optimizer, and the error names what does not. With ``strict=False`` moments that
fit are kept, also for another optimizer, and the others are fresh; weights in another floating dtype are cast, such as
float32 ones to bfloat16 main weights.
``moments="convert"`` takes moments that were saved in another format.
``variables=variable_leaves(model)`` gives what a checkpoint of parameters lacks. For stock ``CheckpointManager``, save
with ``item="default"``.

**Losses.** A step averages devices and microbatches with equal weights, so ``sum(loss * mask) / sum(mask)`` would
weight tokens by what else is in their part. Return ``(sum(loss * mask), sum(mask))`` instead: the step divides the sum
over the whole batch by the weight of the whole batch, whatever the parts. A loss that is divided by a sum over the
batch is refused, unless the step has one part (one microbatch on one device or in the pjit engine), or
``equal_parts=True`` says that all sums are equal. ``grad_divisor`` divides by a number instead of the number of parts,
for all or for some units.

**float16.** Reductions in float16 take means over the devices, since sums of many overflow. Gradients of
``(sum, weight)`` are sums over a device's tokens all the same: divide both by a constant, such as rows times length,
where they overflow.

**Metrics.** With ``has_aux=True`` a loss returns ``(loss, aux)``, and metrics have "aux": floating-point leaves are
averaged over ranks and microbatches like the loss, integers and bools are summed. Values of single rows have no place
there. ``metrics=["grad_norm", "learning_rate"]`` adds those two.

**Derivatives.** First derivatives only. A gradient inside of the loss that goes through a unit (a gradient penalty,
forces) would miss the unit's weights and is refused. A gradient through the root is right.

**Host memory.** ``init_state(..., offload=Offload(moments=0.5, main_weights=False))`` has a share of the moments in
``pinned_host`` memory, and if asked for the weights. Any array of a state may be put there by hand, too
(``jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))``). A step returns all arrays to where they were. In
the update the moments of one unit after another travel to the device and back while others are computed, with those
of two units on the device at most (``optimizer/streaming.py``); a stack of layers is one. Only an optimizer that
needs several units' moments at once (one that sees parameters, such as Muon) gets all of them at once. Weights come
to the device a unit at a time, when the unit is gathered (of a stack a layer), and in the update. All of them come when
the gradients' program starts in the pjit engine, on meshes with model axes and in ``make_eval_step``, and of strategies
that hold whole weights or float8 pieces during a step. A state that lies there as a whole, step counts included, as
with ``Offload(moments=1.0, main_weights=True, update="host")``, is updated by the host's processor: no weights or
moments come to the device in the update, and gradients leave in the program that computes them. XLA:GPU sends each when
it is reduced; XLA:TPU had all of them on the device until the program's end, in a small model. A stack's gradients are
one array, and so are sums over microbatches until the last one. Results have the same bits as on the device, and
checkpoints the same contents. ``load_checkpoint(..., like=abstract_state(plan, optimizer,
offload=...))`` loads into such memory. Random keys return on the device. On simulated devices steps need jax 0.10.2
for it.

**Tied weights** must lie in one unit.

**Order of collectives.** On simulated devices every collective waits for the one before it, because collectives that do
not depend on each other abort or hang the simulator (see ``simulate_devices``). On accelerators a unit is gathered, and
the unit before it reduced, while another one computes (``prefetch``). Units that do not depend on each other (parallel
branches) have unordered collectives: fine on accelerators, not in the simulator.

**Diagnostics.** ``print(plan)`` is a table of units. ``parameter_norms`` and ``find_nonfinite`` read weights, gradients
or moments where they lie. ``with watch_nonfinite_outputs(plan) as found`` compiles the steps inside anew, with a
callback at the end of each unit. Operations in profiles and in XLA's text carry the path of their unit, then "gather",
"reduce" or "recompute", or neither.

**Platforms.** Several GPUs and TPUs are untested: no fence, combiner or scheduling behaviour has been seen there. The
CPU compiler carries bfloat16 collectives in float32 and rounds once, so simulated bfloat16 sums are better than an
accelerator's.

**Sizes.** The compile time of unrolled layers grows with depth. Rows are never cut, so a unit with few rows for each of
very many devices needs much padding: a SigLIP layer 0.3 % over 64 devices, 28 % over 1024. See
``print(plan.units["layers/0"].layout)``, and choose larger units if need be.
"""

from importlib import import_module

try:
    import_module("jax")
except ModuleNotFoundError as error:
    # Anything else that is missing is a damaged installation, which the extra would not mend.
    if error.name != "jax":
        raise
    raise ImportError("jax_impl needs JAX, which is not installed: pip install 'twinshard[jax]'") from error

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
from jax_impl.batch import pad_batch, shard_batch
from jax_impl.checkpoint.checkpoint import save_checkpoint, save_checkpoint_async
from jax_impl.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from jax_impl.checkpoint.manager import CheckpointManager
from jax_impl.comm.mesh import data_parallel_mesh, simulate_devices
from jax_impl.diagnostics.collectives import count_collectives, count_compiled_collectives
from jax_impl.diagnostics.memory import MemoryReport, memory_report
from jax_impl.diagnostics.nonfinite import NonFinite, find_nonfinite
from jax_impl.diagnostics.norms import parameter_norms
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
from jax_impl.train_state import TrainState, abstract_state, init_state

__all__ = [
    "STRATEGIES",
    "AdamWState",
    "CheckpointManager",
    "EvalStep",
    "Layout",
    "LayoutReport",
    "LoadedCheckpoint",
    "MemoryReport",
    "MuonState",
    "NonFinite",
    "NonFiniteOutput",
    "Offload",
    "PendingSave",
    "Placements",
    "PolicyError",
    "PrecisionPolicy",
    "SGDState",
    "ShardingPlan",
    "ShardingPolicy",
    "TrainState",
    "UnitPolicy",
    "abstract_state",
    "apply_linen",
    "call_unit",
    "count_collectives",
    "count_compiled_collectives",
    "data_parallel_mesh",
    "find_nonfinite",
    "float8_dot_general",
    "fully_shard",
    "init_sharded",
    "init_state",
    "layout_report",
    "load_checkpoint",
    "main_weight_adamw",
    "main_weight_muon",
    "main_weight_sgd",
    "make_eval_step",
    "make_gradients",
    "make_train_step",
    "memory_report",
    "pad_batch",
    "parameter_norms",
    "plan_layout",
    "plan_sharding",
    "save_checkpoint",
    "save_checkpoint_async",
    "scan_layers",
    "shard_batch",
    "shard_weights",
    "simulate_devices",
    "stack_layers",
    "unshard",
    "variable_leaves",
    "watch_nonfinite_outputs",
]
