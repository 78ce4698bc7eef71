"""A trial of an optimizer before it trains: does it do to a plan's arrays what it would do to the model's parameters?

An elementwise optax transformation may run on the arrays of the train state: with the shard_map engine one flat array a
unit, with the pjit engine ``{path: parameter}``. One that looks at shapes or names of parameters (Muon, a mask by
``ndim``) would train as something else there, without a word; ``logical.py`` is for those. Which an optimizer is is
found out, not looked up: the same small random numbers go through the transformation as the engine's arrays and as the
model's own tree, and the updates are compared::

    model's tree    {"layers": {"0": {"kernel": [3, 4], "bias": [4]}}}      {"layers/0": [17]}    engine's arrays
                                    | update                                    | update
                                    v                                           v
                                 {...}              equal?                  {"layers/0": [17]}

What the trial cannot see: a difference that begins only after some steps, or for values far from those tried, or for
the name of a layer that is neither one of the first two nor the last.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jax_impl.optimizer.forms import (
    FORMS,
    Form,
    ModelTree,
    TriedArray,
    Values,
    by_name,
    by_path,
    flat_form,
    form_named,
    numbers,
    of_each_kind,
    reduced,
    taking_loss,
)

# Relative to a parameter's largest update. Equal operations on equal numbers give equal bits; only sums over all
# parameters (a global norm) are taken in another order.
_TOLERANCE = 1e-4
_STEPS = 3
# The loss, for transformations that look at it.
_VALUE = 1.0
# Transformations that accumulate gradients give updates of zero at first.
_MOST_STEPS = 129
# What is stored between updates (moments with a scale for each row) shows in the second one.
_LEAST_MOVES = 2
# A trial runs once: what the compiler would gain takes longer.
_QUICK = {"xla_backend_optimization_level": 0}


# Several steps of one plan (other microbatches, another loss) need one trial.
@functools.lru_cache(maxsize=16)
def tried(
    optimizer: optax.GradientTransformation, arrays: tuple[TriedArray, ...], model: ModelTree, flat: bool
) -> str | None:
    """None where the optimizer may run on the engine's arrays; else the one of ``FORMS`` that it is to be given.

    Raises ``ValueError`` for an optimizer that can update neither.
    """
    raised: BaseException | None = None
    # All parameters only where some will not do, as for a mask that is a dictionary by unit: they take seconds.
    for some in dict.fromkeys((of_each_kind(arrays), arrays)):
        try:
            return _form(optimizer, some, model, flat)
        except _NoFormError as error:
            raised = error.__cause__
    raise ValueError(_cannot(raised, flat)) from raised


def _form(
    optimizer: optax.GradientTransformation, arrays: tuple[TriedArray, ...], model: ModelTree, flat: bool
) -> str | None:
    """As ``tried``. Raises ``_NoFormError`` where the optimizer can update no form of these arrays."""
    small = reduced(arrays)
    own = flat_form(small) if flat else by_path(small)
    failed: BaseException | None = None
    # In float64, so that small updates (a warmup's) show beside weights that some transformations work with.
    with jax.default_device(_cpu()), jax.enable_x64(True):
        # Where names do not fit: the pytree that a mask may be made from, or parameters under their units.
        for name in FORMS if flat else FORMS[:2]:
            try:
                # Inside of a traced program the trial still has numbers.
                with jax.ensure_compile_time_eval():
                    same = _same(optimizer, small, own, form_named(name, small, model))
            except _ReferenceFormError:
                continue
            except _OwnFormError as error:
                failed = error.__cause__
                if _can_update(optimizer, small, form_named(name, small, model)):
                    return name
                continue
            large = flat and small != arrays
            return None if same and not (large and _sizes_matter(optimizer, small, arrays)) else name
    if failed is None:
        # Only the engine's arrays fit: the optimizer was made for them.
        return None
    raise _NoFormError from failed


def _cpu() -> Any:
    """Where small programs compile fastest; None, the default device, where JAX has no CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


class _NoFormError(Exception):
    """An optimizer can update neither the engine's arrays nor a tree of parameters; the cause says why."""


class _OwnFormError(Exception):
    """An optimizer cannot update the engine's arrays; the cause says why."""


class _ReferenceFormError(Exception):
    """It cannot update the tree that it is compared on."""


def _can_update(optimizer: optax.GradientTransformation, arrays: Sequence[TriedArray], form: Form) -> bool:
    able = taking_loss(optimizer)

    def step(weights: Values) -> Any:
        tree = form.pack(weights)
        updates, _ = able.update(tree, able.init(tree), tree, value=_VALUE)
        return form.unpack(updates)

    try:
        jax.eval_shape(step, numbers(arrays, 0, spread=1))
    except Exception:
        return False
    return True


def _same(
    optimizer: optax.GradientTransformation, arrays: Sequence[TriedArray], own: Form, reference: Form
) -> bool:
    """Whether all parameters get the same updates in the form ``own`` as in ``reference``.

    Raises ``_OwnFormError`` or ``_ReferenceFormError`` where the optimizer raises for one of them.
    """
    steps = [_compiled(optimizer, form) for form in (own, reference)]
    # Gradients of zero show what does not come from them, however small its share (weight decay).
    for zeros, most in ((True, 1), (False, _MOST_STEPS)):
        found = _updates(*steps[0], arrays, zeros, _OwnFormError)
        expected = _updates(*steps[1], arrays, zeros, _ReferenceFormError)
        moves = 0
        for step, mine, theirs in zip(range(1, most + 1), found, expected, strict=False):
            moved = False
            for path, (update, weight) in mine.items():
                largest = 0.0 if zeros else float(np.max(np.abs(weight), initial=0))
                if not _agree(update, theirs[path][0], largest):
                    return False
                moved = moved or bool(np.any(update))
            moves += moved
            if moves >= _LEAST_MOVES and step >= _STEPS:
                break
    return True


def _compiled(
    optimizer: optax.GradientTransformation, form: Form
) -> tuple[Callable[[Values], Any], Callable[[Values, Any, Values], tuple[Values, Any, Values]]]:
    """``weights -> state`` and ``(gradients, state, weights) -> (updates, state, new weights)``, by path."""

    able = taking_loss(optimizer)

    def update(gradients: Values, state: Any, weights: Values) -> tuple[Values, Any, Values]:
        tree = form.pack(weights)
        updates, state = able.update(form.pack(gradients), state, tree, value=_VALUE)
        return form.unpack(updates), state, form.unpack(optax.apply_updates(tree, updates))

    def init(weights: Values) -> Any:
        return optimizer.init(form.pack(weights))

    return jax.jit(init, compiler_options=_QUICK), jax.jit(update, compiler_options=_QUICK)


def _agree(found: np.ndarray, expected: np.ndarray, weight: float) -> bool:
    """Whether the largest difference is that of rounding."""
    with np.errstate(all="ignore"):
        apart = np.where(
            (found == expected) | (np.isnan(found) & np.isnan(expected)), 0, np.abs(found - expected)
        )
    largest = float(
        np.max(np.abs(np.stack([found, expected])), initial=0, where=np.isfinite([found, expected]))
    )
    # Some transformations work with new weights, and give the difference from the old ones.
    return float(np.max(apart, initial=0)) <= _TOLERANCE * largest + 2**-48 * weight


def _updates(
    init: Callable[[Values], Any],
    update: Callable[[Values, Any, Values], tuple[Values, Any, Values]],
    arrays: Sequence[TriedArray],
    zeros: bool,
    failure: type[Exception],
) -> Iterator[dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Of each step: by path, the update and the weight before it, in float64."""
    weights: Values = numbers(arrays, 0, spread=1)
    gradients = [numbers(arrays, 1 + i, spread=0 if zeros else 3) for i in range(_STEPS)]
    try:
        state = init(weights)
        for i in itertools.count():
            updates, state, stepped = update(gradients[i % _STEPS], state, weights)
            yield {path: (_wide(updates[path]), _wide(weights[path])) for path in weights}
            weights = stepped
    except Exception as error:
        raise failure from error


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _sizes_matter(
    optimizer: optax.GradientTransformation, small: Sequence[TriedArray], arrays: Sequence[TriedArray]
) -> bool:
    """Whether other operations run on arrays of these sizes than on the small ones that were tried."""
    for form in (flat_form, by_name):
        try:
            tried, real = (_operations(optimizer, each, form(each)) for each in (small, arrays))
        except Exception:
            # The model's tree does not fit; the engine's did in the trial.
            continue
        if tried != real:
            return True
    return False


def _operations(
    optimizer: optax.GradientTransformation, arrays: Sequence[TriedArray], form: Form
) -> list[str]:
    able = taking_loss(optimizer)

    def update(weights: Values, gradients: Values) -> Any:
        packed = form.pack(weights)
        return able.update(form.pack(gradients), able.init(packed), packed, value=_VALUE)

    weights, gradients = (
        {
            path: jax.ShapeDtypeStruct(shape, array.dtypes[kind])
            for array in arrays
            for path, shape in zip(array.paths, array.shapes, strict=True)
        }
        for kind in (0, 1)
    )
    return [equation.primitive.name for equation in jax.make_jaxpr(update)(weights, gradients).eqns]


def _cannot(error: BaseException | None, flat: bool) -> str:
    given = "one flat array a unit, by unit" if flat else "{path: array}"
    return (
        f"optimizer: expected a transformation that updates {given}, or the tree of the model's parameters, from "
        f"gradients, state, weights and the loss alone, got {type(error).__name__}: {str(error)[:500]}"
    )
