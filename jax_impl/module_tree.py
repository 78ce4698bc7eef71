"""Cut an nnx model into units: chosen submodules, and the root with all that no other unit owns."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

ROOT = ""
Key = tuple[str | int, ...]


class UnitSlot(nnx.Module):
    """Stands in its parent for a unit; ``call`` is set while a step is traced."""

    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


@dataclass(frozen=True)
class UnitModule:
    """A unit's own structure, without values.

    ``path``: module path in the model, ``""`` for the root. ``parameters``: paths in the model of the parameters it
    owns, sorted as in ``parameter_leaves``; ``shapes`` and ``dtypes`` belong to them. ``inner``: the units right inside
    it, path -> key within.
    """

    path: str
    graphdef: Any
    treedef: Any
    parameters: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[jnp.dtype, ...]
    inner: Mapping[str, Key]

    def merge(self, leaves: Sequence[jax.Array], inner: Mapping[str, Callable[..., Any]]) -> nnx.Module:
        """The module with ``leaves`` as parameters and ``inner[path]`` called where an inner unit stood."""
        module = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
        for path, key in self.inner.items():
            _get(module, key).call = inner[path]
        return module


def parameter_leaves(model: nnx.Module) -> dict[str, jax.Array]:
    """``{path: value}`` of every parameter, paths like ``layers/0/mlp/up/kernel``.

    Sorted part by part, list indices as numbers: ``layers/2`` comes before ``layers/10``.
    Raises ``ValueError`` when the model has other variables (batch statistics, random state), which are not supported.
    """
    variables = nnx.to_flat_state(nnx.state(model))
    others = [_joined(key) for key, variable in variables if not isinstance(variable, nnx.Param)]
    if others:
        raise ValueError(f"expected a model whose only variables are nnx.Param, got others at {others[:5]}")
    return {_joined(key): variable.get_raw_value() for key, variable in variables}


def abstract(model: nnx.Module) -> nnx.Module:
    """A copy of the model with shapes and dtypes in place of values."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))


def whole_model(model: nnx.Module) -> UnitModule:
    """The model as one unit with all parameters; never touches the model itself."""
    return _split(abstract(model), ())


def split_units(model: nnx.Module, patterns: Sequence[str]) -> dict[str, UnitModule]:
    """Units of ``model`` by path, the root last.

    A pattern matches a module path segment by segment (``layers/*``). Raises ``ValueError`` when a pattern matches no
    module, and when one parameter lies in two units (tied weights).
    """
    parameter_leaves(model)
    whole = abstract(model)
    keys = _matching(whole, patterns)
    units: dict[str, UnitModule] = {}
    owners: dict[int, tuple[str, str]] = {}
    # Innermost first: an outer unit is split when the units inside it are slots already.
    for key in sorted(keys, key=len, reverse=True):
        module = _get(whole, key)
        _claim(module, key, owners)
        units[_joined(key)] = _split(module, key)
        _set(whole, key, UnitSlot())
    _claim(whole, (), owners)
    ordered = {_joined(key): units[_joined(key)] for key in keys}
    return {**ordered, ROOT: _split(whole, ())}


def _split(module: nnx.Module, key: Key) -> UnitModule:
    graphdef, state = nnx.split(module, nnx.Param)
    flat = nnx.to_flat_state(state)
    leaves, treedef = jax.tree.flatten(state)
    return UnitModule(
        path=_joined(key),
        graphdef=graphdef,
        treedef=treedef,
        parameters=tuple(_joined((*key, *below)) for below, _ in flat),
        shapes=tuple(tuple(leaf.shape) for leaf in leaves),
        dtypes=tuple(leaf.dtype for leaf in leaves),
        inner={_joined(key + below): below for below, m in _modules(module) if isinstance(m, UnitSlot)},
    )


def _matching(model: nnx.Module, patterns: Sequence[str]) -> list[Key]:
    modules = [key for key, _ in _modules(model) if key]
    chosen: dict[Key, None] = {}
    for pattern in patterns:
        segments = pattern.split("/")
        found = [key for key in modules if _matches(key, segments)]
        if not found:
            raise ValueError(
                f"units: expected patterns of module paths, but {pattern!r} matches none of "
                f"{sorted(map(_joined, modules))[:12]}"
            )
        chosen.update(dict.fromkeys(found))
    return sorted(chosen)


def _matches(key: Key, segments: Sequence[str]) -> bool:
    return len(key) == len(segments) and all(
        fnmatch.fnmatchcase(str(part), segment) for part, segment in zip(key, segments, strict=True)
    )


def _claim(module: nnx.Module, key: Key, owners: dict[int, tuple[str, str]]) -> None:
    """Note the variables that are this unit's own; ``owners`` gives each variable's unit and path."""
    unit = _joined(key)
    for below, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param):
            path = _joined((*key, *below))
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


def _joined(key: Iterable[Any]) -> str:
    return "/".join(map(str, key))
