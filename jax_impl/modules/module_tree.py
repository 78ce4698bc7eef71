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
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jax_impl.modules.seal import constant, seal_parameter
from jax_impl.modules.tree_model import as_given, as_module, may_be_unit
from jax_impl.modules.unit_parameter import Key, Origin, UnitParameter, UnitRun, Values, not_as_sharded

ROOT = ""


def _is_plain(_: Any, value: Any) -> bool:
    """An array that is an attribute of a module, and in no Variable."""
    return not isinstance(value, nnx.Variable)


VARIABLES = nnx.Not(nnx.Any(nnx.Param, _is_plain))


@dataclass(frozen=True)
class UnitModule:
    """A unit's own structure, without values.

    ``path``: module path in the model, ``""`` for the root. ``layers``: how many equal layers it stands for, None where
    it is not in a stack; shapes are those of one. ``parameters``: paths in the model of the parameters it owns, in the
    order of its leaves; ``names``: the same, dotted and relative to the unit; ``shapes`` and ``dtypes`` belong to them.
    ``variables``: paths in the model of all other variables below it, those of inner units too. ``inner``: the units
    right inside it, path -> key within. ``cls``: class of the module, or of the pytree that it stands for.
    ``constants``: plain arrays of the model that are below it, by their places.
    ``below``: places within, shapes and dtypes of the parameters of units inside, path -> in the order of their leaves.
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
        """All parameters by place: ``leaves``, and what stands for those of inner units, which ``runs[path]`` runs."""
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
        """The module with ``leaves`` as parameters; inner units are run by ``runs[path]``."""
        return self.made(self.values(leaves, runs), variables)

    def made(self, values: Values, variables: Sequence[jax.Array]) -> nnx.Module:
        """The module with ``values`` as parameters, by place."""
        return nnx.merge(
            self.graphdef,
            nnx.from_flat_state(list(values.items())),
            jax.tree.unflatten(self.variable_tree, variables),
            nnx.from_flat_state(list(self.constants.items())),
        )

    def with_constants(self, values: Mapping[str, Any]) -> UnitModule:
        """The same with other values of plain arrays, by path."""
        return replace(self, constants={key: values[joined(key)] for key in self.constants})

    def sealed_constants(self) -> UnitModule:
        """The same, and a traced program shows whether its constants are changed. Raises ``ValueError`` for shapes."""
        for key, value in self.constants.items():
            if isinstance(value, jax.ShapeDtypeStruct):
                raise ValueError(
                    f"array {joined(key)!r}: expected values of a plain array of the model, got its shape: "
                    "fully_shard and init_sharded have them"
                )
        return self.with_constants({joined(p): constant(joined(p), x) for p, x in self.constants.items()})

    def changed_constants(self, module: nnx.Module) -> dict[str, jax.Array]:
        """Plain arrays of a merged module that are other objects than those it was made of."""
        after = dict(nnx.to_flat_state(nnx.state(module, _is_plain)))
        return {joined(p): after[p] for p, x in self.constants.items() if p in after and after[p] is not x}

    def changed_variables(self, module: nnx.Module) -> list[jax.Array]:
        """The variables of a merged module after it ran.

        Variables that appeared are left out at the root, where a loss can read them, as sown ones are meant to be. In
        another unit they could not leave it: raises ``ValueError`` with their paths.
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
    """A variable that is no parameter: its nnx type, shape and dtype.

    ``rule``: how one value comes of several devices' (``runtime/groups/variables.py``), None where all must have the
    same. ``rows``: of rule "rows", the dimension that is cut over the devices as a batch is.
    """

    cls: type[nnx.Variable]
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
    flat = nnx.to_flat_state(nnx.state(as_module(model), VARIABLES))
    return {joined(key): variable.get_raw_value() for key, variable in flat}


def constant_leaves(model: nnx.Module) -> dict[str, Any]:
    """``{path: value}`` of every plain array: tables that are attributes of modules, neither trained nor saved."""
    return {joined(key): value for key, value in nnx.to_flat_state(nnx.state(model, _is_plain))}


def variable_infos(model: nnx.Module) -> dict[str, VariableInfo]:
    """The same without values. Raises ``ValueError`` for a variable that holds no array, by path."""
    infos = {}
    for key, variable in nnx.to_flat_state(nnx.state(model, VARIABLES)):
        value = variable.get_raw_value()
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise ValueError(f"variable {joined(key)!r}: expected an array, got {type(value).__name__}")
        infos[joined(key)] = VariableInfo(type(variable), tuple(value.shape), value.dtype)
    return infos


def abstract(model: nnx.Module) -> nnx.Module:
    """A copy of the model with shapes and dtypes in place of values, but for plain arrays."""
    graphdef, constants, state = cast(tuple[Any, Any, Any], nnx.split(model, _is_plain, ...))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    return nnx.merge(graphdef, constants, shapes)


def whole_model(model: nnx.Module) -> UnitModule:
    """The model as one unit with all parameters; never touches the model itself."""
    whole = abstract(model)
    return _split(whole, (), None, _variable_paths(whole))


def module_paths(model: nnx.Module, stacks: Mapping[str, int]) -> dict[str, str]:
    """Dotted path -> path in the model of every module that may be a unit, the root first; stacks layer by layer.

    Lists and dictionaries of modules are none; in a pytree, lists that hold arrays are.
    """
    by_dotted: dict[str, str] = {}
    for key, module in _modules(model):
        if not may_be_unit(module):
            continue
        path = joined(key)
        by_dotted.update(dict.fromkeys(dotted_paths(path, stacks), path))
    return by_dotted


def dotted_paths(path: str, stacks: Mapping[str, int]) -> list[str]:
    """The path of a module or parameter with dots, as policies match it: of a stack one for each layer."""
    stack = next((name for name in stacks if path == name or path.startswith(f"{name}/")), None)
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
    whole, claimed = abstract(model), abstract(model)
    variables = _variable_paths(whole)
    keys = [key for key, _ in _modules(whole) if joined(key) in paths and key]
    owners: dict[int, tuple[str, str]] = {}
    # Innermost first: what is left of an outer unit is its own.
    for key in sorted(keys, key=len, reverse=True):
        _claim(_get(claimed, key), key, owners)
        _set(claimed, key, None)
    _claim(claimed, (), owners)
    return {
        joined(key): _split(_get(whole, key), key, _layers(key, stacks or {}), variables, keys)
        for key in (*sorted(keys), ())
    }


def _split(
    module: nnx.Module,
    key: Key,
    layers: int | None,
    variable_paths: Mapping[int, str],
    keys: Sequence[Key] = (),
) -> UnitModule:
    """``keys``: of all units."""
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
    """NumPy's 64 bits are 32 in JAX, unless x64 is on."""
    return (
        dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)
    )


def _flat(state: Any) -> list[tuple[Key, Any]]:
    return [(cast(Key, key), leaf) for key, leaf in nnx.to_flat_state(state)]


def _layers(key: Key, stacks: Mapping[str, int]) -> int | None:
    path = joined(key)
    return next((n for s, n in stacks.items() if path == s or path.startswith(f"{s}/")), None)


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
