"""linen modules with sharded parameters: submodules that are units run with weights gathered for them.

A submodule finds its parameters by its path, in the tree that ``Module.apply`` is given. Where that path is a unit, the
call is caught and made again on an unbound copy, with the unit's own parameters::

    apply(net, {"embed": E, "block_0": unit})
      net.embed(...)                    E
      net.block_0(...) -> caught        call_unit: block_0 alone, applied to its gathered parameters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen

from jax_impl.modules.seal import seal
from jax_impl.modules.tree_model import Tree, call_unit
from jax_impl.modules.unit_slot import UnitSlot, unit_type

Path = tuple[str, ...]


def apply_linen(
    module: linen.Module,
    variables: Mapping[str, Any],
    /,
    *args: Any,
    method: Callable[..., Any] | str | None = None,
    rngs: Any = None,
    mutable: Any = False,
    **kwargs: Any,
) -> Any:
    """``module.apply`` in a loss over ``variables["params"]`` of a sharded model; the same without sharding.

    ::

        params = net.init(key, rows)["params"]
        plan, weights = fully_shard(params, mesh, units=["Block_*"])

        def loss(params, rows):
            return jnp.mean(apply_linen(net, {"params": params}, rows) ** 2)

    Units are paths of submodules, such as ``Block_0``. A submodule at such a path runs with its weights gathered,
    whichever of its methods is called, also under ``nn.remat``. Other collections are read. A unit's random numbers
    come from keys made for it, so they are others than linen's. They are the same on all devices, unless ``rngs``
    come from the batch; streams of nnx models differ by device.

    Raises ``ValueError`` by name for units inside of ``nn.scan`` or ``nn.vmap``, for units that use a module outside of
    them or whose parameters are read from outside, and for ``mutable`` collections. ``nnx.bridge.ToNNX`` keeps those;
    such a model is one unit.
    """
    if mutable is not False:
        raise ValueError(
            f"mutable: expected False, got {mutable!r}: what a linen module writes could not leave its unit; "
            "nnx.bridge.ToNNX(module, rngs).lazy_init(...) makes an nnx model, one unit, that keeps it"
        )

    def call(bound: Any, args: Any, kwargs: Any) -> Any:
        if callable(method):
            return getattr(method, "__func__", method)(bound, *args, **kwargs)
        return getattr(bound, method or "__call__")(*args, **kwargs)

    return _apply(module, variables, call, rngs, args, kwargs)


def _apply(
    module: linen.Module,
    variables: Mapping[str, Any],
    call: Callable[[Any, Any, Any], Any],
    rngs: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    params = variables.get("params", {})
    if isinstance(params, UnitSlot):

        def whole(params: Tree, others: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
            return _apply(module, {**others, "params": params}, call, rngs, args, kwargs)

        return call_unit(whole, params, _others(variables), rngs, args, kwargs)
    keys: Any = rngs if rngs is None or isinstance(rngs, Mapping) else {"params": rngs}
    units: dict[Path, UnitSlot] = {}
    given = {**variables, "params": _placeholders(params, (), units)}
    calls = _UnitCalls(units, tuple(keys or ()))
    try:
        with linen.intercept_methods(calls.catch):
            return module.apply(given, rngs=keys, method=lambda bound: call(bound, args, kwargs))
    except (errors.ScopeParamNotFoundError, errors.ScopeCollectionNotFound) as error:
        raise ValueError(
            "linen: expected parameters of all modules; where a unit uses those of a module outside of it, such as a "
            f"field, choose units that contain both: {error}"
        ) from error


class _UnitCalls:
    """Catches the calls of submodules that are units, one level deep."""

    def __init__(self, units: Mapping[Path, UnitSlot], names: tuple[str, ...]) -> None:
        self.units, self.names = units, names
        self.root: linen.Module | None = None
        self.off = False

    def catch(self, run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, name = context.module, context.method_name
        if self.off or name == "setup":
            return run(*args, **kwargs)
        if module.path == ():
            self.root = self.root or module
            # A module of its own that is applied inside: its paths begin anew.
            return run(*args, **kwargs) if module is self.root else self._without(run, *args, **kwargs)
        slot = self.units.get(module.path)
        # Lifted functions are no methods; what they call is caught in its turn.
        if slot is None or not hasattr(type(module), name):
            return run(*args, **kwargs)
        unbound, found = module.unbind()
        _check_shapes(slot, found.get("params", {}))
        keys = {key: module.make_rng(key) for key in self.names}

        def call(bound: Any, args: Any, kwargs: Any) -> Any:
            return getattr(bound, name)(*args, **kwargs)

        def apply(params: Tree, others: Any, keys: Any, args: Any, kwargs: Any) -> Any:
            return _apply(unbound, {**others, "params": params}, call, keys or None, args, kwargs)

        return self._without(call_unit, apply, slot, _others(found), keys, args, kwargs)

    def _without(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.off = True
        try:
            return run(*args, **kwargs)
        finally:
            self.off = False


def _others(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tree for name, tree in variables.items() if name != "params"}


def _placeholders(params: Tree, path: Path, units: dict[Path, UnitSlot]) -> Tree:
    """The tree with sealed zeros in place of units, since ``setup`` may look at parameters; nothing may use them."""
    if isinstance(params, UnitSlot):
        units[path] = params
        return seal(unit_type(params).path, _zeros(unit_type(params).shapes))
    if isinstance(params, Mapping):
        return {name: _placeholders(below, (*path, name), units) for name, below in params.items()}
    return params


def _zeros(shapes: Tree) -> Tree:
    def zero(leaf: Any) -> Any:
        return (
            _zeros(unit_type(leaf).shapes)
            if isinstance(leaf, UnitSlot)
            else jnp.zeros(leaf.shape, leaf.dtype)
        )

    return jax.tree.map(zero, shapes, is_leaf=lambda leaf: isinstance(leaf, UnitSlot))


def _check_shapes(slot: UnitSlot, found: Tree) -> None:
    unit = unit_type(slot)
    shapes = [leaf.shape for leaf in jax.tree.leaves(found)]
    expected = [leaf.shape for leaf in jax.tree.leaves(_zeros(unit.shapes))]
    if unit.layers is not None or shapes != expected:
        layers = "" if unit.layers is None else f", a stack of {unit.layers} layers"
        raise ValueError(
            f"unit {unit.path!r}: expected a linen module that is called with all of its parameters, got one inside of "
            f"nn.scan, nn.vmap or the like{layers}: make it part of a larger unit, or scan the layers' parameters with "
            "jax.lax.scan, and call_unit in its body"
        )
