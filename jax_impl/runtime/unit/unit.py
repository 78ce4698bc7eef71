"""Use a unit's weights without keeping them: gather, apply, drop; in backward gather again and reduce-scatter.

The order of one training step over two units A and B inside the root R, under
``optim_grads_params``::

    forward    gather R | gather A, apply A, drop A | gather B, apply B, drop B | loss, drop R
    backward   gather R | gather B, backward B, scatter dB | gather A, backward A, scatter dA | scatter dR

``UnitCall`` defines the phases, and ``order.py`` schedules their transfers. Three fences make XLA keep that order:

1. A gather waits for the unit's input. Otherwise XLA issues the gathers of all units and microbatches at the start.
2. A unit's output and its residuals leave together. Otherwise XLA recomputes a small residual from the gathered
   weights, and so keeps the whole buffer alive until backward.
3. The second gather waits for the output's cotangent and the saved activations. Otherwise XLA merges it with the first.

A unit whose weights are whole during the step needs no gather, but its gradients still leave through this module, as
one array. With ``recompute`` a unit saves only its inputs, and backward applies the unit again with the weights that
backward gathers anyway; this gathers units inside once more, except the last ones (``order.py``). With a name instead
of True (``bridge.core.sharding.policy.recompute``) the unit also saves the results of products.

Under ``jax.vmap``, for example of a model for one row, a unit is vectorized inside::

    jax.vmap(model)(rows)      for each unit   gather, vmap(apply) over all rows, reduce the sum of their gradients

JAX itself would also vectorize the gather and the backward, so that a gradient of every row is kept and reduced. The
axis keeps its name inside the unit, and a result that is the same for all rows, such as a mean over it, is not batched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import jaxpr_as_fun

from bridge.core.sharding.policy.recompute import Recompute
from jax_impl.comm.collectives import fence, fence_some
from jax_impl.modules.seal import open_sealed
from jax_impl.runtime.groups.logical_group import Group
from jax_impl.runtime.program.residuals import Saved, with_dependence, with_derived
from jax_impl.runtime.unit.order import Held, Order

Leaves = tuple[jax.Array, ...]
# For each group: the arrays whose cotangents are its gradients, and the arrays from which its weights come.
Collectors = tuple[tuple[jax.Array, ...], ...]
Sources = tuple[tuple[jax.Array, ...], ...]


@dataclass(frozen=True)
class UnitCall:
    """``apply(leaves of each group, inner, *inputs)`` with the weights of ``groups`` from their sources.

    ``order``: order of the model's transfers. ``derives``: see ``residuals.py``.

    In profiles, the unit's operations have ``name`` in their names, followed by "gather", "recompute" or "reduce"
    except in plain forward and backward.
    """

    name: str
    apply: Callable[..., Any]
    groups: Sequence[Group]
    recompute: Recompute
    order: Order
    derives: bool

    def __call__(
        self,
        collectors: Collectors,
        sources: Sources,
        inner: Mapping[str, tuple[Collectors, Sources]],
        *inputs: Any,
    ) -> Any:
        """``inner`` holds collectors and sources of the units inside this one; ``inputs`` are pytrees of arrays.

        The derivative by ``collectors`` is each group's reduced gradient; sources have no gradient.
        """
        if any(group.layers is not None for group in self.groups):
            # Members of an ensemble have different weights, and units may be inside: use JAX's own vectorization.
            return self._call_once(collectors, sources, inner, *inputs)
        return call_batched(self._call_with, self.apply, collectors, sources, inner, *inputs)

    def _call_with(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        return replace(self, apply=apply)._call_once

    def _call_once(self, *arrays: Any) -> Any:
        # Profiles, XLA's text, and errors about loops around a gather (modules/device_values.py) use this name.
        in_scope = jax.named_scope(self.name)
        call = jax.custom_vjp(in_scope(self._primal))
        call.defvjp(in_scope(self._forward), in_scope(self._backward))
        return call(*arrays)

    def _primal(self, collectors: Collectors, sources: Sources, inner: Any, *inputs: Any) -> Any:
        held, inputs = self.order.gather(self.groups, open_sealed(sources), inputs, again=False)
        return self.apply(self._leaves(held), inner, *inputs)

    def _forward(self, collectors: Collectors, sources: Sources, inner: Any, *inputs: Any) -> tuple[Any, Any]:
        held, inputs = self.order.gather(self.groups, open_sealed(sources), inputs, again=False)
        output, saved = self._apply_and_save(self._leaves(held), inner, inputs)
        use = self.order.kept.keep(held) if self._is_sharded else None
        return output, (sources, inner, saved, use)

    def _apply_and_save(self, leaves: tuple[Leaves, ...], inner: Any, inputs: Any) -> tuple[Any, Any]:
        """The output, and the residuals for backward without weights."""
        if self.recompute is True:
            return self.apply(leaves, inner, *inputs), inputs
        if not self._is_sharded:
            # No fence 2: weights that are whole during the step exist in backward anyway.
            output, vjp = self._differentiate(leaves, inner, *inputs)
            return output, Saved.of(vjp, [True] * len(jax.tree.leaves(vjp)))
        if self.derives:
            output, rest, depends = with_derived(self._differentiate, 2, leaves, inner, *inputs)
        else:
            (output, vjp), every = with_dependence(self._differentiate, leaves, inner, *inputs)
            results = len(jax.tree.leaves(output))
            depends, rest = every[:results], Saved.of(vjp, every[results:])
        # Fence 2. Without it, backward computes ``dot + bias`` again from a slice of the gathered buffer, and each
        # layer's whole buffer stays alive for its bias (unrolled: 27.75 MB instead of 8.98 MB). Constants do not pass
        # the fence, or they would become arrays: compiled for 64 GPUs, the pjit engine then needed four times the
        # memory of a step written by hand.
        output, varying = fence_some((output, rest.varying), [*depends, *[True] * len(rest.varying)])
        return output, replace(rest, varying=varying)

    def _differentiate(self, leaves: Any, inner: Any, *inputs: Any) -> tuple[Any, Any]:
        vjp: Any
        apply = self.apply
        if isinstance(self.recompute, str):
            # The policy sees the unit's computation, not the gather, which is outside ``apply``.
            apply = jax.checkpoint(apply, policy=getattr(jax.checkpoint_policies, self.recompute))
        output, vjp = jax.vjp(apply, leaves, inner, *inputs)
        # JAX lists residuals that are arguments separately, so weights can be removed and put back. Policies of
        # jax.checkpoint cannot do that: policies that refuse gathers by name keep the slices of the gathered buffer (6
        # scanned layers: 38.1 MB, as without a policy; 18.5 MB with this removal).
        vjp.args_res[:2] = [None, None]
        return output, vjp

    def _backward(self, saved: Any, cotangent: Any) -> tuple[Any, ...]:
        sources, inner, rest, use = saved
        whole = self.recompute is True
        varying = rest if whole else rest.varying
        if self.recompute:
            # Without this fence XLA would merge the second forward with the first, and keep its results, if no gather
            # puts a barrier between them: if neither this unit nor an enclosing unit has its own weights.
            cotangent, varying = fence((cotangent, varying))
        held, (cotangent, varying) = self.order.gather(
            self.groups, open_sealed(sources), (cotangent, varying), again=True, use=use
        )
        leaves = self._leaves(held)
        if whole:
            with jax.named_scope("recompute"):
                vjp = self._recompute(leaves, inner, varying)
        else:
            vjp = replace(rest, varying=varying).whole(leaves, inner)
            vjp.args_res[:2] = [leaves, inner]
        # Fence 3 is in ``order.gather`` above: the weights wait for the cotangent and the saved arrays.
        gradients, inner_gradients, *input_gradients = vjp(cotangent)
        collected = {path: mine for path, (mine, _) in inner_gradients.items()}
        reduced, collected, input_gradients = self.order.reduce(
            self.groups, gradients, collected, input_gradients
        )
        return (
            tuple(reduced),
            None,
            {path: (mine, None) for path, mine in collected.items()},
            *input_gradients,
        )

    def _recompute(self, leaves: tuple[Leaves, ...], inner: Any, inputs: Any) -> Any:
        try:
            with self.order.kept.recomputing():
                return jax.vjp(self.apply, leaves, inner, *inputs)[1]
        except NameError as error:
            # If JAX itself vectorizes a vmap, backward does not know the axis name.
            raise ValueError(
                f"unit {self.name!r}: expected no loop and no stack of layers between a vmap with a named axis and a "
                f"recomputed unit that uses the name, got one: use vmap inside the loop, or recompute=False ({error})"
            ) from error

    @property
    def _is_sharded(self) -> bool:
        return any(group.strategy.shard_parameters for group in self.groups)

    def _leaves(self, held: Held) -> tuple[Leaves, ...]:
        return tuple(group.leaves(whole) for group, whole in zip(self.groups, held, strict=True))


Apply = Callable[..., Any]
# An axis name that a unit uses, with the index along that axis: only the vmap with that name maps the index.
Axes = Sequence[tuple[Any, jax.Array]]


def call_batched(
    calling: Callable[[Apply], Callable[..., Any]],
    apply: Apply,
    collectors: Any,
    sources: Any,
    inner: Any,
    *inputs: Any,
    axes: Axes | None = None,
) -> Any:
    """``calling(apply)(collectors, sources, inner, *inputs)``; ``apply(leaves, inner, *inputs)`` is vectorized.

    The whole batch uses the same weights. JAX itself vectorizes a loop around the call, because a loop is traced before
    it is vectorized. ``axes``: the axes of the enclosing vmaps that remain, if some are already done.
    """
    plain = calling(apply)
    if is_mapped((inputs, [index for _, index in axes or ()])) is None:
        return plain(collectors, sources, inner, *inputs)
    program, shapes = jax.make_jaxpr(plain, return_shape=True)(collectors, sources, inner, *inputs)
    if axes is None:
        # All processes must use the same order.
        names = sorted({effect.name for effect in program.effects if hasattr(effect, "name")}, key=str)
        axes = [(name, jax.lax.axis_index(name)) for name in names]

    @custom_vmap
    def function(indices: Any, *arrays: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(program)(*jax.tree.leaves(arrays)))

    @function.def_vmap
    def _(size: int, mapped: list[Any], indices: Any, *arrays: Any) -> Any:
        if any(jax.tree.leaves(mapped[1:4])):
            raise ValueError(
                "unit: expected the same weights for the whole vmap, got different weights: an ensemble is a stack, "
                'so pass its path to fully_shard (stacked=["members"])'
            )
        name = next((name for (name, _), is_named in zip(axes, mapped[0], strict=True) if is_named), None)
        vectorized, flags = _vectorize(apply, size, name, mapped[4:])
        others = [(other, index) for (other, _), index in zip(axes, indices, strict=True) if other != name]
        output = call_batched(calling, vectorized, *arrays, axes=others)
        return output, jax.tree.unflatten(jax.tree.structure(output), flags)

    return function([index for _, index in axes], collectors, sources, inner, *inputs)


def _vectorize(apply: Apply, size: int, name: Any, mapped: Sequence[Any]) -> tuple[Apply, list[bool]]:
    """``apply`` over axis 0 of its ``mapped`` inputs, and, after a call, which results have that axis."""
    axes = jax.tree.map(lambda apply_row: 0 if apply_row else None, tuple(mapped))
    flags: list[bool] = []

    def vectorized(*arguments: Any) -> Any:
        structures = []

        def apply_row(row: jax.Array, *arguments: Any) -> Any:
            leaves, structure = jax.tree.flatten(apply(*arguments))
            structures.append(structure)
            # ``row`` is mapped, so that this vmap is the one that answers.
            flags[:] = is_mapped((row, leaves))[1]
            pairs = list(zip(leaves, flags, strict=True))
            return [x for x, flag in pairs if flag], [x for x, flag in pairs if not flag]

        mapped_apply = jax.vmap(apply_row, (0, None, None, *axes), (0, None), axis_name=name, axis_size=size)
        own, shared = map(iter, mapped_apply(jnp.arange(size), *arguments))
        return jax.tree.unflatten(structures[0], [next(own) if flag else next(shared) for flag in flags])

    return vectorized, flags


def is_mapped(values: Any) -> Any:
    """Which of ``values`` the innermost enclosing ``jax.vmap`` maps; None if no vmap maps any.

    A custom_vmap without this check could not be differentiated outside a vmap.
    """
    answers: list[Any] = []

    @custom_vmap
    def probe(values: Any) -> Any:
        return values

    @probe.def_vmap
    def _(size: int, mapped: list[Any], values: Any) -> Any:
        answers.append(mapped[0])
        return values, mapped[0]

    if jax.tree.leaves(values):
        # Only the answer matters, not the result: with stop_gradient, the probe is not part of any derivative.
        probe(jax.lax.stop_gradient(values))
    return answers[0] if answers else None
