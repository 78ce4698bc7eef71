"""The parameters that a unit owns: all below its module except ignored ones and inner units'."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from bridge.core.callers import warn_caller
from torch_impl.dtensor.refusals import described, set_name
from torch_impl.dtensor.tensor import RowDTensor
from torch_impl.runtime.ground.tensor_parallel import SpmdMesh, TensorParallel, tensor_parallel_of

# Marks a parameter that a unit took, so that an outer unit detects a tie that it would break.
_TAKEN = "_taken_by_unit"


class _Taken:
    """Replaces the class of a sharded parameter's original, so that an optimizer with it raises.

    Every ``torch.optim`` optimizer reads ``.grad`` in ``step`` and in ``zero_grad``.
    """

    @property
    def grad(self) -> torch.Tensor | None:
        assert isinstance(self, torch.Tensor)
        raise RuntimeError(
            f"{described(self, 'parameter')} was collected before fully_shard took it into a "
            f"{taken_by(self)} unit, and is no longer trained: build the optimizer after "
            "sharding, from model.parameters()"
        )


@functools.cache
def _taken_class(param_class: type[nn.Parameter]) -> type[nn.Parameter]:
    # Not one class for all, so that attributes and methods of subclasses, and of DTensors, remain.
    return types.new_class(f"Taken{param_class.__name__}", (_Taken, param_class))


def taken_by(param: torch.Tensor) -> str | None:
    """The class of the unit that has taken this parameter; None if none has."""
    unit: str | None = getattr(param, _TAKEN, None)
    return unit


@dataclass(frozen=True)
class OwnedParameter:
    """An original parameter: its name below the unit, and each ``(module, attribute)`` that has it.

    ``spmd``: the mesh of all axes, on which it may be a DTensor.
    """

    name: str
    param: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]
    spmd: SpmdMesh | None = None

    @property
    def tensor_parallel(self) -> TensorParallel | None:
        """The parameter's placement on mesh axes that are not data-parallel."""
        return tensor_parallel_of(self.name, self.param, self.spmd)

    @property
    def local(self) -> torch.Tensor:
        """The values, without history; for a tensor-parallel parameter, this rank's part."""
        values, placed = self.param.detach(), self.tensor_parallel
        if isinstance(values, DTensor):
            return values.to_local()
        return values if placed is None else placed.part_of(values)

    @property
    def extended(self) -> bool:
        """Whether the parameter's class determines what is gathered, see ``weights.extension``."""
        return is_extended(self.local)

    @property
    def local_shape(self) -> torch.Size:
        """The shape of ``local``."""
        placed = self.tensor_parallel
        return self.param.shape if placed is None else placed.local_shape

    @property
    def description(self) -> list[object]:
        """The values that ranks compare: name, shape, dtype and trainability, as JSON values."""
        dtype = str(self.param.dtype)
        if self.extended:
            # The runtime does not allocate inner tensors' memory, so loads on some ranks could not fill it.
            dtype += f" {type(self.local).__name__}{' on meta' if self.param.is_meta else ''}"
        return [self.name, list(self.local_shape), dtype, self.param.requires_grad]

    def take(self, unit: str) -> None:
        """Mark the parameter as owned by ``unit``."""
        if self.param._backward_hooks or getattr(self.param, "_post_accumulate_grad_hooks", None):
            warn_caller(
                f"{self.name}: hooks registered before fully_shard are no longer called; "
                "register them on the sharded parameter, module.get_parameter(name)"
            )
        setattr(self.param, _TAKEN, unit)
        set_name(self.param, self.name)
        # In place, because an optimizer that was built too early holds this object.
        self.param.__class__ = _taken_class(type(self.param))


def owned_parameters(
    module: nn.Module, ignored: set[int], inner: type, spmd: SpmdMesh | None = None
) -> list[OwnedParameter]:
    """In model order, each once. ``ignored``: ids of parameters; ``inner``: the class of inner units.

    Raises ValueError for a parameter that cannot be sharded.
    """
    # By identity: a tied parameter counts once, with a name for each module where it is registered.
    by_identity: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, holder in _modules_outside(module, inner, "", set()):
        for attr, param in holder._parameters.items():
            if param is None or id(param) in ignored:
                continue
            name = f"{prefix}{attr}"
            _check(name, param, spmd)
            by_identity.setdefault(id(param), (name, param, []))[2].append((holder, attr))
    owned = [OwnedParameter(name, param, tuple(sites), spmd) for name, param, sites in by_identity.values()]
    # A unit has one gather, so all its weights must get memory together.
    if len({parameter.param.is_meta for parameter in owned}) > 1:
        meta = next(parameter.name for parameter in owned if parameter.param.is_meta)
        real = next(parameter.name for parameter in owned if not parameter.param.is_meta)
        raise ValueError(
            f"{meta}: expected the parameters of a unit all on the meta device or none, got {real} "
            "with values; initialize the former or ignore one of them"
        )
    return owned


def _modules_outside(
    module: nn.Module, inner: type, prefix: str, seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """``(name prefix, module)`` of the module and all below it, without inner units."""
    # A model may register one module under several names.
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module.named_children():
        if not isinstance(child, inner):
            yield from _modules_outside(child, inner, f"{prefix}{name}.", seen)


def is_extended(values: torch.Tensor) -> bool:
    """Whether a tensor's class determines what is gathered of it."""
    return hasattr(type(values), "fsdp_pre_all_gather") and not isinstance(values, DTensor)


def _check(name: str, param: nn.Parameter, spmd: SpmdMesh | None) -> None:
    if isinstance(param, RowDTensor):
        raise ValueError(
            f"{name}: expected a plain parameter, got one that an outer unit has already sharded; "
            "shard inner modules before outer ones"
        )
    if isinstance(param, UninitializedParameter):
        raise ValueError(
            f"{name}: expected a parameter with a shape, got one of a lazy module; run a forward "
            "of the module before fully_shard"
        )
    if param.layout is not torch.strided or param.is_quantized:
        layout = "a quantized one" if param.is_quantized else param.layout
        raise ValueError(
            f"{name}: expected a dense parameter, got {layout}; leave it unsharded "
            "(ignored_params), or make it dense before fully_shard"
        )
    tensor_parallel_of(name, param, spmd)
    detached = param.detach()
    values = detached.to_local() if isinstance(detached, DTensor) else detached
    # The rows of a parameter that is a plain tensor do not have the parameter's methods.
    promised = any(hasattr(tensor, "fsdp_pre_all_gather") for tensor in (param, values))
    wraps = is_traceable_wrapper_subclass(values)
    class_name = type(values if wraps else param).__name__
    if not is_extended(values) and (promised or wraps):
        raise ValueError(
            f"{name}: expected a plain parameter, a DTensor, or a subclass of torch.Tensor with "
            f"fsdp_pre_all_gather and fsdp_post_all_gather, got a {class_name}, whose type a flat "
            "buffer would lose; leave it unsharded (ignored_params), or make it a plain tensor "
            "before fully_shard"
        )
    if taken_by(param) is not None:
        raise ValueError(
            f"{name}: tied to a parameter that an inner {taken_by(param)} unit owns; shard a "
            "module that contains both uses instead of the inner one"
        )
    if not is_extended(values) and param.is_floating_point() and param.dtype.itemsize == 1:
        raise ValueError(f"{name}: expected a dtype of two or more bytes, got {param.dtype}")
