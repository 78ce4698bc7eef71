"""linen modules with sharded parameters: a submodule that is a unit runs with its gathered weights.

A submodule finds its parameters by its path in the tree that ``Module.apply`` receives. If that path is a unit, the
call is caught and repeated on an unbound copy, with the unit's own parameters::

    apply(net, {"embed": E, "block_0": unit})
      net.embed(...)                    E
      net.block_0(...) -> caught        call_unit: block_0 alone, applied to its gathered parameters

If linen scans a stack, the unit's arrays are among the stack's parameters, so that the loop slices them layer by
layer::

    {"layers": {"Dense_0": {"kernel": zeros [N, ...]}, "twinshard unit": arrays [N, ...]}}
      nn.scan(Block)(name="layers")     each iteration: Block called with arrays [...] -> caught
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen
from flax.core import meta
from flax.linen.module import wrap_method_once

from jax_impl.modules.tree_model import Tree, call_unit
from jax_impl.modules.unit_parameter import (
    UnitParameter,
    UnitRun,
    is_unit_parameter,
    is_whole_unit,
    unit_at,
    unit_parameters,
    with_arrays,
    zeros_of,
)

Path = tuple[str, ...]
# The name of an entry next to the parameters of a stack; no linen module has this name, since it is not an identifier.
_ARRAYS = "twinshard unit"


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
    """``module.apply`` for a loss over ``variables["params"]`` of a sharded model; also works without sharding.

    ::

        params = net.init(key, rows)["params"]
        plan, weights = fully_shard(params, mesh, units=["Block_*"])

        def loss(params, rows):
            return jnp.mean(apply_linen(net, {"params": params}, rows) ** 2)

    Units are paths of submodules, such as ``Block_0``. A submodule at such a path runs with its weights gathered, for
    any of its methods, also under ``nn.remat``. A unit's random numbers come from keys made for the unit, so they
    differ from linen's. They are the same on all devices, unless ``rngs`` come from the batch; streams of nnx models
    differ by device.

    Modules lifted by ``nn.scan`` or ``nn.vmap`` over axis 0 of their parameters are stacks. With ``fully_shard(params,
    mesh, units=["layers/*"], stacked=["layers"])``, layers are gathered and reduced one after another inside the loop,
    and the members of ``nn.vmap`` together.

    ``mutable``: names of collections that modules write, such as ``["batch_stats"]`` or ``["intermediates"]``; the
    result is then ``(output, updated)``. Statistics are a replicated input of the step, and its metrics contain the new
    statistics: means over devices and microbatches, each of which began with the given statistics::

        def loss(params, rows, stats):
            variables = {"params": params, "batch_stats": stats}
            y, updated = apply_linen(net, variables, rows, mutable=["batch_stats"])
            return jnp.mean(y**2), updated["batch_stats"]

        step = make_train_step(plan, loss, optimizer, has_aux=True)
        state, metrics = step(state, rows, stats)
        stats = metrics["aux"]

    Normalization uses the rows of one microbatch on one device; in the pjit engine, the rows of the whole microbatch.
    In the shard_map engine, ``nn.BatchNorm(axis_name="dp")`` with the names of the mesh axes does the same.

    Raises ``ValueError`` that names units inside a stack that ``stacked`` does not name, units that use a module
    outside them, and units whose parameters are read from outside; also if ``mutable`` is not a list of names or
    contains "params".
    """
    names = _collections(mutable)

    def call(bound: Any, args: Any, kwargs: Any) -> Any:
        if callable(method):
            return getattr(method, "__func__", method)(bound, *args, **kwargs)
        return getattr(bound, method or "__call__")(*args, **kwargs)

    return _apply(module, variables, call, rngs, args, kwargs, names)


def _collections(mutable: Any) -> list[str] | None:
    """None if the caller does not want what modules write."""
    if mutable is False:
        return None
    names = [mutable] if isinstance(mutable, str) else mutable
    if not isinstance(names, list | tuple | set | frozenset) or "params" in names:
        raise ValueError(
            f"mutable: expected False or names of collections other than params, such as ['batch_stats'], got "
            f"{mutable!r}: only the optimizer's update changes parameters"
        )
    return sorted(names)


def _apply(
    module: linen.Module,
    variables: Mapping[str, Any],
    call: Callable[[Any, Any, Any], Any],
    rngs: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mutable: list[str] | None,
    sliced: bool = False,
) -> Any:
    """``sliced``: inside a layer, where units of the same stack have only that layer's arrays."""
    params = variables.get("params", {})
    unit = unit_at(params)
    if unit is not None:
        layer = sliced or unit.layers is not None

        def whole(params: Tree, others: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
            return _apply(module, {**others, "params": params}, call, rngs, args, kwargs, mutable, layer)

        return call_unit(whole, params, _others(variables), rngs, args, kwargs)
    keys: Any = rngs if rngs is None or isinstance(rngs, Mapping) else {"params": rngs}
    units: dict[Path, Tree] = {}
    collections = {**variables, "params": _placeholders(params, (), units, sliced)}
    calls = _UnitCalls(units, tuple(keys or ()), mutable, sliced)
    try:
        with linen.intercept_methods(calls.catch):
            return module.apply(
                collections,
                rngs=keys,
                mutable=False if mutable is None else mutable,
                method=lambda bound: call(bound, args, kwargs),
            )
    except (errors.ScopeParamNotFoundError, errors.ScopeCollectionNotFound) as error:
        raise ValueError(
            "linen: expected parameters for all modules; if a unit uses a module outside the unit, such as a field, "
            f"choose units that contain both: {error}"
        ) from error


class _UnitCalls:
    """Catches the calls of submodules that are units, one level deep."""

    def __init__(
        self, units: Mapping[Path, Tree], names: tuple[str, ...], mutable: Sequence[str] | None, sliced: bool
    ) -> None:
        self.units, self.names, self.mutable, self.sliced = units, names, mutable, sliced
        self.root: linen.Module | None = None
        self.off = False

    def catch(self, run: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, name = context.module, context.method_name
        if self.off or name == "setup":
            return run(*args, **kwargs)
        if module.path == ():
            self.root = self.root or module
            # A separate module that is applied inside has its own paths.
            return run(*args, **kwargs) if module is self.root else self._without(run, *args, **kwargs)
        stand_in = self.units.get(module.path)
        # Lifted functions are not methods; the methods that they call are caught later.
        if stand_in is None or not hasattr(type(module), name):
            return run(*args, **kwargs)
        unbound, own = module.unbind()
        stand_in = self._checked(stand_in, own.get("params", {}))
        # A method that is lifted in place (nn.scan on a method) is caught inside the loop and must not loop again.
        method = wrap_method_once(context.orig_method.func)
        keys = {key: module.make_rng(key) for key in self.names}
        # Inside a lifted function, other collections may be mutable than outside.
        mutable = [name for name in self.mutable or () if module.is_mutable_collection(name)]
        layer = self.sliced or _unit(stand_in).layers is not None

        def call(bound: Any, args: Any, kwargs: Any) -> Any:
            return method(bound, *args, **kwargs)

        def apply(params: Tree, others: Any, keys: Any, args: Any, kwargs: Any) -> Any:
            collections = {**others, "params": params}
            return _apply(unbound, collections, call, keys or None, args, kwargs, mutable, layer)

        output, updated = self._without(call_unit, apply, stand_in, _others(own), keys, args, kwargs)
        for collection, variables in updated.items():
            for below, value in variables.items():
                module.put_variable(collection, below, value)
        return output

    def _checked(self, stand_in: Tree, params: Tree) -> Tree:
        """The unit with the arrays of this call; in a stack, the arrays of one layer."""
        unit, parameters = _unit(stand_in), unit_parameters(stand_in)
        params = dict(params)
        whole = [parameter.shape for parameter in parameters]
        arrays, fits = None, True
        if unit.layers is not None and not self.sliced:
            # Without the arrays of a loop, the call gets the whole stack.
            looped = _for_loop(unit, parameters)
            arrays = params.pop(_ARRAYS, looped)
            fits = [own_array.shape for own_array in arrays] == [own_array.shape[1:] for own_array in looped]
            if fits:
                own = zip(arrays, unit.arrays, strict=False)
                arrays = [own_array.reshape(array.shape[1:]) for own_array, array in own]
        leaves = jax.tree.leaves(_without_arrays(params))
        shapes = [leaf.shape for leaf in leaves]
        if fits and shapes == [shape[unit.layers is not None and not self.sliced :] for shape in whole]:
            return with_arrays(stand_in, leaves, arrays)
        layers = "no stack" if unit.layers is None else f"a stack of {unit.layers} layers"
        axes = _looped_axes(whole, shapes) - {0}
        if axes and (unit.layers is not None or 0 not in _looped_axes(whole, shapes)):
            which = " or ".join(map(str, sorted(axes)))
            raise ValueError(
                f"unit {unit.path!r}, {layers}: expected nn.scan or nn.vmap over axis 0 of its parameters, got one "
                f'over axis {which}: use variable_axes={{"params": 0}} and move that axis of the parameters to the '
                "front (jnp.moveaxis), or choose units that contain the loop"
            )
        raise ValueError(
            f"unit {unit.path!r}, {layers}: expected a linen module that is called with all its parameters, or with "
            "one layer's parameters of a stack inside nn.scan or nn.vmap over axis 0: name exactly the lifted "
            'modules by fully_shard(..., units=["layers/*"], stacked=["layers"])'
        )

    def _without(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.off = True
        try:
            return run(*args, **kwargs)
        finally:
            self.off = False


def _others(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tree for name, tree in variables.items() if name != "params"}


def _placeholders(params: Tree, path: Path, units: dict[Path, Tree], sliced: bool) -> Tree:
    """The tree with sealed zeros in place of units: ``setup`` may look at parameters, but nothing may use them."""
    if is_whole_unit(params):
        units[path] = params
        unit, parameters = _unit(params), unit_parameters(params)
        zeros = jax.tree.map(zeros_of, params, is_leaf=is_unit_parameter)
        if unit.layers is None or sliced or not isinstance(zeros, Mapping):
            return zeros
        return {**zeros, _ARRAYS: _for_loop(unit, parameters)}
    if isinstance(params, Mapping):
        return {name: _placeholders(below, (*path, name), units, sliced) for name, below in params.items()}
    # A box would constrain its value to axis names that the mesh may lack; the plan has already cut the value.
    return params.value if isinstance(params, meta.Partitioned) else params


def _without_arrays(params: Tree) -> Tree:
    """The tree without the arrays that inner units carry."""
    if not isinstance(params, Mapping):
        return params
    return {name: _without_arrays(below) for name, below in params.items() if name != _ARRAYS}


def _unit(stand_in: Tree) -> UnitRun:
    unit = unit_at(stand_in)
    assert unit is not None
    return unit


def _for_loop(unit: UnitRun, parameters: Sequence[UnitParameter]) -> tuple[jax.Array, ...]:
    """The arrays of a stack, with all axes over which a loop may slice its parameters.

    An extra array follows; its shape inside the loop tells axis 0 from other axes, for any sizes.
    """
    axes = min((parameter.ndim for parameter in parameters), default=1)
    shaped = (array.reshape(*array.shape, *(1,) * (axes - array.ndim)) for array in unit.arrays)
    return (*shaped, jnp.zeros((unit.layers or 0, *(1,) * (axes - 1)), bool))


def _looped_axes(whole: Sequence[tuple[int, ...]], cut: Sequence[tuple[int, ...]]) -> set[int]:
    """The axes along which a loop may have cut the shapes ``cut`` out of the whole shapes."""
    if len(whole) != len(cut) or not whole:
        return set()
    return {
        axis
        for axis in range(min(map(len, whole)))
        if all(
            (*shape[:axis], *shape[axis + 1 :]) == sliced for shape, sliced in zip(whole, cut, strict=True)
        )
    }
