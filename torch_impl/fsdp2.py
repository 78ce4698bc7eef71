"""FSDP2's arguments and methods: what is translated, what is refused, and how this package differs.

This is the specification of the differences from ``torch.distributed.fsdp.fully_shard``. A script written for FSDP2
runs after changing the import, but for these. A test walks torch's ``FSDPModule``, ``fully_shard`` and ``__all__``, so
a name that a new torch adds turns that test red.

Refused with NotImplementedError, which says what to do instead:

* an integer ``reshard_after_forward``
* a ``shard_placement_fn`` whose ``ShardPlacementResult`` has a mesh that does not shard its last axis
* the methods of ``Unavailable``

Refused with ValueError: a tie of parameters across units; float8 parameters; a unit with some parameters on the meta
device and some not; a module list as one argument (``list(modules)`` makes one unit).

Refused with TypeError: copying or pickling a sharded module, converting one to another dtype or device.

Refused with TypeError or ValueError by name: parameters that are wrapper subclasses without ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``; data-parallel mesh axes named for model parallelism that ``dp_mesh_dims`` does not name.

Refused with NotImplementedError by name: parameters with these methods under ``no_shard``, ``hfsdp`` or
``store_param_remainders=True``.

Raise an error when they run:

* operators of sharded parameters, outside of modules, that mix rows, such as matrix products: use ``full_tensor()``
* LBFGS; ``torch.optim.Muon`` where a matrix is cut: shard with ``granularity="tensor"``, or use ``MainWeightMuon``;
  Rprop on 0-d parameters; Adam on complex parameters; Adafactor under tensor parallelism
* ``dcp.async_save`` of weights with remainders, and of all sharded tensors with a torch that copies a DTensor as one
  without dimensions (2.11): use ``save_checkpoint_async``
* a backward through a reduction of sharded parameters, or through their ``full_tensor()``, which FSDP2 does not reduce
  over ranks
* ``load_state_dict(assign=True)`` of anything but DTensors placed like the parameters, at the load
* a backward with ``create_graph=True`` that computes gradients of sharded parameters, and ``torch.autograd.grad`` with
  these as inputs; derivatives by inputs of modules, of any order, are those of one process, and train parameters
* ``torch.func.functional_call`` with other tensors than the module's ``parameters()``
* a backward that reads weights after they were freed or changed: autograd's error, with a note that names the unit
* a backward after the caller changed a view that a unit returned in place (``unit(x).mul_(2)`` of a unit that returns
  ``y.t().t()``), as with FSDP2: ``clone()`` the output

Behave otherwise than in FSDP2:

* Main weights are float32 for trainable bfloat16 and float16 parameters too, unless
  ``MixedPrecisionPolicy(main_dtype=None)`` of this package keeps the dtype in which they were given. So such a
  parameter that is frozen when it is sharded, and stays as it is, raises at the next forward after it was unfrozen.
* ``Shard(dim)`` from ``shard_placement_fn`` is a hint without influence: rows are cut where the layout says, evenly or
  not, and ``granularity`` says what stays together. The mesh of a ``ShardPlacementResult`` counts: parameters of one
  mesh are gathered and reduced over it, and their gradients divided by its number of ranks.
* Parameters with ``fsdp_pre_all_gather`` (``torch_impl.runtime.weights.extension``) are found by their class: methods
  that a program sets on a local tensor are not called. Gathered tensors are padded to equal rows. Those that wrap their
  values in another form (torchao's NF4) have no ``full_tensor()`` and are in no checkpoint: ``save_checkpoint`` and
  ``dcp.save`` name them. ``gather_dtype`` leaves them alone. torchao's ``precompute_float8_dynamic_scale_for_fsdp``
  needs norms that are DTensors: leave the call out, and each gather computes its scales.
* ``dp_mesh_dims`` takes plain parameters as well as DTensors on all axes of the mesh.
* The tensor that a hook of ``set_all_reduce_hook`` gets has the order and the padding of the layout, and there is one
  for each group of a unit.
* With ``CPUOffloadPolicy`` sums of microbatches that wait for their reduction lie in CPU memory too, and units whose
  parameters are not sharded keep their compute weights on the device.
* All ranks must hold equal values when they shard, or load a state dict: ``set_model_state_dict`` with
  ``broadcast_from_rank0=True`` gives all the first rank's values. Some ranks may shard on the meta device beside others
  with values; until they load, a forward is refused on all ranks. Nothing else is broadcast, except for initializers
  after the meta device.
* ``load_state_dict(assign=True)`` copies into the parameters, which stay the same objects, with their dtype and their
  ties. Parameters of a unit with one dtype that are all trained or all frozen get memory together, from values of all
  of them.
* ``param.placements`` has ``RowShard``, never ``Shard(0)``. ``distribute_tensor`` and ``DTensor.from_local`` know it.
  Its ``is_shard()`` and ``is_replicate()`` are False, since rows are not cut as ``torch.chunk`` cuts: programs that cut
  or join local parts by placements take such parameters for others, and need ``full_tensor()``.
* Torch's private state of sharded modules and parameters, such as ``_get_fsdp_state()``, is not there, and a patch of
  its ``FSDPParam`` has no influence.
* A parameter of a subclass of ``nn.Parameter`` that wraps nothing becomes a plain one with its attributes.
* Sharding moves parameters to the mesh's device. Buffers and ignored parameters stay where they are.
* Hooks registered on a parameter before ``fully_shard`` are lost, with a warning. Attributes set on it survive.
* The weights of a list of modules are gathered at each module's forward, not once for all of them.
* ``reset_iter_state`` works on any sharded module and is never needed: the next forward recovers by itself.
* Sums of microbatches that are reduced in the last one are kept in ``grad_dtype``, that of the main weights by default,
  and rounded to ``reduce_dtype`` once. FSDP2 adds them up in ``reduce_dtype``.
* 0-d and non-contiguous parameters, trained parameters of several dtypes in a unit, and an inner unit's forward before
  the root's, all of which FSDP2 refuses, are taken.
* ``set_force_sum_reduction_for_comms`` has no influence: reductions are sums always.
* ``clip_grad_norm_`` returns a plain tensor that answers ``full_tensor()``, not a DTensor, so that norms over several
  meshes can be combined.
* Ranks may always use different parameters of a unit, as in FSDP2 with ``set_reduce_scatter_unused_params(True)``. A
  parameter that no rank used has no gradient all the same.
* After a forward without gradients the root reshards as other units do, unless it was given
  ``reshard_after_forward=False``.
* After a forward that does not reshard, and after any backward, ``parameters()`` and ``named_parameters()`` show
  sharded parameters, which have the gradients, also with ``set_reshard_after_backward(False)``; FSDP2 then shows whole
  weights without gradients. Until the backward has ended ``module.weight`` is the whole weight, as in FSDP2.
* Weights that are kept after a backward which reduced gradients over all axes are gathered again by the next forward,
  since a step may lie between. FSDP2 keeps them until ``reshard()``, and so gathers less between microbatches that are
  all reduced.
* ``backward(inputs=...)`` takes sharded parameters, whose gradients are reduced. FSDP2 leaves ``.grad`` None.
* A backward that reaches weights which modules show after a forward, and no output, reduces their gradients at its
  end: a loss that is computed in parts calls ``set_requires_gradient_sync(False)`` around all parts but the last.
* What a program freezes or thaws while whole weights are shown stays so, and ``zero_grad`` of a sharded module clears
  the gradients of sharded parameters then, too.
* torch's ``get_optimizer_state_dict`` before a first step runs one with a learning rate of 0, and that step counts.
  ``MainWeightAdamW.init_state()`` before it avoids the step, as ``save_checkpoint`` does.
* A view of a replicated DTensor that is changed in place (``w.t().mul_(2)`` under ``no_shard``) may not be seen by the
  next forward. Items, slices and other views that keep rows are seen.
* Moments in float16 and float8 have a scale for each row, and float8 second moments are approximate.
  ``load_checkpoint`` refuses moments of another dtype than the checkpoint's, unless ``moments="convert"``.
* ``set_optimizer_state_dict(broadcast_from_rank0=True)`` of float8 moments raises torch's "Invalid scalar type": gloo
  broadcasts no float8. Load the whole state dict on every rank.

Limits:

* Several ranks were run with gloo on CPUs only, with torch 2.11, 2.13 and 2.14; ``tests/gpu`` is what one GPU runs.
* On the CPU each buffer of a group is gathered by itself. Coalesced gathers, several under way, break the memory of a
  process with torch 2.13's gloo (``malloc(): unaligned tcache chunk detected``), also without this package. A program
  that issues some of its own at the same time as ours can still meet that.
* The optimizer is bit for bit fused AdamW on a rank's rows. Across numbers of ranks the last bit may differ on CPU,
  because torch's kernel rounds the tail of a tensor differently. So may gradients, whose sums depend on the number of
  ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from bridge.core.sharding.policy.strategy import StrategyName
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.runtime.ground.ownership import OwnedParameter
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy
from torch_impl.runtime.ground.tensor_parallel import SpmdMesh, joined_axes


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the mesh axes that are data-parallel: ``shard`` the inner one, ``replicate`` the outer one.

    Several names together are one axis. Raises ValueError if both are None.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: expected shard or replicate, got neither")
        for kind, given in (("shard", self.shard), ("replicate", self.replicate)):
            if not isinstance(given, str | list | tuple | None):
                raise TypeError(
                    f"DataParallelMeshDims.{kind}: expected a name of a mesh axis or a tuple of names, got {given!r}"
                )


def policy_of(value: object) -> MixedPrecisionPolicy:
    """None: the default. A policy of torch's is read field by field. TypeError for all else."""
    if value is None:
        return MixedPrecisionPolicy()
    if isinstance(value, fsdp.MixedPrecisionPolicy):
        given = {field.name: getattr(value, field.name) for field in fields(value)}
        known = {field.name for field in fields(MixedPrecisionPolicy)}
        for name in sorted(set(given) - known):
            refuse(f"MixedPrecisionPolicy.{name} of this torch", "use torch_impl.MixedPrecisionPolicy")
        return MixedPrecisionPolicy(**given)
    if not isinstance(value, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a torch_impl.MixedPrecisionPolicy, got {type(value).__name__}")
    return value


def offload_of(policy: object) -> CPUOffloadPolicy | None:
    """None for weights on the device; TypeError for anything that is not a policy."""
    if policy is None or type(policy) is OffloadPolicy:
        return None
    if isinstance(policy, CPUOffloadPolicy):
        return policy
    raise TypeError(f"offload_policy: expected CPUOffloadPolicy(), OffloadPolicy() or None, got {policy!r}")


def reshard_of(reshard_after_forward: object) -> bool | None:
    """NotImplementedError for a number of ranks to reshard to, TypeError unless a bool or None is given."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if isinstance(reshard_after_forward, int):
        refuse(
            f"reshard_after_forward={reshard_after_forward}",
            "use True (least memory), False (fewest gathers), or a mesh of two axes with strategy='hsdp', whose "
            "gathers stay within the inner axis",
        )
    raise TypeError(f"reshard_after_forward: expected a bool or None, got {reshard_after_forward!r}")


def meshes_of(
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    owned: Iterable[OwnedParameter],
    mesh: DataParallelMesh,
) -> list[DataParallelMesh]:
    """Over which mesh each parameter is sharded: ``mesh``, unless the function returns a ``ShardPlacementResult``.

    ``Shard(dim)``, alone or in the result, has no influence. Raises ValueError for a dimension that the parameter lacks
    and TypeError for any other result; NotImplementedError for a mesh that does not shard its innermost axis.
    """
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(
            "shard_placement_fn: expected a function of a parameter, which returns Shard(dim), a ShardPlacementResult "
            f"or None, got {shard_placement_fn!r}"
        )
    meshes = {mesh.mesh: mesh}
    chosen = []
    for one in owned:
        wanted = None if shard_placement_fn is None else shard_placement_fn(one.param)
        info = getattr(wanted, "mesh_info", None)
        placement = wanted if info is None else getattr(wanted, "placement", None)
        _check_placement(one, placement)
        its = mesh.mesh if info is None else _mesh_of(one.name, info)
        if its not in meshes:
            meshes[its] = DataParallelMesh(its)
        chosen.append(meshes[its])
    return chosen


def _check_placement(one: OwnedParameter, placement: object) -> None:
    if placement is None:
        return
    if not isinstance(placement, Shard):
        raise TypeError(
            f"shard_placement_fn: expected Shard(dim), a ShardPlacementResult or None for {one.name}, got {placement!r}"
        )
    ndim = one.param.ndim
    # A scalar has one row.
    if not -max(ndim, 1) <= placement.dim < max(ndim, 1):
        raise ValueError(
            f"shard_placement_fn: expected a dimension of {one.name}, which has {ndim}, got {placement!r}"
        )


def _mesh_of(name: str, info: Any) -> DeviceMesh:
    """The mesh of a ``FSDPMeshInfo`` or ``HSDPMeshInfo``, which torch has no public names for."""
    mesh, shard = getattr(info, "mesh", None), getattr(info, "shard_mesh_dim", None)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"shard_placement_fn: expected the mesh_info of {name} to have a DeviceMesh, got {info!r}"
        )
    if shard != mesh.ndim - 1 or mesh.ndim > 2:
        refuse(
            f"shard_placement_fn: {type(info).__name__} for {name} that shards axis {shard} of {mesh.ndim}",
            "give a mesh whose last axis shards and whose other axis, if any, replicates",
        )
    return mesh


def data_parallel_axes(
    mesh: DeviceMesh | None, dims: Any, strategy: StrategyName | None
) -> tuple[DeviceMesh, SpmdMesh, StrategyName | None]:
    """The axes of ``mesh`` that ``dims`` (ours or torch's) names, outer one first; ``mesh``; the strategy on them.

    Several names for one kind become one axis, which torch flattens. Without an axis to shard over, the strategy is
    "no_shard". Raises ValueError for a missing mesh, for names that are not those of axes in their order, and for a
    strategy that contradicts ``dims``.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ValueError("dp_mesh_dims: expected mesh= as well, got none")
    if not all(hasattr(dims, kind) for kind in ("replicate", "shard")):
        raise TypeError(
            f"dp_mesh_dims: expected a DataParallelMeshDims, got {dims!r}; "
            'DataParallelMeshDims(shard="dp") names an axis'
        )
    known = mesh.mesh_dim_names or ()
    axes: list[tuple[str, ...]] = []
    for kind in ("replicate", "shard"):
        given = getattr(dims, kind)
        listed = (given,) if isinstance(given, str) else tuple(given or ())
        for name in listed:
            if name not in known:
                raise ValueError(f"dp_mesh_dims: expected names of mesh axes, {known}, got {name!r}")
        if list(listed) != sorted(set(listed), key=known.index):
            raise ValueError(
                f"dp_mesh_dims.{kind}: expected each axis once, in the order of the mesh, {known}, got {listed}"
            )
        if listed:
            axes.append(listed)
    if len(axes) == 2 and set(axes[0]) & set(axes[1]):
        raise ValueError(f"dp_mesh_dims: expected an axis to shard or to replicate, got {dims}")
    if dims.shard is None:
        if strategy not in (None, "no_shard"):
            raise ValueError(f"strategy: expected 'no_shard' without an axis to shard over, got {strategy!r}")
        strategy = "no_shard"
    spmd = SpmdMesh(mesh, frozenset(known.index(name) for names in axes for name in names))
    return joined_axes(mesh, axes), spmd, strategy


def refuse(what: str, instead: str) -> NoReturn:
    """Raise the NotImplementedError of everything in this module."""
    raise NotImplementedError(f"{what} is not available: {instead}")


class Unavailable:
    """Methods of ``torch.distributed.fsdp.FSDPModule`` that raise NotImplementedError.

    Those that say "Only ..." accept the value that describes what this package does.
    """

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        refuse(
            "set_custom_all_gather",
            "gathers are issued by torch_impl.comm.collectives, in place in the flat buffers",
        )

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        refuse(
            "set_custom_reduce_scatter",
            "reductions are issued by torch_impl.comm.collectives, from the flat gradient buffers",
        )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Only False."""
        if enable:
            refuse(
                "set_allocate_memory_from_process_group_for_comm(True)",
                "collectives work in the flat buffers, without staging buffers; leave the call out",
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        refuse(
            "set_symm_mem_for_comm",
            "collectives work in the flat buffers, without staging buffers; leave the call out",
        )

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Only True."""
        if not unshard_in_backward:
            refuse(
                "set_unshard_in_backward(False)",
                "a backward that needs the weights after all would read freed memory; set_reshard_after_forward(False) "
                "saves the second gather",
            )

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Only False."""
        if reduce_scatter_unused_params:
            refuse(
                "set_reduce_scatter_unused_params(True)",
                "ranks may use different parameters of a unit always: one that any rank used has a gradient on all; "
                "units that only some ranks use must be merged into one",
            )

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Only 2, the number of buffers that there are."""
        if max_input_buffers != 2:
            refuse(
                f"set_reduce_scatter_max_input_buffers({max_input_buffers!r})",
                "gradient buffers of at most two units are alive; leave the call out",
            )

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Only False."""
        if enable:
            refuse(
                "set_separate_reduce_scatter_group(True)",
                "gathers and reductions share the process group of their mesh axis; leave the call out",
            )
