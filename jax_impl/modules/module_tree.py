"""Cut an nnx model into units: chosen submodules, and the root, which owns everything that no other unit owns.

A *stack* is a module whose parameters have a leading axis over equal layers, as ``nnx.vmap`` creates them. Each layer
counts as a separate module, and each unit inside a stack represents one unit per layer::

    model                     modules for patterns       units for ["layers/*"]
    layers: Block [4, ...]    layers/0 ... layers/3      "layers", 4 layers
      mlp: MLP    [4, ...]    layers/0/mlp ...           ""
    norm: Norm                norm
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jax_impl.modules.seal import constant, seal_parameter
from jax_impl.modules.tree_model import as_given, as_module, may_be_unit
from jax_impl.modules.unit_parameter import (
    Key,
    Origin,
    UnitParameter,
    UnitRun,
    Values,
    joined,
    not_as_sharded,
)

ROOT = ""


def _is_plain(_: Any, value: Any) -> bool:
    """An array that is a plain attribute of a module, not in a Variable."""
    return not isinstance(value, nnx.Variable)


VARIABLES = nnx.Not(nnx.Any(nnx.Param, _is_plain))


@dataclass(frozen=True)
class UnitModule:
    """A unit's own structure, without values.

    ``path``: module path in the model, ``""`` for the root. ``layers``: the number of equal layers that the unit
    represents, None outside a stack; shapes are those of one layer. ``parameters``: paths in the model of the unit's
    own parameters, in the order of its leaves; ``names``: the same, dotted and relative to the unit; ``shapes`` and
    ``dtypes``: of these parameters. ``variables``: paths in the model of all other variables below the unit, including
    those of inner units. ``inner``: the units directly inside, path -> key within the unit. ``cls``: class of the
    module, or of the pytree that it represents. ``constants``: plain arrays below the unit, by key. ``below``: keys
    within the unit, shapes and dtypes of the parameters of inner units, by path, in the order of their leaves.
    """

    path: str
    layers: int | None
    graphdef: Any
    variable_tree: Any
    parameters: tuple[str, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[jnp.dtype, ...]
    variables: tuple[str, ...]
    inner: Mapping[str, Key]
    cls: type
    places: tuple[Key, ...]
    constants: Mapping[Key, Any]
    below: Mapping[str, Sequence[tuple[Key, tuple[int, ...], Any]]]

    def values(self, leaves: Sequence[jax.Array], runs: Mapping[str, UnitRun]) -> Values:
        """All parameters by key: ``leaves``, and stand-ins for parameters of inner units, which ``runs[path]`` runs."""
        by_key: dict[Key, Any] = dict(zip(self.places, leaves, strict=True))
        for path, parameters in self.below.items():
            carried, length = tuple(runs[path].arrays), len(self.inner[path])
            for key, shape, dtype in parameters:
                layer = shape if runs[path].layers is None or self.layers is not None else shape[1:]
                zeros = seal_parameter(path, jnp.zeros(shape, dtype), len(layer))
                by_key[key] = UnitParameter(zeros, carried, Origin(runs[path], key[length:], layer, dtype))
                carried = ()
        return by_key

    def merge(
        self, leaves: Sequence[jax.Array], variables: Sequence[jax.Array], runs: Mapping[str, UnitRun]
    ) -> nnx.Module:
        """The module with ``leaves`` as parameters; ``runs[path]`` runs the inner units."""
        return self.made(self.values(leaves, runs), variables)

    def made(self, values: Values, variables: Sequence[jax.Array]) -> nnx.Module:
        """The module with ``values``, by key, as parameters."""
        return nnx.merge(
            self.graphdef,
            nnx.from_flat_state(list(values.items())),
            jax.tree.unflatten(self.variable_tree, variables),
            nnx.from_flat_state(list(self.constants.items())),
        )

    def with_constants(self, values: Mapping[str, Any]) -> UnitModule:
        """The same unit with other values of plain arrays, by path."""
        return replace(self, constants={key: values[joined(key)] for key in self.constants})

    def sealed_constants(self) -> UnitModule:
        """The same unit; a traced program shows whether its constants change. Raises ``ValueError`` for shapes."""
        for key, value in self.constants.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"array {joined(key)!r}: expected the values of a plain array of the model, got only its shape: "
                    "use fully_shard or init_sharded, which keep the values"
                )
        return self.with_constants({joined(p): constant(joined(p), x) for p, x in self.constants.items()})

    def changed_constants(self, module: nnx.Module) -> dict[str, jax.Array]:
        """Plain arrays of a merged module that are no longer the original objects."""
        after = dict(nnx.to_flat_state(nnx.state(module, _is_plain)))
        return {joined(p): after[p] for p, x in self.constants.items() if p in after and after[p] is not x}

    def changed_variables(self, module: nnx.Module) -> list[jax.Array]:
        """The variables of a merged module after it ran.

        At the root, new variables are ignored: a loss can read them there, as it reads sown variables. In another unit
        they could not leave the unit, so this raises ``ValueError`` with their paths.
        """
        state = nnx.as_pure(nnx.state(module, VARIABLES))
        after = dict(nnx.to_flat_state(state))
        before = [key for key, _ in nnx.to_flat_state(jax.tree.unflatten(self.variable_tree, self.variables))]
        new = [joined(key) for key in after if key not in set(before)]
        gone = [joined(key) for key in before if key not in after]
        if gone or (new and self.path != ROOT):
            raise ValueError(not_as_sharded(self.path, new, gone))
        return [after[key] for key in before]


@dataclass(frozen=True)
class VariableInfo:
    """A variable that is not a parameter: its nnx type, shape and dtype.

    ``rule``: how the values of several devices become one (``runtime/groups/variables.py``), None if they must be
    equal. ``rows``: for rule "rows", the dimension that is cut over the devices like a batch.
    """

    cls: type[nnx.Variable]
    shape: tuple[int, ...]
    dtype: Any
    rule: str | None = None
    rows: int = 0


def matches(path: str, pattern: str) -> bool:
    """Whether each part of a path matches its part of a pattern, with the wildcards of ``fnmatch``."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def parameter_leaves(model: nnx.Module) -> dict[str, jax.Array]:
    """``{path: value}`` of every parameter, paths like ``layers/0/mlp/up/kernel``.

    Paths are sorted part by part, list indices as numbers: ``layers/2`` comes before ``layers/10``.
    """
    return {joined(key): v.get_raw_value() for key, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def variable_leaves(model: nnx.Module | Any) -> dict[str, jax.Array]:
    """``{path: value}`` of every other variable: batch statistics, random keys and counts; a pytree has none."""
    flat = nnx.to_flat_state(nnx.state(as_module(model), VARIABLES))
    return {joined(key): variable.get_raw_value() for key, variable in flat}


def constant_leaves(model: nnx.Module) -> dict[str, Any]:
    """``{path: value}`` of every plain array: tables that are attributes of modules, neither trained nor saved."""
    return {joined(key): value for key, value in nnx.to_flat_state(nnx.state(model, _is_plain))}


def variable_infos(model: nnx.Module) -> dict[str, VariableInfo]:
    """The variables without values. Raises ``ValueError`` that names the path of a variable without an array."""
    infos = {}
    for key, variable in nnx.to_flat_state(nnx.state(model, VARIABLES)):
        value = variable.get_raw_value()
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise ValueError(f"variable {joined(key)!r}: expected an array, got {type(value).__name__}")
        infos[joined(key)] = VariableInfo(type(variable), tuple(value.shape), value.dtype)
    return infos


def abstract(model: nnx.Module) -> nnx.Module:
    """A copy of the model with shapes and dtypes in place of values; plain arrays keep their values."""
    graphdef, constants, state = cast(tuple[Any, Any, Any], nnx.split(model, _is_plain, ...))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return nnx.merge(graphdef, constants, shapes)


def whole_model(model: nnx.Module) -> UnitModule:
    """The model as one unit with all parameters; the model itself is not changed."""
    whole = abstract(model)
    return _split(whole, (), None, _variable_paths(whole))


def module_paths(model: nnx.Module, stacks: Mapping[str, int]) -> dict[str, str]:
    """Dotted path -> path in the model, for every module that may be a unit; the root first, stacks layer by layer.

    Lists and dictionaries of modules cannot be units; in a pytree, lists that hold arrays can.
    """
    by_dotted: dict[str, str] = {}
    for key, module in _modules(model):
        if not may_be_unit(module):
            continue
        path = joined(key)
        by_dotted.update(dict.fromkeys(dotted_paths(path, stacks), path))
    return by_dotted


def dotted_paths(path: str, stacks: Mapping[str, int]) -> list[str]:
    """The dotted paths of a module or parameter, as policies match them: one per layer for a stack."""
    stack = next((name for name in stacks if path == name or path.startswith(f"{name}/")), None)
    if stack is None:
        return [path.replace("/", ".")]
    below = path[len(stack) :].replace("/", ".")
    return [f"{stack.replace('/', '.')}.{layer}{below}" for layer in range(stacks[stack])]


def split_units(
    model: nnx.Module, paths: Sequence[str], stacks: Mapping[str, int] | None = None
) -> dict[str, UnitModule]:
    """Units of ``model`` at the module ``paths``, in the order of the model, the root last.

    Raises ``ValueError`` if one parameter is in two units (tied weights).
    """
    whole, claimed = abstract(model), abstract(model)
    variables = _variable_paths(whole)
    keys = [key for key, _ in _modules(whole) if joined(key) in paths and key]
    owners: dict[int, tuple[str, str]] = {}
    # Innermost units first: an outer unit owns the rest.
    for key in sorted(keys, key=len, reverse=True):
        _claim(_get(claimed, key), key, owners)
        _set(claimed, key, None)
    _claim(claimed, (), owners)
    return {
        joined(key): _split(_get(whole, key), key, layers_at(joined(key), stacks or {}), variables, keys)
        for key in (*sorted(keys), ())
    }


def _split(
    module: nnx.Module,
    key: Key,
    layers: int | None,
    variable_paths: Mapping[int, str],
    keys: Sequence[Key] = (),
) -> UnitModule:
    """``keys``: the keys of all units."""
    inside = [other[len(key) :] for other in keys if len(other) > len(key) and other[: len(key)] == key]
    inner = {
        joined((*key, *below)): below
        for below in inside
        if not any(below != other and below[: len(other)] == other for other in inside)
    }

    def unit_of(below: Key) -> str | None:
        return next((path for path, start in inner.items() if below[: len(start)] == start), None)

    variables_below = {
        below: variable for below, variable in nnx.iter_graph(module) if isinstance(variable, nnx.Variable)
    }
    graphdef, parameters, variables, constants = cast(
        tuple[Any, Any, Any, Any], nnx.split(module, nnx.Param, VARIABLES, ...)
    )
    flat = [
        (below, leaf.shape if layers is None or unit_of(below) is None else leaf.shape[1:], leaf.dtype)
        for below, leaf in _flat(nnx.as_pure(parameters))
    ]
    own = [(below, shape, dtype) for below, shape, dtype in flat if unit_of(below) is None]
    return UnitModule(
        path=joined(key),
        layers=layers,
        graphdef=graphdef,
        variable_tree=jax.tree.structure(nnx.as_pure(variables)),
        parameters=tuple(joined((*key, *below)) for below, _, _ in own),
        names=tuple(".".join(map(str, below)) for below, _, _ in own),
        shapes=tuple(tuple(shape[layers is not None :]) for _, shape, _ in own),
        dtypes=tuple(_dtype_in_jax(dtype) for _, _, dtype in own),
        variables=tuple(
            variable_paths[id(variables_below[below])] for below, _ in nnx.to_flat_state(variables)
        ),
        inner=inner,
        cls=type(as_given(module)),
        places=tuple(below for below, _, _ in own),
        constants=dict(_flat(constants)),
        below={
            path: [
                (below, shape, _dtype_in_jax(dtype)) for below, shape, dtype in flat if unit_of(below) == path
            ]
            for path in inner
        },
    )


def _dtype_in_jax(dtype: Any) -> Any:
    """NumPy's 64-bit dtypes become 32-bit in JAX, unless x64 is on."""
    return (
        dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)
    )


def _flat(state: Any) -> list[tuple[Key, Any]]:
    return [(cast(Key, key), leaf) for key, leaf in nnx.to_flat_state(state)]


def layers_at(path: str, stacks: Mapping[str, int]) -> int | None:
    """The number of layers of the stack that a module or parameter is or belongs to, or None."""
    return next((n for s, n in stacks.items() if path == s or path.startswith(f"{s}/")), None)


def _variable_paths(model: nnx.Module) -> dict[int, str]:
    return {
        id(v): joined(key)
        for key, v in nnx.iter_graph(model)
        if isinstance(v, nnx.Variable) and not isinstance(v, nnx.Param)
    }


def _claim(module: nnx.Module, key: Key, owners: dict[int, tuple[str, str]]) -> None:
    """Record the variables that this unit owns; ``owners`` maps each variable to its unit and path."""
    unit = joined(key)
    for below, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param):
            path = joined((*key, *below))
            owner, first = owners.setdefault(id(variable), (unit, path))
            if owner != unit:
                raise ValueError(
                    f"parameter {path!r} of unit {unit!r} is the same variable as {first!r} of unit {owner!r}: tied "
                    "weights must be in one unit: choose units that do not separate them"
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
