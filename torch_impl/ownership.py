"""Which parameters a unit owns: all below its module that no inner unit owns and that are not ignored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor

# Set on a parameter when a unit takes it, so that an outer unit recognizes a tie that sharding would break.
_TAKEN = "_taken_by_unit"


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter as given: its name below the unit, and each ``(module, attribute)`` where it is registered."""

    name: str
    param: nn.Parameter
    sites: tuple[tuple[nn.Module, str], ...]

    @property
    def description(self) -> list[object]:
        """What ranks compare: name, shape, dtype and trainability, as JSON values."""
        return [self.name, list(self.param.shape), str(self.param.dtype), self.param.requires_grad]

    def take(self, unit: str) -> None:
        """Remember on the parameter that ``unit`` owns it."""
        setattr(self.param, _TAKEN, unit)


def owned_parameters(module: nn.Module, ignored: set[int], inner: type) -> list[OwnedParameter]:
    """In model order, each once with all its names. ``ignored``: ids of parameters; ``inner``: class of inner units.

    Raises ValueError for a parameter that cannot be sharded.
    """
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, holder in _modules_outside(module, inner, "", set()):
        for attr, param in holder._parameters.items():
            if param is None or id(param) in ignored:
                continue
            name = f"{prefix}{attr}"
            _check(name, param)
            found.setdefault(id(param), (name, param, []))[2].append((holder, attr))
    return [OwnedParameter(name, param, tuple(sites)) for name, param, sites in found.values()]


def _modules_outside(
    module: nn.Module, inner: type, prefix: str, seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    """``(name prefix, module)`` of the module and all below it, without inner units and what they hold."""
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    for name, child in module.named_children():
        if not isinstance(child, inner):
            yield from _modules_outside(child, inner, f"{prefix}{name}.", seen)


def _check(name: str, param: nn.Parameter) -> None:
    if isinstance(param, DTensor):
        raise ValueError(f"{name}: expected a plain parameter, got a DTensor placed as {param.placements}")
    if param.is_meta:
        raise ValueError(
            f"{name}: expected a parameter with values, got one on the meta device; initialize it first"
        )
    if hasattr(param, _TAKEN):
        raise ValueError(
            f"{name}: tied to a parameter that an inner {getattr(param, _TAKEN)} unit owns; shard a module that "
            "contains both uses instead of the inner one"
        )
    if param.is_floating_point() and param.dtype.itemsize == 1:
        raise ValueError(f"{name}: expected a dtype of two or more bytes, got {param.dtype}")
