"""A parameter group: the parameters of a unit with one dtype and one trainability, and what becomes of them.

With a float8 ``gather_dtype`` those that are quantized are a group, and the others are one. Those that say themselves
what is gathered of them are one too, see ``extension``.

Where the weights lie is the business of ``flat_weights`` or ``extended_weights``. The package's note defines the
buffers: main weights, resident shard, compute weights, collected gradient, gradient.

Compute weights that are kept (parameters that are not sharded, or ``reshard_after_forward=False``) are gathered
again by the first forward after a backward that reduced gradients over all axes, unless all of the group is frozen.
Whether this rank's main weights have changed does not matter there: an optimizer may pass over rows that are empty or
have no gradient, on some ranks only. Other changes (a loaded state dict, an edit between two forwards) are known from
the version counter that torch keeps for the buffer. Every change through a DTensor, an optimizer or ``to_local()``
counts on every rank that makes it, also on ranks whose rows of the tensor are empty; ``tensor.to_local().data`` hides
changes from the counter. Ranks whose counters disagree get an error that names them, see ``require_all_ranks``.

A gather after a change also counts as an in-place change of the compute weights, so a backward through a forward that
used the older weights raises autograd's error instead of yielding wrong gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from bridge.core.sharding.policy.strategy_collectives import keeps_shard
from bridge.core.text import first_of
from torch_impl.comm.agreement import require_all_ranks
from torch_impl.comm.collective_order import CollectiveOrder
from torch_impl.comm.streams import Transfer
from torch_impl.dtensor.local import local_of, plain_parts
from torch_impl.dtensor.refusals import set_name
from torch_impl.runtime.gradients.gradient import GroupGradient
from torch_impl.runtime.gradients.gradient_spec import AllReduceHook, Divisor, GradientSpec
from torch_impl.runtime.gradients.reduction import GroupReduction
from torch_impl.runtime.ground import autograd
from torch_impl.runtime.ground.ownership import OwnedParameter
from torch_impl.runtime.memory.pool import PooledGradient
from torch_impl.runtime.unit.shown import Shown, register, show
from torch_impl.runtime.weights.group_weights import GroupSpec, GroupWeights, Version

# Parameters in an error.


class ParameterGroup:
    """Parameters of one group, which are ``owned`` in the order of ``spec.names``, and what works on their weights.

    ``weights`` have no memory yet, and get it on ``device``. ``unequal``: some ranks have no values yet, so all wait
    for some.
    """

    def __init__(
        self,
        owned: Sequence[OwnedParameter],
        spec: GroupSpec,
        weights: GroupWeights,
        device: torch.device,
        divisor: float,
        unequal: bool,
    ) -> None:
        self._group_spec, self.weights, self.unequal = spec, weights, unequal
        self.names, self.host = spec.names, spec.host
        self.layout, self.mesh = spec.layout, spec.levels.mesh
        # Not in _connect(), which a rank that loads the group from the meta device calls more often than other ranks.
        self._order = CollectiveOrder(self.mesh)
        self.strategy, self.dtypes = spec.strategy, spec.dtypes
        # Weakly: a module holds its unit, the unit this group, and a deleted model is to free its memory at once.
        self._sites = [[(weakref.ref(module), attr) for module, attr in one.sites] for one in owned]
        self._divisor, self.all_reduce_hook = Divisor(divisor), AllReduceHook()
        self._shown = Shown.MAIN
        self._shown_trainable: list[bool] = []
        # Which parameters train: what all ranks have been found to have alike, as fully_shard compares it.
        self._agreed_trainable = {tuple(one.param.requires_grad for one in owned)}
        # Weakly, as above.
        self._finish = autograd.weakly(self._finish_transfer)
        weights.allocate(device, [(one.param, one.local) for one in owned], self._finish)
        self._connect()

    @property
    def params(self) -> list[nn.Parameter]:
        """The sharded parameters, over the main weights."""
        return self.weights.params

    @property
    def unsharded(self) -> list[nn.Parameter]:
        """The whole parameters, over the compute weights."""
        return self.weights.unsharded

    @property
    def divisor(self) -> float:
        """By what gradients summed over the ranks are divided; may be set at any time."""
        return self._divisor.value

    @divisor.setter
    def divisor(self, value: float) -> None:
        self._divisor.value = value

    def materialize(self, device: torch.device) -> None:
        """Give weights that were planned on the meta device memory on ``device``, or where they belong with offload.

        They are zeros, but for those that have memory of their own, whose values are taken: modules inside a unit may
        be materialized and initialized by themselves. The parameters stay the same objects, for an optimizer that holds
        them already.
        """
        planned = list(self.params)
        values = [None if param.is_meta else param.detach() for param in planned]
        place = device if self.host is None else self._group_spec.context.device
        self.weights.allocate(place, [(param, param.detach().to("meta")) for param in planned], self._finish)
        for param, allocated, value in zip(planned, self.params, values, strict=True):
            if value is not None:
                with torch.no_grad():
                    allocated.copy_(value)
            torch.utils.swap_tensors(param, allocated)
        self.params[:] = planned
        self._connect()
        self._register(self.params)

    @property
    def apart(self) -> bool:
        """Whether all weights have memory of their own, and the group still has none: see ``materialize``."""
        return self.on_meta and not any(param.is_meta for param in self.params)

    @property
    def on_meta(self) -> bool:
        """Whether the weights have shapes, but no memory yet."""
        return self.weights.on_meta

    def _connect(self) -> None:
        """Make what works on the buffers and parameters: gather, collect, reduce; nothing is under way."""
        its = self._group_spec
        self._rows = [local_of(param) for param in self.params]
        for name, param in zip(its.names, self.params, strict=True):
            set_name(param, name)
        spec = GradientSpec(
            its.names,
            self.params,
            its.tensor_parallel,
            its.levels,
            its.strategy,
            its.dtypes,
            self._divisor,
            self.all_reduce_hook,
            its.host,
        )
        memory = PooledGradient(
            its.levels.gradient_size(0),
            its.dtypes.reduce,
            self.weights.compute_device,
            its.context,
            its.suffix,
        )
        self.reduction = GroupReduction(spec, memory, its.context, self._order)
        self.gradient = GroupGradient(spec, self.unsharded, memory, self.reduction, its.context)
        self._first_version = self.weights.main_version
        self._transfer: Transfer | None = None
        # Whether the next forward gathers, though the compute weights may be current: equal on all ranks.
        self._due = False
        self._gathered_version: Version | None = None
        self._kept_version: Version | None = None
        self._started_version: Version | None = None

    def step_may_follow(self) -> None:
        """A backward left gradients that are reduced: rows on any rank may change until the next forward.

        No optimizer changes a group that is frozen, see ``_require_same_trainable``.
        """
        trains = any(param.requires_grad for param in (*self.params, *self.unsharded))
        self._due |= trains and self.strategy.optimizer > 0 and self.mesh.size > 1

    def start_unshard(self, refresh: bool) -> bool:
        """Begin to fill the compute weights if they are freed or, with ``refresh``, older than the main weights.

        A collective when it returns True; else nothing is to be done, or it has begun already.
        """
        weights = self.weights
        if not weights.gathers or self._transfer is not None:
            return False
        version, gathered = weights.main_version, self._gathered_version
        changed, current = version != gathered, version == self._kept_version and not self._due
        # Freed weights have no contents; those of an interrupted gather are arbitrary.
        kept = weights.allocated and gathered is not None
        if kept and not (refresh and (changed or self._due)):
            return False
        # Other ranks gather anyway, unless whole weights are kept, or shards between them and the main weights.
        resident = self._kept_version is not None and keeps_shard(self.strategy)
        if changed and not self._due and (kept or resident):
            self._require_change_everywhere()
        self._require_same_trainable()
        self._order.begin(f"weights of {self.names[0]!r} (unit {self.unit_name}) are gathered")
        self._due = False
        self._gathered_version = None  # until it has succeeded
        if not current:
            self._kept_version = None
        with torch.no_grad():
            steps = weights.steps(changed, current)
            # Own rows, with remainders, lie in what is gathered: their versions are those of the compute weights.
            version = weights.main_version
            self._transfer = self._group_spec.context.streams.start(steps)
        self._started_version = version
        return True

    def _require_change_everywhere(self) -> None:
        """RuntimeError if only some ranks have changed their main weights, and would gather."""
        if self.strategy.optimizer > 0 and self.mesh.size > 1:
            require_all_ranks(
                f"main weights of {self.names[0]!r} (unit {self.unit_name}) were changed between forwards",
                self.mesh,
                "a change outside of a training step must be made on all ranks, also where rows are empty: write to "
                "the DTensor, or to to_local() without a condition on its size or values",
            )

    def _require_same_trainable(self) -> None:
        """RuntimeError if only some ranks have frozen parameters since, and would not reduce what others reduce."""
        trainable = tuple(param.requires_grad for param in self.params)
        if trainable in self._agreed_trainable or self.mesh.size == 1:
            return
        frozen = [name for name, trains in zip(self.names, trainable, strict=True) if not trains]
        require_all_ranks(
            f"{len(frozen)} of {len(self.names)} parameters of unit {self.unit_name} are frozen "
            f"({first_of(frozen)})",
            self.mesh,
            "call requires_grad_() with the same value for a parameter on all ranks, before the same forward",
        )
        self._agreed_trainable.add(trainable)

    def unshard(self, refresh: bool) -> None:
        """Fill the compute weights, see ``start_unshard``, and wait for them. Collective."""
        if self._shown is not Shown.WHOLE:
            self._check_registered()
            self._check_unfrozen()
        if self._transfer is not None or self.start_unshard(refresh):
            self._finish_transfer()
            # A gather ahead may have begun before the program changed the main weights.
            if refresh and self.start_unshard(refresh):
                self._finish_transfer()
        self.weights.settle()

    @property
    def unit_name(self) -> str:
        """Name of the unit's module below its root, ``"root"`` of the root itself."""
        return self._group_spec.context.name or "root"

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``late_backward``: what modules compute with, wrapped in DTensors or not."""
        for name, whole in zip(self.names, self.unsharded, strict=True):
            yield from ((name, part) for part in {whole, *plain_parts(whole)})

    def free(self) -> None:
        """Release the compute weights, if they have memory of their own."""
        if self.weights.separate:
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

    def show(self, shown: Shown) -> None:
        """Show the compute weights or the main weights as the modules' parameters."""
        if shown is self._shown:
            return
        # A program may freeze and unfreeze the parameters that it sees, be they sharded or whole.
        if self._shown is not Shown.MAIN:
            for sharded, whole, before in zip(
                self.params, self.unsharded, self._shown_trainable, strict=True
            ):
                if whole.requires_grad != before:
                    sharded.requires_grad_(whole.requires_grad)
        if shown is not Shown.MAIN:
            for sharded, whole in zip(self.params, self.unsharded, strict=True):
                if whole.requires_grad != sharded.requires_grad:
                    whole.requires_grad_(sharded.requires_grad)
            self._shown_trainable = [whole.requires_grad for whole in self.unsharded]
        for index, module, attr in self.places():
            show(module, attr, self.params[index], self.unsharded[index], shown)
        self._shown = shown

    def zero_grad(self, set_to_none: bool) -> None:
        """As ``nn.Module.zero_grad``, of sharded parameters that no module shows."""
        for param in self.params if self._shown is Shown.WHOLE else ():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

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
            register(module, attr, params[index])

    def _check_registered(self) -> None:
        """RuntimeError for weights without memory, and for a sharded parameter that someone replaced."""
        if self.on_meta:
            raise RuntimeError(
                f"parameter {self.names[0]!r} is on the meta device: call model.to_empty(device=...), then initialize "
                "the model or load a state dict into it"
            )
        if self.unequal and self.weights.main_version == self._first_version:
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
            # torch.func.functional_call puts back whole weights that it has read, also after these were hidden.
            if module._parameters.get(attr) is self.unsharded[index]:
                register(module, attr, self.params[index])
            if module._parameters.get(attr) is not self.params[index]:
                raise RuntimeError(
                    f"parameter {self.names[index]!r} was replaced after fully_shard: expected the sharded parameter, "
                    f"got {type(module._parameters.get(attr)).__name__}; copy values into it instead (copy_(), "
                    "load_state_dict); parametrizations are registered before fully_shard, and "
                    "torch.func.functional_call takes the module's own parameters() only"
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
