"""A trial of an optimizer before it trains: does it do to a plan's arrays what it would do to the model's parameters?

An optax transformation sees the arrays of the train state: with the shard_map engine one flat array a unit, with the
pjit engine ``{path: parameter}``. One that looks at shapes or names of parameters (Muon, a mask by ``ndim``) would
train as something else there, without a word. Whether it does is found out, not looked up: the same small random
numbers go through the transformation as the engine's arrays and as the model's own tree, and the updates are
compared::

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
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jax_impl.optimizer.forms import (
    Form,
    TriedArray,
    Values,
    arrays_of,
    by_name,
    by_path,
    by_unit,
    flat_form,
    numbers,
    of_each_kind,
    reduced,
)
from jax_impl.optimizer.main_weight_adamw import MainWeightTransformation
from jax_impl.runtime.sharding_plan import ShardingPlan

# Relative to a parameter's largest update. Equal operations on equal numbers give equal bits; only sums over all
# parameters (a global norm) are taken in another order.
_TOLERANCE = 1e-4
_STEPS = 3
# Transformations that accumulate gradients give updates of zero at first.
_MOST_STEPS = 65
# A trial runs once: what the compiler would gain takes longer.
_QUICK = {"xla_backend_optimization_level": 0}


def check_optimizer(plan: ShardingPlan, optimizer: optax.GradientTransformation) -> None:
    """Raises ``ValueError`` for an optimizer that would train something else on the plan's arrays than on parameters.

    The error names a parameter whose update differs, and the way out.
    """
    # What it does to an element depends on nothing else, by its own specification.
    if not isinstance(optimizer, MainWeightTransformation):
        _check(optimizer, arrays_of(plan), plan.engine == "shard_map")


# Several steps of one plan (other microbatches, another loss) need one trial.
@functools.lru_cache(maxsize=16)
def _check(optimizer: optax.GradientTransformation, arrays: tuple[TriedArray, ...], flat: bool) -> None:
    difference, raised = None, None
    # All parameters only where some will not do, as for a mask that is a dictionary by unit: they take seconds.
    for tried in dict.fromkeys((of_each_kind(arrays), arrays)):
        try:
            difference, raised = _difference(optimizer, tried, flat), None
            break
        except _OwnFormError as error:
            raised = error.__cause__
    if raised is not None:
        raise ValueError(_cannot(raised, flat)) from raised
    if difference is not None:
        raise ValueError(_refusal(difference, flat))


def _difference(
    optimizer: optax.GradientTransformation, arrays: tuple[TriedArray, ...], flat: bool
) -> str | None:
    """What the engine's arrays change, in words. Raises ``_OwnFormError`` where the optimizer cannot update them."""
    small = reduced(arrays)
    own = flat_form(small) if flat else by_path(small)
    # Where the model's own tree does not fit, as for that mask: parameters under their units.
    references = [by_name(small), by_unit(small)] if flat else [by_name(small)]
    with jax.default_device(_cpu()):
        for reference in references:
            try:
                # Inside of a traced program the trial still has numbers.
                with jax.ensure_compile_time_eval():
                    found = _compared(optimizer, small, own, reference)
            except _ReferenceFormError:
                continue
            if found is None and flat and small != arrays and _sizes_matter(optimizer, small, arrays):
                return "other operations run on large parameters than on small ones"
            return found
    return None


def _cpu() -> Any:
    """Where small programs compile fastest; None, the default device, where JAX has no CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


class _OwnFormError(Exception):
    """An optimizer cannot update the engine's arrays; the cause says why."""


class _ReferenceFormError(Exception):
    """It cannot update the tree that it is compared on."""


def _compared(
    optimizer: optax.GradientTransformation, arrays: Sequence[TriedArray], own: Form, reference: Form
) -> str | None:
    """The first parameter whose update is another in the form ``own`` than in ``reference``, in words.

    Raises ``_OwnFormError`` or ``_ReferenceFormError`` where the optimizer raises for one of them.
    """
    shapes = {path: shape for array in arrays for path, shape in zip(array.paths, array.shapes, strict=True)}
    steps = [_compiled(optimizer, form) for form in (own, reference)]
    # Gradients of zero show what does not come from them, however small its share (weight decay).
    for zeros, most in ((True, 1), (False, _MOST_STEPS)):
        found = _updates(*steps[0], arrays, zeros, _OwnFormError)
        expected = _updates(*steps[1], arrays, zeros, _ReferenceFormError)
        moved = False
        for step, mine, theirs in zip(range(1, most + 1), found, expected, strict=False):
            for path, (update, weight) in mine.items():
                largest = 0.0 if zeros else float(np.max(np.abs(weight), initial=0))
                share = _share(update, theirs[path][0], largest)
                if share:
                    where = f"parameter {path!r} {shapes[path]}"
                    return f"its update of {where} is off by {share:.0%} of the largest element"
                moved = moved or bool(np.any(update))
            if moved and step >= _STEPS:
                break
    return None


def _compiled(
    optimizer: optax.GradientTransformation, form: Form
) -> tuple[Callable[[Values], Any], Callable[[Values, Any, Values], tuple[Values, Any, Values]]]:
    """``weights -> state`` and ``(gradients, state, weights) -> (updates, state, new weights)``, by path."""

    def update(gradients: Values, state: Any, weights: Values) -> tuple[Values, Any, Values]:
        tree = form.pack(weights)
        updates, state = optimizer.update(form.pack(gradients), state, tree)
        return form.unpack(updates), state, form.unpack(optax.apply_updates(tree, updates))

    def init(weights: Values) -> Any:
        return optimizer.init(form.pack(weights))

    return jax.jit(init, compiler_options=_QUICK), jax.jit(update, compiler_options=_QUICK)


def _share(found: np.ndarray, expected: np.ndarray, weight: float) -> float:
    """The largest difference over the largest element; 0 where it is that of rounding."""
    with np.errstate(all="ignore"):
        apart = np.where(
            (found == expected) | (np.isnan(found) & np.isnan(expected)), 0, np.abs(found - expected)
        )
    largest = float(
        np.max(np.abs(np.stack([found, expected])), initial=0, where=np.isfinite([found, expected]))
    )
    most = float(np.max(apart, initial=0))
    # Some transformations work with new weights, and give the difference from the old ones.
    if most <= _TOLERANCE * largest + 2**-22 * weight:
        return 0.0
    return most / largest if largest else math.inf


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
    def update(weights: Values, gradients: Values) -> Any:
        packed = form.pack(weights)
        return optimizer.update(form.pack(gradients), optimizer.init(packed), packed)

    weights, gradients = (
        {
            path: jax.ShapeDtypeStruct(shape, array.dtypes[kind])
            for array in arrays
            for path, shape in zip(array.paths, array.shapes, strict=True)
        }
        for kind in (0, 1)
    )
    return [equation.primitive.name for equation in jax.make_jaxpr(update)(weights, gradients).eqns]


def _refusal(difference: str, flat: bool) -> str:
    if flat:
        return (
            "optimizer: expected a transformation that does to each element the same wherever the element lies, since "
            'engine="shard_map" gives it one flat array a unit, got one that looks at shapes or names of parameters, '
            f'or draws random numbers by shape: in a trial on random numbers {difference}. Give engine="pjit" to '
            "fully_shard: there it sees {path: array}, each parameter in its own shape"
        )
    return (
        'optimizer: expected a transformation that finds parameters by their whole path, since engine="pjit" gives it '
        "{path: array} with paths such as 'layers/0/bias', got one that looks at names in the model's own tree: in a "
        f"trial on random numbers {difference}"
    )


def _cannot(error: BaseException, flat: bool) -> str:
    given = "one flat array a unit, by unit" if flat else "{path: array}"
    way = '. engine="pjit" gives {path: array}, each parameter in its own shape' if flat else ""
    return (
        f"optimizer: expected a transformation that updates {given}, from gradients, state and weights alone, got "
        f"{type(error).__name__}: {str(error)[:500]}{way}"
    )
