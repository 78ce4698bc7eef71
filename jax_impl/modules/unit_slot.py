"""What stands in a model for a unit while a step is traced: it carries the unit's arrays as variables.

Being an nnx module with variables, a slot can be split, merged and scanned like the module that it stands for: under
``nnx.scan`` or ``scan_layers`` the arrays of a stacked unit are sliced layer by layer with everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from flax import nnx


class Held(nnx.Param):
    """A flat or logical array of a unit, or the place where the gradient of one is collected."""


@dataclass(frozen=True)
class UnitType:
    """What a slot knows of its module: path, class, and names of static attributes anywhere below (modes).

    ``layers``: of the stack that it stands for, or None. Of a unit in a pytree ``cls`` is the subtree's own;
    ``shapes``: the subtree, with shapes and dtypes for arrays; ``given``: what makes the subtree of the module.
    """

    path: str
    cls: type
    modes: frozenset[str]
    layers: int | None = None
    shapes: Any = field(default=None, compare=False, repr=False)
    given: Callable[[nnx.Module], Any] = field(default=lambda module: module, compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class SlotCall:
    """``run(function, arrays, variables, args, kwargs) -> (output, variables)`` on the slot's own unit.

    Compared by identity, since nnx keeps it among the static attributes of a module.
    """

    run: Callable[..., tuple[Any, list[Any]]]


class UnitSlot(nnx.Module):
    """Has no public method of its own, which could hide one of the unit's; see ``fill_slot`` and ``run_in_slot``.

    ``variables``: those of the unit that are no parameters, such as batch statistics; the program's own objects.
    """

    _call: SlotCall
    _arrays: nnx.List[Held]

    def __init__(self, unit: UnitType, variables: Sequence[nnx.Variable]) -> None:
        self._unit = unit
        self._variables = nnx.List(variables)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_in_slot(self, _call_module, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(f"{key!r} {self._only_inside()}")

    def __contains__(self, key: Any) -> bool:
        raise TypeError(f"{key!r} {self._only_inside()}")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"what is inside {self._only_inside()}")

    def __getattr__(self, name: str) -> Any:
        unit = None if name.startswith("_") else vars(self).get("_unit")
        if unit is None or not hasattr(unit.cls, name):
            modes = frozenset() if unit is None else unit.modes
            if name in modes:
                # set_attributes asks whether there is one; its value is the inner modules' own.
                return None
            raise AttributeError(f"{name!r} {self._only_inside()}")
        method = partial(_call_method, name)
        return lambda *args, **kwargs: run_in_slot(self, method, args, kwargs)

    def _only_inside(self) -> str:
        unit = vars(self).get("_unit")
        where = f"of unit {unit.path!r}" if unit is not None else "of a unit"
        return (
            f"{where}: expected a method, since a unit's weights and submodules can be used inside of the unit only: "
            "call jax_impl.call_unit(function, unit, ...), jax_impl.apply_linen(net, {'params': params}, ...) for "
            "linen's net.apply, or choose units that contain what is used together"
        )


def unit_type(slot: UnitSlot) -> UnitType:
    return slot._unit


def fill_slot(slot: UnitSlot, call: SlotCall, arrays: Sequence[jax.Array]) -> None:
    """Get ready for calls: done when a step is traced."""
    slot._call = call
    slot._arrays = nnx.List([Held(array) for array in arrays])


def run_in_slot(
    slot: UnitSlot, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``function(module, *args, **kwargs)`` on the unit's module or subtree, its weights gathered for this call."""
    modes = {name: value for name, value in vars(slot).items() if name in slot._unit.modes}
    arrays = [held.get_raw_value() for held in slot._arrays]
    variables = [variable.get_raw_value() for variable in slot._variables]

    def run(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if modes:
            module.set_attributes(**modes)
        return function(slot._unit.given(module), *args, **kwargs)

    output, changed = slot._call.run(run, arrays, variables, args, kwargs)
    for variable, before, value in zip(slot._variables, variables, changed, strict=True):
        if value is not before:
            variable.set_raw_value(value)
    return output


def _call_method(name: str, module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    return getattr(module, name)(*args, **kwargs)


def _call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)
