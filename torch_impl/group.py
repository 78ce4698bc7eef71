"""A parameter group: the parameters of a unit with one dtype and one trainability, in one set of flat buffers.

    main weights     what the optimizer updates and ``parameters()`` shows at rest; whole (no_shard) or one shard
    compute weights  whole, in the dtype of forward and backward; gathered from the main weights, freed by a reshard.
                     Under no_shard in the main dtype they are the main weights themselves
    gradient         see ``gradient``

Compute weights that are kept (all strategies but optim_grads_params, or ``reshard_after_forward=False``) are gathered
again when the main weights have changed, whoever changed them. "Changed" is decided from the version counter that torch
keeps for the buffer, without asking the other ranks: every change through a DTensor, an optimizer or ``to_local()``
counts on every rank that makes it, also on ranks whose rows of the tensor are empty. A program that edits local tensors
must therefore do so on all ranks, as with every DTensor; and ``tensor.to_local().data`` hides changes from the counter.

A gather after a change also counts as an in-place change of the compute weights, so a backward through a forward that
used the older weights raises autograd's error instead of yielding wrong gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torch_impl import collectives
from torch_impl.buffer import FlatBuffer
from torch_impl.dtensor import make_dtensor
from torch_impl.gradient import GroupGradient
from torch_impl.layout import Layout
from torch_impl.ownership import OwnedParameter
from torch_impl.placement import Strategy
from torch_impl.precision import GroupDtypes


class ParameterGroup:
    """Buffers and parameters of one group. ``owned`` names the parameters in the order of ``layout.slots``."""

    def __init__(
        self,
        owned: Sequence[OwnedParameter],
        layout: Layout,
        mesh: DeviceMesh,
        device: torch.device,
        strategy: Strategy,
        dtypes: GroupDtypes,
        divisor: float,
    ) -> None:
        self.layout, self.mesh, self.strategy, self.dtypes = layout, mesh, strategy, dtypes
        self.names = [one.name for one in owned]
        self._sites = [[(weakref.ref(module), attr) for module, attr in one.sites] for one in owned]
        rank = mesh.get_local_rank() if strategy.shard_optimizer else None
        self.main = FlatBuffer(layout, dtypes.main, device, rank)
        self.params = [self._main_parameter(one) for one in owned]
        if not strategy.shard_optimizer and dtypes.compute == dtypes.main:
            self.compute = self.main
            views = [self.main.view(name) for name in self.names]
        else:
            self.compute = FlatBuffer(layout, dtypes.compute, device, None)
            # .data: writing the gathered weights must not count as a change of the tensors that autograd saved.
            views = [self.compute.view(name).data for name in self.names]
            self.compute.free()
        self.unsharded = [nn.Parameter(view, requires_grad=False) for view in views]
        for one, *copies in zip(owned, self.params, self.unsharded, strict=True):
            for copy in copies:
                vars(copy).update(vars(one.param))
        self.gradient = GroupGradient(
            self.names, self.params, layout, mesh, strategy.shard_optimizer, dtypes, divisor
        )
        self._gathered_version: int | None = None

    def on_gradient(self, arrived: Callable[[ParameterGroup, int], None]) -> None:
        """Call ``arrived(group, index)`` in backward when the gradient of an unsharded parameter is complete."""
        # The hook lives on a tensor of this group: a strong reference would be a cycle.
        this, method = weakref.ref(self), weakref.WeakMethod(arrived)
        for index, param in enumerate(self.unsharded):

            def hook(_: torch.Tensor, index: int = index) -> None:
                group, call = this(), method()
                if group is not None and call is not None:
                    call(group, index)

            param.requires_grad_(param.is_floating_point() or param.is_complex())
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(hook)

    def unshard(self, refresh: bool) -> None:
        """Fill the compute weights if they are freed or, with ``refresh``, older than the main weights. Collective."""
        if self.compute is self.main:
            return
        version, gathered = self.main.flat._version, self._gathered_version
        if self.compute.allocated and gathered is not None and not (refresh and version != gathered):
            return
        self._gathered_version = None  # until it has succeeded
        self.compute.allocate()
        with torch.no_grad():
            if self.strategy.shard_optimizer:
                shard = self.main.flat.to(self.dtypes.compute)
                slices = self.layout.buffer_slices()
                outputs = [self.compute.flat[whole] for whole, _ in slices]
                collectives.all_gather(outputs, [shard[part] for _, part in slices], self.mesh.get_group())
            else:
                self.compute.flat.copy_(self.main.flat)
        if version != gathered:
            for param in self.unsharded:
                torch.autograd.graph.increment_version(param)
        self._gathered_version = version

    def free(self) -> None:
        """Release the compute weights, if they have memory of their own."""
        if self.compute is not self.main:
            self.compute.free()

    def register(self, unsharded: bool) -> None:
        """Show the compute weights or the main weights as the modules' parameters."""
        for shown, sharded, whole in zip(self._sites, self.params, self.unsharded, strict=True):
            if unsharded and whole.requires_grad != sharded.requires_grad:
                whole.requires_grad_(sharded.requires_grad)
            for module_ref, attr in shown:
                module = module_ref()
                if module is not None:
                    _set_parameter(module, attr, whole if unsharded else sharded)

    def check_registered(self) -> None:
        """RuntimeError if someone replaced a sharded parameter, whose changes would then be ignored."""
        for name, shown, sharded in zip(self.names, self._sites, self.params, strict=True):
            for module_ref, attr in shown:
                module = module_ref()
                if module is not None and module._parameters.get(attr) is not sharded:
                    raise RuntimeError(
                        f"parameter {name!r} was replaced after fully_shard: expected the sharded parameter, got "
                        f"{type(module._parameters.get(attr)).__name__}; copy values into it instead (copy_(), "
                        "load_state_dict without assign=True)"
                    )

    def _main_parameter(self, one: OwnedParameter) -> nn.Parameter:
        bounds = None if self.main.rank is None else self.layout.row_bounds(one.name)
        shape = self.layout.slot(one.name).shape
        tensor = make_dtensor(self.main.view(one.name), self.mesh, shape, bounds)
        tensor.copy_(one.param.detach())
        return nn.Parameter(tensor, requires_grad=one.param.requires_grad)


def _set_parameter(module: nn.Module, attr: str, param: nn.Parameter) -> None:
    # Only modules that watch assignments (RNNs cache their weights) need the slow way.
    if type(module).__setattr__ is nn.Module.__setattr__:
        module._parameters[attr] = param
    else:
        setattr(module, attr, param)
