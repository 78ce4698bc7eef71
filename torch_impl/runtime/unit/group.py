"""A parameter group: the parameters of a unit with one dtype and one trainability.

With a float8 ``gather_dtype`` the quantized parameters form one group, and the others another. Parameters whose class
determines what is gathered also form a group, see ``extension``. The package's note defines the buffers of a group.
``group_weights`` has the buffers of weights, ``gradient`` and ``reduction`` the buffers of gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torch_impl.dtensor.local import local_of, plain_parts
from torch_impl.dtensor.refusals import set_name
from torch_impl.runtime.gradients.gradient import GradientBuffer, GroupGradient
from torch_impl.runtime.gradients.reduction import GroupReduction
from torch_impl.runtime.ground.group_spec import GroupSpec
from torch_impl.runtime.ground.ownership import OwnedParameter
from torch_impl.runtime.unit.shown import Shown, WholeByKey
from torch_impl.runtime.weights.context import UnitContext
from torch_impl.runtime.weights.group_weights import GroupWeights


class ParameterGroup:
    """The parameters of one group, ``owned`` in the order of ``spec.names``, and their weights.

    ``weights`` have no memory yet, and get it on ``device``. ``unequal``: some ranks have no values
    yet, so all ranks wait for a load.
    """

    def __init__(
        self,
        owned: Sequence[OwnedParameter],
        spec: GroupSpec,
        context: UnitContext,
        weights: GroupWeights,
        device: torch.device,
        unequal: bool,
    ) -> None:
        self._group_spec, self._context, self.weights, self.unequal = spec, context, weights, unequal
        self.names, self.host = spec.names, spec.host
        self.layout, self.mesh = spec.layout, spec.levels.mesh
        self.strategy, self.dtypes, self.shard_parameters = spec.strategy, spec.dtypes, spec.shard_parameters
        self.all_reduce_hook = spec.hook
        # Weak: modules hold the unit, which holds this group; a deleted model frees memory at once.
        self._sites = [[(weakref.ref(module), attr) for module, attr in param.sites] for param in owned]
        self._shown = Shown.MAIN
        self._shown_trainable: list[bool] = []
        weights.allocate(device, [(param.param, param.local) for param in owned])
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
        """The divisor of gradients summed over the ranks; may be set at any time."""
        return self._group_spec.divisor

    @divisor.setter
    def divisor(self, value: float) -> None:
        self._group_spec.divisor = value

    def materialize(self, device: torch.device) -> None:
        """Give weights on the meta device memory on ``device``, or on the host with offload.

        The memory contains zeros, except for weights that already have separate memory, whose values
        are taken: modules inside a unit may be materialized and initialized separately. The
        parameters remain the same objects, because an optimizer may already hold them.
        """
        planned = list(self.params)
        values = [None if param.is_meta else param.detach() for param in planned]
        main_device = device if self.host is None else self._context.device
        self.weights.allocate(main_device, [(param, param.detach().to("meta")) for param in planned])
        for param, allocated, value in zip(planned, self.params, values, strict=True):
            if value is not None:
                with torch.no_grad():
                    allocated.copy_(value)
            torch.utils.swap_tensors(param, allocated)
        self.params[:] = planned
        self._connect()
        self.attach()

    @property
    def has_memory_apart(self) -> bool:
        """Whether all weights have separate memory and the group has none: see ``materialize``."""
        return self.weights.on_meta and not any(param.is_meta for param in self.params)

    def _connect(self) -> None:
        """Make the objects that collect and reduce gradients; nothing is in progress yet."""
        spec = self._group_spec
        self._rows = [local_of(param) for param in self.params]
        for name, param in zip(spec.names, self.params, strict=True):
            set_name(param, name)
        size, device = spec.levels.gradient_size(0), self.weights.compute_device
        memory = GradientBuffer(size, spec.dtypes.reduce, device, self._context, spec.suffix)
        self.reduction = GroupReduction(spec, self.params, memory.release, self._context)
        self.gradient = GroupGradient(spec, self.unsharded, memory, self.reduction, self._context)
        self._first_version = self.weights.main_version

    def unshard(self, refresh: bool) -> None:
        """Fill the compute weights, see ``GroupWeights.gather``, after checks. Collective."""
        if self._shown is not Shown.WHOLE:
            self._check_registered()
            self._check_unfrozen()
        self.weights.gather(refresh)

    @property
    def unit_name(self) -> str:
        """The name of the unit's module below its root, or ``"root"`` for the root itself."""
        return self.weights.unit_name

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See ``explain_late_backward``: the weights that modules compute with, inside DTensors or not."""
        for name, whole in zip(self.names, self.unsharded, strict=True):
            yield from ((name, part) for part in {whole, *plain_parts(whole)})

    def show(self, shown: Shown) -> None:
        """Show the compute weights or the main weights as the modules' parameters."""
        if shown is self._shown:
            return
        # A program may freeze and unfreeze the parameters that it sees, sharded or whole.
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
            _show(module, attr, self.params[index], self.unsharded[index], shown)
        self._shown = shown

    def zero_grad(self, set_to_none: bool) -> None:
        """As ``nn.Module.zero_grad``, for sharded parameters that no module shows."""
        for param in self.params if self._shown is Shown.WHOLE else ():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    def attach(self) -> None:
        """Replace the original parameters by the sharded ones."""
        for index, module, attr in self.places():
            _register(module, attr, self.params[index])

    def places(self) -> Iterator[tuple[int, nn.Module, str]]:
        """Each registration of a parameter: index, module, attribute; several for a tied one."""
        for index, shown in enumerate(self._sites):
            for module_ref, attr in shown:
                module = module_ref()
                if module is not None:
                    yield index, module, attr

    def _check_registered(self) -> None:
        """RuntimeError for weights without memory, and for a parameter that was replaced."""
        if self.weights.on_meta:
            raise RuntimeError(
                f"parameter {self.names[0]!r} is on the meta device: call "
                "model.to_empty(device=...), then initialize the model or load a state dict into "
                "it"
            )
        if self.unequal and self.weights.main_version == self._first_version:
            raise RuntimeError(
                f"parameter {self.names[0]!r} was sharded with values on some ranks and on the "
                "meta device on others, and no values were loaded since: load one state dict on all "
                "ranks, for example by set_model_state_dict with "
                "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)"
            )
        params: list[Any] = self.params  # DTensors, which torch's stubs do not know
        for name, param, rows in zip(self.names, params, self._rows, strict=True):
            # ``to`` and ``to_empty`` of a module inside a unit replace the tensor in the parameter.
            if param._local_tensor is not rows:
                raise RuntimeError(
                    f"parameter {name!r} was converted or moved after fully_shard: expected rows "
                    f"in its unit's buffer, got {param.dtype} on {param.device} in other memory; "
                    "convert a model before sharding, and call to_empty() on a sharded module"
                )
        for index, module, attr in self.places():
            # torch.func.functional_call restores whole weights, even after these were hidden.
            if module._parameters.get(attr) is self.unsharded[index]:
                _register(module, attr, self.params[index])
            if module._parameters.get(attr) is not self.params[index]:
                raise RuntimeError(
                    f"parameter {self.names[index]!r} was replaced after fully_shard: expected the "
                    f"sharded parameter, got {type(module._parameters.get(attr)).__name__}; copy "
                    "values into it instead (copy_(), load_state_dict); parametrizations are "
                    "registered before fully_shard, and torch.func.functional_call takes the "
                    "module's own parameters() only"
                )

    def _check_unfrozen(self) -> None:
        """RuntimeError for a parameter that was frozen when sharded, and would train in its dtype."""
        main, trained = self.dtypes.main, self.dtypes.trained
        if main == trained:
            return
        for name, param in zip(self.names, self.params, strict=True):
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when fully_shard took it, and so kept {main}: "
                    "expected it to stay frozen, since trainable parameters have main weights in "
                    f"{trained}, got requires_grad=True; unfreeze it before fully_shard, or use "
                    "MixedPrecisionPolicy(main_dtype=None), with which parameters train in their "
                    "original dtype"
                )


def _show(module: nn.Module, attr: str, main: nn.Parameter, whole: nn.Parameter, shown: Shown) -> None:
    """Show a weight of a module, unless it was replaced, which the next forward refuses."""
    if isinstance(module._parameters, WholeByKey):
        vars(module)["_parameters"] = module._parameters.hide(attr)
    registered = module._parameters.get(attr)
    if registered is not main and registered is not whole:
        return
    if shown is Shown.ATTRIBUTES:
        plain = module._parameters
        both = plain if isinstance(plain, WholeByKey) else WholeByKey(plain)
        dict.__setitem__(both, attr, main)
        both.whole[attr] = main, whole
        vars(module)["_parameters"] = both
    else:
        _register(module, attr, main if shown is Shown.MAIN else whole)


def _register(module: nn.Module, attr: str, param: nn.Parameter) -> None:
    """Make ``param`` a parameter of the module."""
    # Only modules that watch assignments (RNNs cache their weights) need the slow path.
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[attr] = param
    else:
        setattr(module, attr, param)
