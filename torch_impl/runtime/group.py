"""A parameter group: the parameters of a unit with one dtype and one trainability, in one set of flat buffers.

With a float8 ``gather_dtype`` those that are quantized are a group, and the others are one.

The package's note defines the buffers: main weights, resident shard, compute weights, collected gradient, gradient.

Compute weights that are kept (parameters that are not sharded, or ``reshard_after_forward=False``) are gathered
again when the main weights have changed, whoever changed them. The group decides that from the version counter that
torch keeps for the buffer, without asking the other ranks. Every change through a DTensor, an optimizer or
``to_local()`` counts on every rank that makes it, also on ranks whose rows of the tensor are empty. A program that
edits local tensors must therefore do so on all ranks, as with every DTensor; and ``tensor.to_local().data`` hides
changes from the counter.

A gather after a change also counts as an in-place change of the compute weights, so a backward through a forward that
used the older weights raises autograd's error instead of yielding wrong gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import Placement

from bridge.sharding.layout import Layout
from bridge.sharding.strategy import Strategy
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.comm.streams import Step, Transfer
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.remainders import attach, split, written_with_remainders
from torch_impl.dtensor.tensor import make_dtensor
from torch_impl.runtime import autograd, tensor_parallel
from torch_impl.runtime.buffer import ShardLevels
from torch_impl.runtime.context import UnitContext
from torch_impl.runtime.float8 import QuantizedGather
from torch_impl.runtime.gather import CastGather, SplitGather, WeightGather
from torch_impl.runtime.gradient import GroupGradient
from torch_impl.runtime.host_memory import HOST, HostMemory
from torch_impl.runtime.ownership import OwnedParameter
from torch_impl.runtime.pool import PooledGradient, PooledWeights
from torch_impl.runtime.precision import GroupDtypes
from torch_impl.runtime.reduction import Divisor, GradientSpec, GroupReduction

Version: TypeAlias = tuple[int, ...]


class ParameterGroup:
    """Buffers and parameters of one group. ``owned`` names the parameters in the order of ``layout.slots``.

    ``context`` is that of the unit, whose groups ``suffix`` tells apart in reports. ``host``: main weights and
    gradients lie there, not on ``device``. ``unequal``: some ranks have no values yet, so all wait for some.
    """

    def __init__(
        self,
        owned: Sequence[OwnedParameter],
        layout: Layout,
        mesh: DataParallelMesh,
        device: torch.device,
        strategy: Strategy,
        dtypes: GroupDtypes,
        divisor: float,
        context: UnitContext,
        suffix: str,
        host: HostMemory | None = None,
        unequal: bool = False,
    ) -> None:
        self.host, self.unequal = host, unequal
        self.layout, self.mesh, self.strategy, self.dtypes = layout, mesh, strategy, dtypes
        self.levels = ShardLevels(layout, mesh, strategy.optimizer)
        self.names = [one.name for one in owned]
        self.tensor_parallel = [one.tensor_parallel for one in owned]
        # Weakly: a module holds its unit, the unit this group, and a deleted model is to free its memory at once.
        self._sites = [[(weakref.ref(module), attr) for module, attr in one.sites] for one in owned]
        self._divisor = Divisor(divisor)
        self._context, self._suffix = context, suffix
        self._shows_whole = False
        self.params: list[nn.Parameter]
        self._allocate(device, [(one.param, one.local) for one in owned])
        self._connect()
        self._first_version = self._main_version

    @property
    def divisor(self) -> float:
        """By what gradients summed over the ranks are divided; may be set at any time."""
        return self._divisor.value

    @divisor.setter
    def divisor(self, value: float) -> None:
        self._divisor.value = value

    def materialize(self, device: torch.device) -> None:
        """Give weights that were planned on the meta device memory on ``device``, or where they belong with offload.

        They are zeros.

        The parameters stay the same objects, for an optimizer that holds them already.
        """
        planned = self.params
        place = device if self.host is None else self._context.device
        self._allocate(place, [(param, param) for param in planned])
        for param, allocated in zip(planned, self.params, strict=True):
            torch.utils.swap_tensors(param, allocated)
        self.params = planned
        self._connect()
        self._first_version = self._main_version
        self._register(self.params)

    @property
    def on_meta(self) -> bool:
        """Whether the weights have shapes, but no memory yet."""
        return self.main.flat.is_meta

    def _allocate(
        self,
        device: torch.device,
        given: Sequence[tuple[nn.Parameter, torch.Tensor]],
    ) -> None:
        """Make buffers and parameters like the given ones, with the values beside them if those have any."""
        strategy, dtypes = self.strategy, self.dtypes
        place, pinned = device, False
        if self.host is not None and device.type != "meta":
            place, pinned = HOST, self.host.pinned
        stored = torch.int16 if dtypes.remainders else dtypes.main
        self.main = self.levels.buffer(strategy.optimizer, stored, place, pinned)
        self.gather = self._gather_on(device)
        as_they_are = dtypes.compute == dtypes.main and dtypes.gather is None and self.host is None
        if not strategy.optimizer and as_they_are:
            self.compute = self.main
            views = [self.main.view(name) for name in self.names]
        else:
            self.compute = self.levels.buffer(0, dtypes.compute, device)
            # .data: writing the gathered weights must not count as a change of the tensors that autograd saved.
            views = [self.compute.view(name).data for name in self.names]
        # From the values as given: main weights built from weights cast to bfloat16 train to other losses.
        self.params = [
            self._main_parameter(index, *one, view)
            for index, (one, view) in enumerate(zip(given, views, strict=True))
        ]
        # On the meta device nothing is to be freed.
        if not (self.compute is self.main or dtypes.remainders or self.on_meta):
            self.compute.free()
        self.unsharded = [
            nn.Parameter(
                view if others is None else others.wrap(view),
                requires_grad=view.is_floating_point() or view.is_complex(),
            )
            for view, others in zip(views, self.tensor_parallel, strict=True)
        ]
        # Marks that a program put on its parameters steer optimizers, and kernels.
        for (param, _), *copies in zip(given, self.params, self.unsharded, strict=True):
            marks = {key: value for key, value in vars(param).items() if key != tensor_parallel.MARK}
            for copy in copies:
                vars(copy).update(marks)

    def _gather_on(self, device: torch.device) -> WeightGather:
        levels, strategy, dtypes = self.levels, self.strategy, self.dtypes
        if dtypes.remainders:
            return SplitGather(levels, strategy)
        if dtypes.gather is not None:
            return QuantizedGather(levels, strategy, dtypes.gather, device, self.tensor_parallel)
        return CastGather(levels, strategy, dtypes.compute, device, fetches=self.host is not None)

    def _connect(self) -> None:
        """Make what works on the buffers and parameters: gather, collect, reduce; nothing is under way."""
        context, suffix, dtypes = self._context, self._suffix, self.dtypes
        self._rows = [local_of(param) for param in self.params]
        spec = GradientSpec(
            self.names,
            self.params,
            self.tensor_parallel,
            self.levels,
            self.strategy,
            dtypes,
            self._divisor,
            self.host,
        )
        memory = PooledGradient(self.levels.size(0), dtypes.reduce, self.compute.flat.device, context, suffix)
        self.reduction = GroupReduction(spec, memory, context)
        self.gradient = GroupGradient(spec, self.unsharded, memory, self.reduction, context)
        finish = autograd.weakly(self._finish_transfer)
        self.weights = PooledWeights(self.names, self.compute, self.unsharded, finish, context, suffix)
        self._transfer: Transfer | None = None
        self._gathered_version: Version | None = None
        self._kept_version: Version | None = None
        self._started_version: Version | None = None

    @property
    def gathers(self) -> bool:
        """Whether compute weights come from a gather; else, under no_shard, they are the main weights."""
        return self.compute is not self.main and (self.strategy.optimizer > 0 or not self.dtypes.remainders)

    @property
    def _main_version(self) -> Version:
        """Another one after each write to the main weights."""
        if self.dtypes.remainders:
            return tuple(local_of(param)._version for param in self.params)
        return (self.main.flat._version,)

    def start_unshard(self, refresh: bool) -> bool:
        """Begin to fill the compute weights if they are freed or, with ``refresh``, older than the main weights.

        A collective when it returns True; else nothing is to be done, or it has begun already.
        """
        if not self.gathers or self._transfer is not None:
            return False
        version, gathered = self._main_version, self._gathered_version
        # Freed weights have no contents; those of an interrupted gather are arbitrary.
        if self.compute.allocated and gathered is not None and not (refresh and version != gathered):
            return False
        self._gathered_version = None  # until it has succeeded
        # Own rows, with remainders, lie in what is gathered: their versions are those of the compute weights.
        with written_with_remainders(map(local_of, self.params)):
            target = self.weights.prepare(changed=version != gathered)
        version = self._main_version
        with torch.no_grad():
            self._transfer = self._context.streams.start(self._gather_steps(version, target))
        self._started_version = version
        return True

    def unshard(self, refresh: bool) -> None:
        """Fill the compute weights, see ``start_unshard``, and wait for them. Collective."""
        if not self._shows_whole:
            self._check_registered()
            self._check_unfrozen()
        if self._transfer is not None or self.start_unshard(refresh):
            self._finish_transfer()
            # A gather ahead may have begun before the program changed the main weights.
            if refresh and self.start_unshard(refresh):
                self._finish_transfer()
        self.weights.settle()

    def free(self) -> None:
        """Release the compute weights, if they have memory of their own."""
        if self.compute is not self.main:
            # Else the gather would write to memory that others have by then.
            self._finish_transfer()
            self.weights.release()

    @property
    def gathering(self) -> bool:
        """Whether compute weights are on their way."""
        return self._transfer is not None or self.weights.aside

    def _finish_transfer(self) -> None:
        if self._transfer is not None:
            transfer, self._transfer = self._transfer, None
            transfer.finish()
            # Of the start: what changed since is not in the gathered weights.
            self._gathered_version = self._kept_version = self._started_version

    def _gather_steps(self, version: Version, target: torch.Tensor) -> list[Step]:
        current = self._kept_version == version
        if not current:
            self._kept_version = None  # until it has succeeded
        return self.gather.steps(self.main.flat, target, current)

    def show(self, unsharded: bool) -> None:
        """Show the compute weights or the main weights as the modules' parameters."""
        if unsharded == self._shows_whole:
            return
        # A program may freeze and unfreeze the parameters that it sees, which are the sharded ones.
        if unsharded:
            for sharded, whole in zip(self.params, self.unsharded, strict=True):
                if whole.requires_grad != sharded.requires_grad:
                    whole.requires_grad_(sharded.requires_grad)
        self._register(self.unsharded if unsharded else self.params)
        self._shows_whole = unsharded

    def attach(self) -> None:
        """Put the sharded parameters in the place of the given ones."""
        self._register(self.params)

    def places(self) -> Iterator[tuple[int, nn.Module, str]]:
        """Where parameters are registered: index, module, attribute; a tied parameter has several places."""
        for index, shown in enumerate(self._sites):
            for module_ref, attr in shown:
                module = module_ref()
                if module is not None:
                    yield index, module, attr

    def _register(self, params: Sequence[nn.Parameter]) -> None:
        for index, module, attr in self.places():
            _set_parameter(module, attr, params[index])

    def _check_registered(self) -> None:
        """RuntimeError for weights without memory, and for a sharded parameter that someone replaced."""
        if self.on_meta:
            raise RuntimeError(
                f"parameter {self.names[0]!r} is on the meta device: call model.to_empty(device=...), then initialize "
                "the model or load a state dict into it"
            )
        if self.unequal and self._main_version == self._first_version:
            raise RuntimeError(
                f"parameter {self.names[0]!r} was sharded with values on some ranks and on the meta device on others, "
                "and none were loaded since: load one state dict on all ranks, for example by set_model_state_dict "
                "with StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)"
            )
        for name, param, rows in zip(self.names, self.params, self._rows, strict=True):
            # ``to`` and ``to_empty`` of a module inside a unit exchange what the parameter holds.
            if local_of(param) is not rows:
                raise RuntimeError(
                    f"parameter {name!r} was converted or moved after fully_shard: expected rows in its unit's buffer, "
                    f"got {param.dtype} on {param.device} in other memory; convert a model before sharding, and call "
                    "to_empty() on a sharded module"
                )
        for index, module, attr in self.places():
            if module._parameters.get(attr) is not self.params[index]:
                raise RuntimeError(
                    f"parameter {self.names[index]!r} was replaced after fully_shard: expected the sharded parameter, "
                    f"got {type(module._parameters.get(attr)).__name__}; copy values into it instead (copy_(), "
                    "load_state_dict)"
                )

    def _check_unfrozen(self) -> None:
        """RuntimeError for a parameter that was frozen when it was sharded, and would now train in its given dtype."""
        main, trained = self.dtypes.main, self.dtypes.trained
        if main == trained:
            return
        for name, param in zip(self.names, self.params, strict=True):
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when fully_shard took it, and so kept {main}: expected it to stay "
                    f"frozen, since trainable parameters have main weights in {trained}, got requires_grad=True; "
                    "unfreeze it before fully_shard, or train frozen parameters in the dtype in which they were given "
                    "by MixedPrecisionPolicy(main_dtype=None)"
                )

    def _main_parameter(
        self, index: int, param: nn.Parameter, local: torch.Tensor, whole: torch.Tensor
    ) -> nn.Parameter:
        axes, given, name = self.strategy.optimizer, self.tensor_parallel[index], self.names[index]
        stored, bounds = self.main.view(name), None
        if axes:
            bounds = self.levels.row_bounds(axes, name)
        view = stored
        if self.dtypes.remainders:
            first = 0 if bounds is None else bounds[self.mesh.index(axes)] * self.layout.slot(name).row_size
            view = whole.view(-1)[first : first + stored.numel()].view(stored.shape)
        if axes and bounds is not None and not local.is_meta:
            here = self.mesh.index(axes)
            local = (
                local.reshape(-1, *view.shape[1:])[bounds[here] : bounds[here + 1]] if view.numel() else view
            )
        if self.dtypes.remainders:
            if not local.is_meta:
                split(local.to(self.dtypes.main), view, stored)
            attach(view, stored, autograd.weakly(self._finish_transfer))
        elif not local.is_meta:
            view.copy_(local)
        mesh = self.mesh.mesh
        others: tuple[Placement, ...] = ()
        if given is not None:
            mesh, others = given.joint_mesh(mesh), given.placements
        tensor = make_dtensor(view, mesh, param.shape, bounds, axes=max(axes, 1), tensor_parallel=others)
        return nn.Parameter(tensor, requires_grad=param.requires_grad)


def _set_parameter(module: nn.Module, attr: str, param: nn.Parameter) -> None:
    # Only modules that watch assignments (RNNs cache their weights) need the slow way.
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[attr] = param
    else:
        setattr(module, attr, param)
