"""The stand-ins for a unit's parameters while a step is traced, and calls of a unit with stand-ins.

The rest of the unit is unchanged: class, static attributes, properties, submodules, other variables::

    model.blocks[0].residual            True, as it was set
    model.blocks[0].up.kernel           a UnitParameter: shape and dtype; any other use is refused by name
    model.blocks[0](x)                  caught (interception.py): the unit's weights are gathered for this call

A stand-in is a pytree node. Its first leaf, zeros of the parameter's shape, is sealed (``seal.py``), so that the traced
program shows what happens to it. The first parameter of a unit also carries the unit's arrays: ``nnx.scan``,
``lax.scan`` and ``jax.checkpoint`` slice, save and pass on the unit's arrays with the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from jax_impl.modules.seal import witness

Key = tuple[str | int, ...]
# Values of a unit's parameters, by their keys in the unit: gathered arrays, or stand-ins of inner units.
Values = Mapping[Key, Any]
# Arguments of a call: the unit's other contents (variables, plain arrays, settings), args, kwargs.
Arguments = tuple[Sequence[Any], tuple[Any, ...], dict[str, Any]]
# Runs inside a unit: ``run(values, arguments) -> (output, the unit's other contents afterwards)``.
Run = Callable[[Values, Arguments], tuple[Any, Sequence[Any]]]

_MISSING = object()
_VALUE = jax.tree_util.GetAttrKey("value")


def joined(key: Iterable[Any]) -> str:
    return "/".join(map(str, key))


@dataclass(frozen=True, eq=False)
class UnitRun:
    """``call(run, arrays, witnesses, arguments)`` calls ``run`` with the parameters of the unit at ``path``.

    ``layers``: the layers of the stack that the unit represents, or None. ``arrays``: carried by its first parameter.
    Compared by identity, because this is a static part of pytrees.
    """

    path: str
    layers: int | None
    arrays: Sequence[jax.Array]
    call: Callable[[Run, Sequence[jax.Array], Sequence[jax.Array], Arguments], tuple[Any, Sequence[Any]]]


@dataclass(frozen=True, eq=False)
class Origin:
    """The parameter that a stand-in represents: its unit, its key in the unit, its shape (of one layer) and dtype."""

    unit: UnitRun
    place: Key
    shape: tuple[int, ...]
    dtype: Any


@jax.tree_util.register_pytree_node_class
class UnitParameter:
    """``array``: sealed zeros. ``carried``: the unit's arrays, only in the unit's first parameter."""

    def __init__(self, array: Any, carried: tuple[Any, ...], origin: Origin) -> None:
        self._array, self._carried, self._origin = array, carried, origin

    def tree_flatten(self) -> tuple[tuple[Any, ...], Origin]:
        return (self._array, *self._carried), self._origin

    @classmethod
    def tree_unflatten(cls, origin: Origin, children: Sequence[Any]) -> UnitParameter:
        return cls(children[0], tuple(children[1:]), origin)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._array.shape)

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    @property
    def ndim(self) -> int:
        return int(self._array.ndim)

    @property
    def size(self) -> int:
        return int(self._array.size)

    # Properties, not methods, because JAX checks for methods of these names.
    @property
    def __jax_array__(self) -> Any:
        raise ValueError(f"use as an array of {self._refusal()}")

    __array__ = __jax_array__

    def __repr__(self) -> str:
        return f"<{self._refusal()}>"

    def __getattr__(self, name: str) -> Any:
        # This also runs while an instance is created without __init__, as by copy.copy.
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise ValueError(f"{name!r} of {self._refusal()}")

    def _refusal(self) -> str:
        return (
            f"parameter {joined(self._origin.place)!r} of unit {self._origin.unit.path!r}: expected a use "
            "only inside the unit: call the unit, one of its methods or jax_impl.call_unit(function, unit, ...), use "
            "jax_impl.apply_linen(net, {'params': params}, ...) instead of linen's net.apply, or choose units that "
            "contain everything that is used together"
        )


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: UnitParameter, *_: Any) -> Any:
        raise ValueError(f"{name} of {self._refusal()}")

    return refuse


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
_OTHERS = "neg pos abs invert eq ne lt le gt ge bool int float complex index len iter getitem contains round"
_ARITHMETIC = [f"__{side}{name}__" for name in _BINARY.split(" ") for side in ("", "r")]
for _name in (*_ARITHMETIC, *(f"__{name}__" for name in _OTHERS.split(" "))):
    setattr(UnitParameter, _name, _refusing(_name))
# A class that defines __eq__ would otherwise have no hash.
UnitParameter.__hash__ = object.__hash__  # type: ignore[method-assign]


@jax.tree_util.register_pytree_node_class
class UnitArray(UnitParameter):
    """A stand-in in a pytree: ``isinstance(leaf, jax.Array)`` is true. ``jax.numpy`` and arithmetic gather its unit.

    (nnx asks JAX for the type of an array.) A haiku network that is applied as a whole uses parameters this way.
    """

    @property
    def __jax_array__(self) -> Any:
        return lambda: run_in_unit(lambda array: array, self, (), {})

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return jax.Array


def _gathered(name: str) -> Callable[..., Any]:
    def apply(self: UnitArray, other: Any) -> Any:
        # A Python number changes the weights themselves, as weight decay does: this belongs inside the unit.
        return getattr(self.__jax_array__(), name)(other) if isinstance(other, jax.Array) else refuse(self)

    refuse = _refusing(name)
    return apply


for _name in _ARITHMETIC:
    setattr(UnitArray, _name, _gathered(_name))


def in_tree(value: Any) -> Any:
    """A stand-in or an array, in the form that a pytree contains."""
    return UnitArray(value._array, value._carried, value._origin) if is_unit_parameter(value) else value


def is_unit_parameter(leaf: Any) -> bool:
    return issubclass(type(leaf), UnitParameter)


def unit_parameters(tree: Any) -> list[UnitParameter]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_unit_parameter) if is_unit_parameter(leaf)]


def origin_of(parameter: UnitParameter) -> Origin:
    return parameter._origin


def zeros_of(parameter: UnitParameter) -> Any:
    """The sealed zeros."""
    return parameter._array


def apply_to_leaves(function: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """``function(*leaves)`` for leaves of which some are stand-ins; the function may move or stop stand-ins.

    If the result contains no array, such as a size or a label, it is returned unchanged. Raises ``ValueError`` for
    parameters of two units, and if the function fails on the unit's arrays, which it must also transform.
    """
    parameters = [leaf for leaf in leaves if is_unit_parameter(leaf)]
    if not parameters:
        return function(*leaves)
    first = parameters[0]
    for other in parameters[1:]:
        if other._origin.unit is not first._origin.unit or other._origin.place != first._origin.place:
            raise ValueError(
                f"jax.tree.map of parameter {joined(other._origin.place)!r} of unit "
                f"{other._origin.unit.path!r} and {first._refusal()}; stack layers before fully_shard(stacked=...)"
            )

    def of(nth: int) -> Any:
        arrays = [(leaf._array, *leaf._carried)[nth] if is_unit_parameter(leaf) else leaf for leaf in leaves]
        return function(*arrays)

    result = of(0)
    if result is first._array:
        return first
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result)):
        return result
    try:
        return type(first)(result, tuple(of(1 + i) for i in range(len(first._carried))), first._origin)
    except (TypeError, ValueError) as error:
        raise ValueError(f"use of {first._refusal()} ({error})") from error


def with_arrays(tree: Any, zeros: Sequence[Any], arrays: Sequence[Any] | None) -> Any:
    """A unit with other zeros for its parameters and, unless ``arrays`` is None, other carried arrays."""
    parameters = zip(unit_parameters(tree), zeros, strict=True)
    others = iter(
        type(parameter)(
            zero,
            parameter._carried if arrays is None else tuple(arrays) if parameter._carried else (),
            parameter._origin,
        )
        for parameter, zero in parameters
    )
    return jax.tree.map(
        lambda leaf: next(others) if is_unit_parameter(leaf) else leaf, tree, is_leaf=is_unit_parameter
    )


def unit_at(tree: Any) -> UnitRun | None:
    """The unit that ``tree`` is or belongs to; None for other trees, such as a tree of several units."""
    depth = _depth(tree)
    return depth[1] if depth is not None and depth[0] <= 0 else None


def is_whole_unit(tree: Any) -> bool:
    """Whether ``tree`` is a whole unit, not a part of one."""
    depth = _depth(tree)
    return depth is not None and depth[0] == 0


def _depth(tree: Any) -> tuple[int, UnitRun] | None:
    """A unit in ``tree``, and its depth below the root: 0 if ``tree`` is the unit, negative in a part of one."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_unit_parameter)[0]:
        if is_unit_parameter(leaf):
            key = leaf._origin.place
            # A Variable's value is one step below the Variable.
            in_variable = path[-1:] == (_VALUE,) and key[-1] != _VALUE.name
            return len(path) - in_variable - len(key), leaf._origin.unit
    return None


def run_in_unit(
    function: Callable[..., Any], stand_in: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``function(stand_in, *args, **kwargs)``, with the unit's parameters in place of the stand-ins.

    ``stand_in``: a unit, or a part of one, with any changes made to it outside. Changes that the function makes to
    variables and static attributes of modules are applied to ``stand_in`` afterwards.
    """
    contents = _ModuleContents(stand_in) if isinstance(stand_in, nnx.Pytree) else _TreeContents(stand_in)
    parameters = [leaf for leaf in contents.leaves if is_unit_parameter(leaf)]
    unit = parameters[0]._origin.unit
    for parameter in parameters:
        _check(parameter, unit)
    arrays = next((parameter._carried for parameter in parameters if parameter._carried), None)
    if arrays is None and unit.layers is not None:
        raise ValueError(
            f"unit {unit.path!r}: expected the whole unit, since the unit is a layer of a stack, got a part of the unit"
        )
    others = [leaf for leaf in contents.leaves if not is_unit_parameter(leaf)]

    def run(values: Values, arguments: Arguments) -> tuple[Any, Sequence[Any]]:
        others, args, kwargs = arguments
        rest = iter(others)
        inside = contents.made(
            [
                values[leaf._origin.place] if is_unit_parameter(leaf) else next(rest)
                for leaf in contents.leaves
            ]
        )
        output = function(inside, *args, **kwargs)
        return output, contents.after(inside, others)

    witnesses = [witness(parameter._array) for parameter in parameters]
    output, after = unit.call(run, arrays or unit.arrays, witnesses, (others, args, kwargs))
    contents.update(others, after)
    return output


def _check(parameter: UnitParameter, unit: UnitRun) -> None:
    origin = parameter._origin
    if origin.unit is not unit:
        raise ValueError(
            f"unit {unit.path!r}: expected its own parameters, got {joined(origin.place)!r} of unit "
            f"{origin.unit.path!r}: choose units that contain both"
        )
    stack = (unit.layers, *origin.shape)
    if parameter.dtype != origin.dtype or parameter.shape not in (origin.shape, stack):
        raise ValueError(
            f"{parameter.dtype.name}{list(parameter.shape)} in place of {origin.dtype.name}{list(origin.shape)} of "
            f"{parameter._refusal()}; to cast parameters, use fully_shard(param_dtype=...)"
        )


class _TreeContents:
    """A unit's pytree. Changes to it are lost, as for every pytree that JAX passes on."""

    def __init__(self, tree: Any) -> None:
        self.leaves, self._structure = jax.tree.flatten(tree, is_leaf=is_unit_parameter)

    def made(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._structure, leaves)

    def after(self, inside: Any, others: Sequence[Any]) -> Sequence[Any]:
        return others

    def update(self, others: Sequence[Any], after: Sequence[Any]) -> None:
        pass


class _ModuleContents:
    """A unit's nnx module: its variables and plain arrays, and its static attributes."""

    def __init__(self, module: nnx.Pytree) -> None:
        self._module = module
        self._graphdef, state = nnx.split(module)
        flat = nnx.to_flat_state(nnx.as_pure(state))
        self._places = [key for key, _ in flat]
        self.leaves = [leaf for _, leaf in flat]
        self._others = [key for key, leaf in flat if not is_unit_parameter(leaf)]
        # Static attributes after a call, by node and name; MISSING for deleted attributes.
        self._static: dict[tuple[Key, str], Any] = {}

    def made(self, leaves: Sequence[Any]) -> Any:
        return nnx.merge(self._graphdef, nnx.from_flat_state(list(zip(self._places, leaves, strict=True))))

    def after(self, inside: Any, others: Sequence[Any]) -> Sequence[Any]:
        """Raises ``ValueError`` that names the keys of variables that appeared or disappeared."""
        variables = dict(nnx.to_flat_state(nnx.as_pure(nnx.state(inside))))
        before, after = _nodes(self._module), _nodes(inside)
        new = [*(variables.keys() - set(self._places)), *(after.keys() - before.keys())]
        gone = [*(set(self._places) - variables.keys()), *(before.keys() - after.keys())]
        if new or gone:
            unit = unit_at(self._module)
            raise ValueError(not_as_sharded(unit.path if unit is not None else "", new, gone))
        now = {(key, name): value for key, node in after.items() for name, value in _static(node).items()}
        old = {(key, name): value for key, node in before.items() for name, value in _static(node).items()}
        self._static = dict.fromkeys(old.keys() - now.keys(), _MISSING) | {
            attribute: value for attribute, value in now.items() if value is not old.get(attribute, _MISSING)
        }
        return [variables[attribute] for attribute in self._others]

    def update(self, others: Sequence[Any], after: Sequence[Any]) -> None:
        nodes = _nodes(self._module)
        for (key, name), value in self._static.items():
            if value is _MISSING:
                delattr(nodes[key], name)
            else:
                setattr(nodes[key], name, value)
        # A variable that the unit only reads stays the same object: nnx forbids setting it in a loop around the call.
        changed = {
            variable_key: new
            for variable_key, old, new in zip(self._others, others, after, strict=True)
            if new is not old
        }
        if changed:
            nnx.update(self._module, nnx.from_flat_state(list(changed.items())))


def _nodes(module: nnx.Pytree) -> dict[Key, nnx.Pytree]:
    return {cast(Key, key): node for key, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree)}


def _static(node: nnx.Pytree) -> dict[str, Any]:
    """Attributes that are not arrays and contain none."""
    data_types = nnx.Pytree | nnx.Variable | jax.Array | np.ndarray
    return {
        name: value
        for name, value in vars(node).items()
        if not name.startswith("_pytree")
        and not nnx.is_data(value)
        # This also excludes dictionaries and lists of arrays (nnx.data).
        and not any(
            isinstance(leaf, data_types)
            for leaf in jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, data_types))
        )
    }


def not_as_sharded(path: str, new: Iterable[Iterable[Any]], gone: Iterable[Iterable[Any]]) -> str:
    new, gone = (sorted(map(joined, keys))[:5] for keys in (new, gone))
    return (
        f"unit {path!r}: expected the same variables after its call as when it was sharded, got new ones {new}, and "
        f"{gone} are missing: code outside the unit cannot read variables that are sown or created in it. Create the "
        "variable in __init__ (nnx.Variable), or choose units without it"
    )
