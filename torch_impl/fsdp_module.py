"""The methods of a sharded module: the methods of ``torch.distributed.fsdp.FSDPModule`` and more."""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_impl.fsdp2 import Unavailable
from torch_impl.options import check_divisor
from torch_impl.runtime.memory.pool_plan import BufferPlan
from torch_impl.runtime.unit.memory_report import MemoryReport, memory_report
from torch_impl.runtime.unit.unit import Unit

_COPY_ADVICE = (
    "build the module again, shard it and load a state dict into it (torch_impl.save_checkpoint/load_checkpoint, or "
    "state_dict())"
)


class UnshardHandle:
    """A gather of compute weights in progress, from ``unshard(async_op=True)``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait for the weights and make them the module's parameters.

        Calls after the first do nothing, and so does a call after a forward that has used and freed the weights.
        """
        # A handle must not keep the memory of a deleted model alive.
        unit, self._unit = self._unit, None
        if unit is not None and unit.has_weights:
            unit.unshard()


class FSDPModule(Unavailable):
    """Mixed into the class of a sharded module. ``recurse`` methods also reach the sharded modules below.

    Methods that FSDP2 has and this package does not are in ``Unavailable`` and raise NotImplementedError.
    """

    _unit: Unit
    _original_class: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an unsharded module of the class, as slicing a sharded ``nn.Sequential`` does."""
        if cls is FSDPModule:
            raise TypeError("FSDPModule cannot be constructed: call torch_impl.fully_shard(module)")
        return cls._original_class(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        open_calls = self._unit.open_calls
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # mixed into an nn.Module
        except BaseException:
            # Not a forward hook: torch does not call them after a KeyboardInterrupt.
            self._unit.drop_open_calls(open_calls)
            raise

    def _as_forward(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function`` as if it were this module's forward."""
        unit, open_calls = self._unit, self._unit.open_calls
        assert isinstance(self, nn.Module)
        try:
            args, kwargs = unit.pre_forward(self, args, kwargs)
            return unit.post_forward(self, args, function(*args, **kwargs))
        except BaseException:
            unit.drop_open_calls(open_calls)
            raise

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's compute weights and show them as its parameters until ``reshard``. Collective.

        With ``async_op`` the gather only begins, and the returned handle shows the weights when ``wait`` is called. A
        forward of the module waits automatically.
        """
        _check_truth("async_op", async_op)
        if async_op:
            self._unit.start_unshard()
            return UnshardHandle(self._unit)
        self._unit.unshard()
        return None

    def reshard(self) -> None:
        """Show the sharded main weights again; free the compute weights unless the strategy keeps them."""
        self._unit.reshard()

    def reset_iter_state(self) -> None:
        """Drop the state of an interrupted forward or backward, and all gradients, of this and the modules below.

        Not needed after an exception: the next forward recovers automatically, and so does ``zero_grad``.
        """
        for unit in self._units(True):
            unit.drop_open_calls(0)
            unit.abandon_backward()
            for group in unit.groups:
                for param in group.params:
                    param.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any module, also for sharded parameters that are currently replaced by whole weights."""
        self._unit.schedule.recover()
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the module's own class
        for unit in self._units(True):
            for group in unit.groups:
                group.zero_grad(set_to_none)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """With False, the next backwards keep gradients unreduced on each rank, whatever the strategy.

        Also sets ``set_requires_all_reduce``, as in FSDP2.
        """
        _check_truth("requires_gradient_sync", requires_gradient_sync)
        for unit in self._units(recurse):
            unit.gradients.requires_gradient_sync = requires_gradient_sync
            unit.gradients.requires_all_reduce = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """With False, the next backwards reduce only over the axes that shard gradients."""
        _check_truth("requires_all_reduce", requires_all_reduce)
        for unit in self._units(recurse):
            unit.gradients.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """With False, reduction over axes that do not shard gradients is postponed; the final result is the same."""
        _check_truth("is_last_backward", is_last_backward)
        for unit in self._units(True):
            unit.gradients.last_backward = is_last_backward

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Run all backwards except the last microbatch's: ``set_is_last_backward(False)``, restored on exit."""
        units = list(self._units(True))
        before = [unit.gradients.last_backward for unit in units]
        self.set_is_last_backward(False)
        try:
            yield
        finally:
            for unit, value in zip(units, before, strict=True):
                unit.gradients.last_backward = value

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether sharded parameters free their compute weights between forward and backward."""
        _check_bool("reshard_after_forward", reshard_after_forward)
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """With False, compute weights stay after backward, for the next microbatch; at the cost of their memory.

        After a backward that reduced gradients over all axes, the next forward gathers again, because an optimizer step
        may have run in between: microbatches save the gather inside ``no_sync()``.
        """
        _check_bool("reshard_after_backward", reshard_after_backward)
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Begin to gather the weights of these sharded modules when this one has its own weights in forward.

        This replaces the gather of the module that is expected next, and works with ``prefetch=0`` too.
        """
        units = _units_of("set_modules_to_forward_prefetch", modules)
        self._unit.forward_prefetch = tuple(unit.reference for unit in units)

    def set_modules_to_backward_prefetch(self, modules: Iterable[FSDPModule]) -> None:
        """Begin to gather the weights of these sharded modules when this one has its own weights in backward.

        This replaces the gather of the module that is expected next, and works with ``prefetch=0`` too.
        """
        units = _units_of("set_modules_to_backward_prefetch", modules)
        self._unit.backward_prefetch = tuple(unit.reference for unit in units)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of ranks."""
        check_divisor("set_gradient_divide_factor", factor)
        for group in self._unit.groups:
            group.divisor = factor

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of ``set_gradient_divide_factor``."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated: use set_gradient_divide_factor",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Has no effect: reductions are always sums, and gradients are divided before or after."""
        _check_bool("set_force_sum_reduction_for_comms", enable)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Have ``hook(sums)`` change this unit's reduced gradients in place, to add other replicas as torchft does.

        ``sums``, one flat tensor per group in the dtype of the reduction, with zeros as padding, are reduced over all
        axes of the mesh, and divided after the hook (float16 sums before). The hook is not called for sums that wait
        for the last microbatch. ``stream``: the stream for the hook, on a mesh of one axis. None removes the hook.

        Raises TypeError for a hook that cannot be called; ValueError for a stream on a mesh of two axes, and for a unit
        whose parameters have several meshes.
        """
        if hook is not None and not callable(hook):
            raise TypeError(
                f"set_all_reduce_hook: expected a function of the summed gradients or None, got {hook!r}"
            )
        meshes = {group.mesh.mesh for group in self._unit.groups}
        if len(meshes) > 1:
            raise ValueError(
                "set_all_reduce_hook: expected a unit with one mesh, got several from shard_placement_fn, which one "
                "hook cannot tell apart; make the modules whose parameters have another mesh a separate unit"
            )
        if stream is not None and any(mesh.ndim > 1 for mesh in meshes):
            raise ValueError(
                "set_all_reduce_hook: expected no stream on a mesh of two axes, whose hook runs on the stream of the "
                "outer axis; leave stream out"
            )
        for group in self._unit.groups:
            group.all_reduce_hook.function, group.all_reduce_hook.stream = hook, stream

    def set_main_gradients(self, enable: bool, *, recurse: bool = True) -> None:
        """With True, fused kernels may write ``param.main_grad`` in backward: see ``gradients.gradient``."""
        _check_bool("set_main_gradients", enable)
        for unit in self._units(recurse):
            unit.gradients.exposes_main_grad = enable

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make the current stream, and so every gather that begins from now on, wait for ``event``.

        Raises TypeError for anything but an event.
        """
        if not callable(getattr(event, "wait", None)):
            raise TypeError(
                f"set_post_optim_event: expected an event with wait(), as torch.Event has, got {event!r}"
            )
        event.wait()

    def set_buffer_pool(self, enabled: bool) -> None:
        """With False, every unit below the root allocates its buffers for each use; see
        ``torch_impl.runtime.memory.pool``.

        It applies to all units of the root, whichever unit it is called on, because they share one pool. A backward
        with ``create_graph=True`` also disables the pool; call this first if such a backward follows other steps.
        """
        _check_bool("set_buffer_pool", enabled)
        for unit in self._units(True):
            unit.schedule.pool.enable(enabled)

    def buffer_plan(self) -> BufferPlan | None:
        """The buffers of the units below this module's root that share memory; None until two steps were alike."""
        return self._unit.schedule.pool.plan

    def memory_report(self, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
        """Bytes that this and the sharded modules below now hold on this rank; with the optimizer, moments too."""
        return memory_report([group for unit in self._units(True) for group in unit.groups], optimizer)

    def _units(self, recurse: bool) -> Iterator[Unit]:
        """Each unit once, though several modules may share a unit."""
        _check_truth("recurse", recurse)
        assert isinstance(self, nn.Module)
        modules = self.modules() if recurse else [self]
        yield from {module._unit: None for module in modules if isinstance(module, FSDPModule)}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FSDPModule:
        """Called by ``to``, ``half``, ``cuda`` and similar: they convert buffers, but not sharded parameters.

        ``to_empty`` gives sharded parameters on the meta device their memory: on the mesh's device, or with
        ``CPUOffloadPolicy`` on the CPU.
        """
        assert isinstance(self, nn.Module)
        for unit in self._units(True):
            if not unit.open_calls:
                unit.show_sharded()
            for group in unit.groups:
                for name, param in zip(group.names, group.params, strict=True):
                    _check_conversion(name, param, fn, group.host is not None)
            if any(group.weights.on_meta for group in unit.groups):
                param = unit.groups[0].params[0]
                device = fn(torch.empty(0, dtype=param.dtype, device="meta")).device
                if device.type != "meta":
                    unit.materialize(device)
        for child in self.modules():
            for key, buffer in child._buffers.items():
                child._buffers[key] = buffer if buffer is None else fn(buffer)
            for key, ignored in child._parameters.items():
                if ignored is None or isinstance(ignored, DTensor):
                    continue
                converted = fn(ignored.detach())
                if ignored.is_meta and not converted.is_meta:
                    child._parameters[key] = nn.Parameter(converted, requires_grad=ignored.requires_grad)
                else:
                    ignored.data = converted
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(f"cannot deepcopy a sharded {type(self).__name__}: {_COPY_ADVICE}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot copy or pickle a sharded {type(self).__name__}: {_COPY_ADVICE}")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather weights and free them afterwards, like a call of the module.

    A ``module`` that is not sharded remains unchanged. Raises ValueError if it has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None) if isinstance(method_name, str) else None
    if not callable(method):
        raise ValueError(
            f"register_fsdp_forward_method: expected a method of {type(module).__name__}, got {method_name!r}"
        )
    # The module holds this function, so a strong reference to the module would be a cycle that keeps its memory.
    this = weakref.ref(module)
    bound = inspect.ismethod(method) and method.__self__ is module
    function = method.__func__ if bound else method

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        owner = this()
        assert owner is not None
        return owner._as_forward(functools.partial(function, owner) if bound else function, args, kwargs)

    setattr(module, method_name, call)


def share_comm_ctx(modules: Iterable[FSDPModule]) -> None:
    """Let these sharded modules, roots of pipeline stages for example, use the same streams."""
    units = _units_of("share_comm_ctx", modules)
    for unit in units[1:]:
        unit.schedule.streams = units[0].schedule.streams


def _units_of(caller: str, modules: Iterable[FSDPModule]) -> tuple[Unit, ...]:
    try:
        listed = list(modules)
    except TypeError:
        raise TypeError(
            f"{caller}: expected a list of sharded modules, got {type(modules).__name__}"
        ) from None
    for module in listed:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"{caller}: expected sharded modules, got {type(module).__name__}")
    return tuple(module._unit for module in listed)


def _check_bool(option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{option}: expected a bool, got {value!r}")


def _check_truth(option: str, value: object) -> None:
    """Accepts numbers and NumPy's bools, as FSDP2 does."""
    if value is None or isinstance(value, str):
        raise ValueError(f"{option}: expected a bool, got {value!r}")


def _check_conversion(
    name: str, param: nn.Parameter, fn: Callable[[torch.Tensor], torch.Tensor], offloaded: bool
) -> None:
    """TypeError if ``fn`` changes the dtype of a sharded parameter, or moves it from its device.

    NotImplementedError, as in torch, if ``fn`` would have to copy values from the meta device.
    """
    try:
        probe = fn(torch.empty(0, dtype=param.dtype, device=param.device))
    except NotImplementedError as error:
        if not param.is_meta:
            raise
        raise NotImplementedError(
            f"parameter {name!r} is on the meta device, from which to() cannot copy values: call "
            "model.to_empty(device=...), then initialize the model or load a state dict into it"
        ) from error
    moved = probe.device != param.device
    if param.is_meta and isinstance(param, DTensor):
        places = {"meta", param.device_mesh.device_type, *(("cpu",) if offloaded else ())}
        moved = probe.device.type not in places
    if probe.dtype != param.dtype or moved:
        raise TypeError(
            f"{name}: a sharded parameter stays {param.dtype} on {param.device}, got a conversion to {probe.dtype} on "
            f"{probe.device}; convert the module before fully_shard, or set MixedPrecisionPolicy(param_dtype=...)"
        )
