"""linen modules with sharded parameters: submodules that are units run with weights gathered for them.

A submodule finds its parameters by its path, in the tree that ``Module.apply`` is given. Where that path is a unit, the
call is caught and made again on an unbound copy, with the unit's own parameters::

    apply(net, {"embed": E, "block_0": unit})
      net.embed(...)                    E
      net.block_0(...) -> caught        call_unit: block_0 alone, applied to its gathered parameters

A stack that linen scans has its unit's arrays among its parameters, so that the loop slices them layer by layer::

    {"layers": {"Dense_0": {"kernel": zeros [N, ...]}, "twinshard unit": arrays [N, ...]}}
      nn.scan(Block)(name="layers")     each pass: Block called with arrays [...] -> caught
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
# Beside the parameters of a stack: a name that no linen module has, as it is no identifier.
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
    """``module.apply`` in a loss over ``variables["params"]`` of a sharded model; the same without sharding.

    ::

        params = net.init(key, rows)["params"]
        plan, weights = fully_shard(params, mesh, units=["Block_*"])

        def loss(params, rows):
            return jnp.mean(apply_linen(net, {"params": params}, rows) ** 2)

    Units are paths of submodules, such as ``Block_0``. A submodule at such a path runs with its weights gathered,
    whichever of its methods is called, also under ``nn.remat``. A unit's random numbers come from keys made for it, so
    they are others than linen's. They are the same on all devices, unless ``rngs`` come from the batch; streams of nnx
    models differ by device.

    Modules lifted by ``nn.scan`` or ``nn.vmap`` over axis 0 of their parameters are stacks. Each layer of
    ``fully_shard(params, mesh, units=["layers/*"], stacked=["layers"])`` is gathered and reduced in its turn inside of
    the loop; the members of ``nn.vmap`` together.

    ``mutable``: names of collections that modules write, such as ``["batch_stats"]`` or ``["intermediates"]``; the
    result is then ``(output, updated)``. Statistics are an input of the step that every device has whole, and a part of
    its metrics: means over devices and microbatches, each of which has begun with the statistics given::

        def loss(params, rows, stats):
            variables = {"params": params, "batch_stats": stats}
            y, updated = apply_linen(net, variables, rows, mutable=["batch_stats"])
            return jnp.mean(y**2), updated["batch_stats"]

        step = make_train_step(plan, loss, optimizer, has_aux=True)
        state, metrics = step(state, rows, stats)
        stats = metrics["aux"]

    Normalization uses the rows of one microbatch on one device, in the pjit engine of the whole microbatch. The same is
    had in the shard_map engine by ``nn.BatchNorm(axis_name="dp")``, with the names of the mesh's axes.

    Raises ``ValueError`` by name for units inside of a stack that ``stacked`` does not name, for units that use a
    module outside of them or whose parameters are read from outside, and where ``mutable`` is no list of names or has
    "params".
    """
    names = _collections(mutable)

    def call(bound: Any, args: Any, kwargs: Any) -> Any:
        if callable(method):
            return getattr(method, "__func__", method)(bound, *args, **kwargs)
        return getattr(bound, method or "__call__")(*args, **kwargs)

    return _apply(module, variables, call, rngs, args, kwargs, names)


def _collections(mutable: Any) -> list[str] | None:
    """None for no result of what modules write."""
    if mutable is False:
        return None
    names = [mutable] if isinstance(mutable, str) else mutable
    if not isinstance(names, list | tuple | set | frozenset) or "params" in names:
        raise ValueError(
            f"mutable: expected False or names of collections other than params, such as ['batch_stats'], got "
            f"{mutable!r}: parameters change in the optimizer's update only"
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
    """``sliced``: inside of a layer, where units of the same stack have its arrays only."""
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
            "linen: expected parameters of all modules; where a unit uses those of a module outside of it, such as a "
            f"field, choose units that contain both: {error}"
        ) from error


class _UnitCalls:
    """Catches the calls of submodules that are units, one level deep."""

    def __init__(
        self,
        units: Mapping[Path, Tree],
        names: tuple[str, ...],
        mutable: Sequence[str] | None,
        sliced: bool,
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
            # A module of its own that is applied inside: its paths begin anew.
            return run(*args, **kwargs) if module is self.root else self._without(run, *args, **kwargs)
        stand_in = self.units.get(module.path)
        # Lifted functions are no methods; what they call is caught in its turn.
        if stand_in is None or not hasattr(type(module), name):
            return run(*args, **kwargs)
        unbound, own = module.unbind()
        stand_in = self._checked(stand_in, own.get("params", {}))
        # What is lifted in place (nn.scan on the method itself) is caught inside of the loop, and is not to loop again.
        method = wrap_method_once(context.orig_method.func)
        keys = {key: module.make_rng(key) for key in self.names}
        # In a lifted function others may be mutable than outside.
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
        """The unit with the arrays of this call, which are one layer's in a stack."""
        unit, parameters = _unit(stand_in), unit_parameters(stand_in)
        params = dict(params)
        whole = [parameter.shape for parameter in parameters]
        arrays, fits = None, True
        if unit.layers is not None and not self.sliced:
            # Without the arrays of a loop, it is a call with the whole stack.
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
                f'over axis {which}: write variable_axes={{"params": 0}}, with that axis of the parameters moved to '
                "the front (jnp.moveaxis), or choose units that contain the loop"
            )
        raise ValueError(
            f"unit {unit.path!r}, {layers}: expected a linen module that is called with all of its parameters, or "
            "with those of one layer of a stack inside of nn.scan or nn.vmap over axis 0: name what these lift by "
            'fully_shard(..., units=["layers/*"], stacked=["layers"]), and nothing else'
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
    """The tree with sealed zeros in place of units, since ``setup`` may look at parameters; nothing may use them."""
    if is_whole_unit(params):
        units[path] = params
        unit, parameters = _unit(params), unit_parameters(params)
        zeros = jax.tree.map(zeros_of, params, is_leaf=is_unit_parameter)
        if unit.layers is None or sliced or not isinstance(zeros, Mapping):
            return zeros
        return {**zeros, _ARRAYS: _for_loop(unit, parameters)}
    if isinstance(params, Mapping):
        return {name: _placeholders(below, (*path, name), units, sliced) for name, below in params.items()}
    # A box would constrain its value by names that the mesh may not have; the plan has cut the value already.
    return params.value if isinstance(params, meta.Partitioned) else params


def _without_arrays(params: Tree) -> Tree:
    """Without what units inside carry."""
    if not isinstance(params, Mapping):
        return params
    return {name: _without_arrays(below) for name, below in params.items() if name != _ARRAYS}


def _unit(stand_in: Tree) -> UnitRun:
    unit = unit_at(stand_in)
    assert unit is not None
    return unit


def _for_loop(unit: UnitRun, parameters: Sequence[UnitParameter]) -> tuple[jax.Array, ...]:
    """The arrays of a stack, with all axes that its parameters may be looped over.

    And one more, whose shape inside of the loop tells axis 0 from others, whatever the sizes.
    """
    axes = min((parameter.ndim for parameter in parameters), default=1)
    shaped = (array.reshape(*array.shape, *(1,) * (axes - array.ndim)) for array in unit.arrays)
    return (*shaped, jnp.zeros((unit.layers or 0, *(1,) * (axes - 1)), bool))


def _looped_axes(whole: Sequence[tuple[int, ...]], cut: Sequence[tuple[int, ...]]) -> set[int]:
    """Along which axes a loop may have cut shapes ``cut`` out of the whole ones."""
    if len(whole) != len(cut) or not whole:
        return set()
    return {
        axis
        for axis in range(min(map(len, whole)))
        if all(
            (*shape[:axis], *shape[axis + 1 :]) == sliced for shape, sliced in zip(whole, cut, strict=True)
        )
    }
