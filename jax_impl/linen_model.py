"""linen modules with sharded parameters: submodules that are units run with weights gathered for them.

A submodule finds its parameters by its path, in the tree that ``Module.apply`` is given. Where that path is a unit, the
call is caught and made again on an unbound copy, with the unit's own parameters::

    apply(net, {"embed": E, "block_0": unit})
      net.embed(...)                    E
      net.block_0(...) -> caught        call_unit: block_0 alone, applied to its gathered parameters
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from jax_impl.tree_model import Tree, call_unit
from jax_impl.unit_slot import UnitSlot, unit_type

Path = tuple[str, ...]


def apply_linen(
    module: linen.Module,
    variables: Mapping[str, Any],
    *args: Any,
    method: str | None = None,
    rngs: Mapping[str, jax.Array] | None = None,
    mutable: Any = False,
    **kwargs: Any,
) -> Any:
    """``module.apply`` in a loss over ``variables["params"]`` of a sharded model; the same without sharding.

    Units are paths of submodules, such as ``Block_0``. Other collections are read. A unit's random numbers come from
    a key of its own, so they are others than linen's. Raises ``ValueError`` for ``mutable`` collections, and for units
    under ``nn.scan``.
    """
    if mutable:
        raise ValueError(
            f"mutable: expected False, got {mutable!r}: what a linen module writes could not leave its unit; "
            "nnx.bridge.ToNNX(module, rngs).lazy_init(...) makes a model whose variables are kept"
        )
    units: dict[Path, UnitSlot] = {}
    whole = {**variables, "params": _placeholders(variables.get("params", {}), (), units)}
    free = [True]

    def caught(run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        below = context.module
        slot = units.get(below.path) if free[0] else None
        if slot is None or context.method_name == "setup":
            return run(*args, **kwargs)
        unbound, found = below.unbind()
        others = {name: tree for name, tree in found.items() if name != "params"}
        keys = {name: below.make_rng(name) for name in rngs or {}}

        def apply(params: Tree, others: Any, keys: Any, args: Any, kwargs: Any) -> Any:
            given = {**others, "params": params}
            return apply_linen(unbound, given, *args, method=context.method_name, rngs=keys, **kwargs)

        # Paths inside of the unit begin at the unit.
        free[0] = False
        try:
            return call_unit(apply, slot, others, keys, args, kwargs)
        finally:
            free[0] = True

    with linen.intercept_methods(caught):
        return module.apply(whole, *args, method=method, rngs=dict(rngs or {}), **kwargs)


def _placeholders(params: Tree, path: Path, units: dict[Path, UnitSlot]) -> Tree:
    """The tree with zeros in place of units, since ``setup`` may look at parameters; XLA removes them."""
    if isinstance(params, UnitSlot):
        unit = unit_type(params)
        if unit.layers is not None:
            raise ValueError(
                f"unit {unit.path!r}: expected a linen module outside of nn.scan, got a stack of {unit.layers} layers: "
                "scan the layers' parameters with jax.lax.scan, and call_unit in its body"
            )
        if path in units or path == ():
            raise ValueError(f"unit {unit.path!r}: expected parameters of a submodule, got the module's own")
        units[path] = params
        return _zeros(unit.shapes)
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
