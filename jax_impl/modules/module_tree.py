"""Cut an nnx model into units: chosen submodules, and the root with all that no other unit owns.

A *stack* is a module whose parameters have a leading axis over equal layers, as ``nnx.vmap`` makes them. Its layers
count as modules of their own, and each unit inside it stands for as many equal ones::

    model                     modules for patterns       units for ["layers/*"]
    layers: Block [4, ...]    layers/0 ... layers/3      "layers", 4 layers
      mlp: MLP    [4, ...]    layers/0/mlp ...           ""
    norm: Norm                norm
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jax_impl.modules.tree_model import TreeList, TreeNode, as_given, as_module, may_be_unit
from jax_impl.modules.unit_slot import SlotCall, UnitSlot, UnitType, fill_slot

ROOT = ""
Key = tuple[str | int, ...]


@dataclass(frozen=True)
class UnitModule:
    """A unit's own structure, without values.

    ``path``: module path in the model, ``""`` for the root. ``layers``: how many equal layers it stands for, None where
    it is not in a stack; shapes are those of one. ``parameters``: paths in the model of the parameters it owns, in the
    order of its leaves; ``names``: the same, dotted and relative to the unit; ``shapes`` and ``dtypes`` belong to them.
    ``variables``: paths in the model of all other variables below it, those of inner units too. ``inner``: the units
    right inside it, path -> key within.
    """

    path: str
    layers: int | None
    graphdef: Any
    parameter_tree: Any
    variable_tree: Any
    parameters: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[jnp.dtype, ...]
    variables: tuple[str, ...]
    inner: Mapping[str, Key]

    def merge(
        self,
        leaves: Sequence[jax.Array],
        variables: Sequence[jax.Array],
        calls: Mapping[str, tuple[SlotCall, Sequence[jax.Array]]],
    ) -> nnx.Module:
        """The module with ``leaves`` as parameters; inner units are called by ``calls[path]`` with their arrays."""
        module = nnx.merge(
            self.graphdef,
            jax.tree.unflatten(self.parameter_tree, leaves),
            jax.tree.unflatten(self.variable_tree, variables),
        )
        for path, key in self.inner.items():
            fill_slot(_get(module, key), *calls[path])
        return module

    def changed_variables(self, module: nnx.Module) -> list[jax.Array]:
        """The variables of a merged module after it ran.

        Variables that appeared are left out at the root, where a loss can read them, as sown ones are meant to be. In
        another unit they could not leave it: raises ``ValueError`` with their paths.
        """
        state = nnx.as_pure(nnx.state(module, nnx.Not(nnx.Param)))
        after = dict(nnx.to_flat_state(state))
        before = [key for key, _ in nnx.to_flat_state(jax.tree.unflatten(self.variable_tree, self.variables))]
        new = [joined(key) for key in after if key not in set(before)]
        gone = [joined(key) for key in before if key not in after]
        if gone or (new and self.path != ROOT):
            raise ValueError(
                f"unit {self.path!r}: expected the variables that it had when it was sharded, got new ones {new[:5]}, "
                f"and not {gone[:5]}, after its call: what is sown or created there cannot be read outside, so choose "
                "units without it"
            )
        return [after[key] for key in before]


@dataclass(frozen=True)
class VariableInfo:
    """A variable that is no parameter: its nnx type, shape and dtype.

    ``rule``: how one value comes of several devices' (``runtime/variables.py``), None where all must have the same.
    ``rows``: of rule "rows", the dimension that is cut over the devices as a batch is.
    """

    kind: type[nnx.Variable]
    shape: tuple[int, ...]
    dtype: Any
    rule: str | None = None
    rows: int = 0


def joined(key: Iterable[Any]) -> str:
    return "/".join(map(str, key))


def parameter_leaves(model: nnx.Module) -> dict[str, jax.Array]:
    """``{path: value}`` of every parameter, paths like ``layers/0/mlp/up/kernel``.

    Sorted part by part, list indices as numbers: ``layers/2`` comes before ``layers/10``.
    """
    return {joined(key): v.get_raw_value() for key, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def variable_leaves(model: nnx.Module | Any) -> dict[str, jax.Array]:
    """``{path: value}`` of every other variable: batch statistics, random keys and counts; a pytree has none."""
    flat = nnx.to_flat_state(nnx.state(as_module(model), nnx.Not(nnx.Param)))
    return {joined(key): variable.get_raw_value() for key, variable in flat}


def variable_infos(model: nnx.Module) -> dict[str, VariableInfo]:
    """The same without values. Raises ``ValueError`` for a variable that holds no array, by path."""
    found = {}
    for key, variable in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.Param))):
        value = variable.get_raw_value()
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise ValueError(f"variable {joined(key)!r}: expected an array, got {type(value).__name__}")
        found[joined(key)] = VariableInfo(type(variable), tuple(value.shape), value.dtype)
    return found


def abstract(model: nnx.Module) -> nnx.Module:
    """A copy of the model with shapes and dtypes in place of values."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))


def whole_model(model: nnx.Module) -> UnitModule:
    """The model as one unit with all parameters; never touches the model itself."""
    whole = abstract(model)
    return _split(whole, (), None, _variable_paths(whole))


def module_paths(model: nnx.Module, stacks: Mapping[str, int]) -> dict[str, str]:
    """Dotted path -> path in the model of every module that may be a unit, the root first; stacks layer by layer.

    Lists and dictionaries of modules are none; in a pytree, lists that hold arrays are.
    """
    found: dict[str, str] = {}
    for key, module in _modules(model):
        if not may_be_unit(module):
            continue
        path = joined(key)
        found.update(dict.fromkeys(dotted_paths(path, stacks), path))
    return found


def dotted_paths(path: str, stacks: Mapping[str, int]) -> list[str]:
    """The path of a module or parameter with dots, as policies match it: of a stack one for each layer."""
    stack = next((one for one in stacks if path == one or path.startswith(f"{one}/")), None)
    if stack is None:
        return [path.replace("/", ".")]
    below = path[len(stack) :].replace("/", ".")
    return [f"{stack.replace('/', '.')}.{layer}{below}" for layer in range(stacks[stack])]


def split_units(
    model: nnx.Module, paths: Sequence[str], stacks: Mapping[str, int] | None = None
) -> dict[str, UnitModule]:
    """Units of ``model`` at the module ``paths``, in the order of the model, the root last.

    Raises ``ValueError`` when one parameter lies in two units (tied weights).
    """
    whole = abstract(model)
    variables = _variable_paths(whole)
    keys = [key for key, _ in _modules(whole) if joined(key) in paths and key]
    units: dict[str, UnitModule] = {}
    owners: dict[int, tuple[str, str]] = {}
    # Innermost first: an outer unit is split when the units inside it are slots already.
    for key in sorted(keys, key=len, reverse=True):
        module = _get(whole, key)
        _claim(module, key, owners)
        units[joined(key)] = _split(module, key, _layers(key, stacks or {}), variables)
        _set(whole, key, UnitSlot(_unit_type(module, key, units[joined(key)].layers), _variables(module)))
    _claim(whole, (), owners)
    ordered = {joined(key): units[joined(key)] for key in sorted(keys)}
    return {**ordered, ROOT: _split(whole, (), None, variables)}


def _split(module: nnx.Module, key: Key, layers: int | None, variable_paths: Mapping[int, str]) -> UnitModule:
    below = {
        place: variable for place, variable in nnx.iter_graph(module) if isinstance(variable, nnx.Variable)
    }
    graphdef, parameters, variables = cast(tuple[Any, Any, Any], nnx.split(module, nnx.Param, ...))
    flat = nnx.to_flat_state(parameters)
    leaves, parameter_tree = jax.tree.flatten(nnx.as_pure(parameters))
    return UnitModule(
        path=joined(key),
        layers=layers,
        graphdef=graphdef,
        parameter_tree=parameter_tree,
        variable_tree=jax.tree.structure(nnx.as_pure(variables)),
        parameters=tuple(joined((*key, *place)) for place, _ in flat),
        names=tuple(".".join(map(str, place)) for place, _ in flat),
        shapes=tuple(tuple(leaf.shape[layers is not None :]) for leaf in leaves),
        dtypes=tuple(_dtype_in_jax(leaf.dtype) for leaf in leaves),
        variables=tuple(variable_paths[id(below[place])] for place, _ in nnx.to_flat_state(variables)),
        inner={joined(key + place): place for place, m in _modules(module) if isinstance(m, UnitSlot)},
    )


def _dtype_in_jax(dtype: Any) -> Any:
    """NumPy's 64 bits are 32 in JAX, unless x64 is on."""
    return (
        dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)
    )


def _layers(key: Key, stacks: Mapping[str, int]) -> int | None:
    path = joined(key)
    return next((n for s, n in stacks.items() if path == s or path.startswith(f"{s}/")), None)


def _unit_type(module: nnx.Module, key: Key, layers: int | None) -> UnitType:
    modes = {
        name
        for _, below in _modules(module)
        for name, value in vars(below).items()
        if isinstance(value, bool) and not name.startswith("_")
    }
    for _, below in _modules(module):
        if isinstance(below, UnitSlot):
            modes |= below._unit.modes
    if not isinstance(module, TreeNode | TreeList):
        return UnitType(joined(key), type(module), frozenset(modes), layers)
    shapes = as_given(module)
    return UnitType(joined(key), type(shapes), frozenset(modes), layers, shapes, as_given)


def _variables(module: nnx.Module) -> list[nnx.Variable]:
    """In the order of the unit's ``variable_tree``."""
    below = dict(nnx.iter_graph(module))
    flat = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param)))
    return [cast(nnx.Variable, below[place]) for place, _ in flat]


def _variable_paths(model: nnx.Module) -> dict[int, str]:
    return {
        id(v): joined(key)
        for key, v in nnx.iter_graph(model)
        if isinstance(v, nnx.Variable) and not isinstance(v, nnx.Param)
    }


def _claim(module: nnx.Module, key: Key, owners: dict[int, tuple[str, str]]) -> None:
    """Note the variables that are this unit's own; ``owners`` gives each variable's unit and path."""
    unit = joined(key)
    for below, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param):
            path = joined((*key, *below))
            owner, first = owners.setdefault(id(variable), (unit, path))
            if owner != unit:
                raise ValueError(
                    f"parameter {path!r} of unit {unit!r} is the same variable as {first!r} of unit {owner!r}: tied "
                    "weights must lie in one unit, choose units that do not separate them"
                )


def _get(module: Any, key: Key) -> Any:
    for part in key:
        module = (
            module[part] if isinstance(part, int) or isinstance(module, nnx.Dict) else getattr(module, part)
        )
    return module


def _set(module: Any, key: Key, value: Any) -> None:
    parent, last = _get(module, key[:-1]), key[-1]
    if isinstance(last, int) or isinstance(parent, nnx.Dict):
        parent[last] = value
    else:
        setattr(parent, last, value)


def _modules(model: nnx.Module) -> Iterator[tuple[Key, nnx.Module]]:
    for key, module in nnx.iter_modules(model):
        yield cast(Key, key), module
