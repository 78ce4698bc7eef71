"""Every public transformation of optax and optax.contrib, with arguments that train a small model."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import optax
import optax.contrib

RATE = 0.01

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "apply_if_finite": (optax.adam(RATE), 3),
    "add_noise": (0.1, 0.5, jax.random.key(0)),
    "chain": (optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(RATE, 0.0, 9))),
    "conditionally_mask": (optax.adam(RATE), lambda step, **_: step > 0),
    "conditionally_transform": (optax.adam(RATE), lambda step, **_: step > 0),
    "differentially_private_aggregate": (1.0, 0.1, jax.random.key(0)),
    "dpsgd": (RATE, 1.0, 0.1, 0),
    "flatten": (optax.adam(RATE),),
    "freeze": ({"layers/0": True, "": False},),
    "lookahead": (optax.adam(RATE), 2, 0.5),
    "masked": (optax.adam(RATE), {"layers/0": True, "": False}),
    "measure_with_ema": (optax.global_norm, 0.9),
    "mechanize": (optax.adam(RATE),),
    "multi_transform": (
        {"a": optax.adam(RATE), "b": optax.sgd(RATE)},
        {"layers/0": "a", "": "b"},
    ),
    "named_chain": (("clip", optax.clip(1.0)), ("sgd", optax.sgd(RATE))),
    "noisy_sgd": (RATE, 0.1, 0.5, jax.random.key(0)),
    "partition": ({"a": optax.adam(RATE), "b": optax.sgd(RATE)}, {"layers/0": "a", "": "b"}),
    "sam": (optax.sgd(RATE), optax.sgd(RATE)),
    "scale_by_backtracking_linesearch": (3,),
    "scale_by_schedule": (optax.linear_schedule(RATE, 0.0, 9),),
    "scale_by_zoom_linesearch": (3,),
    "schedule_free": (optax.sgd(RATE), RATE),
    "schedule_free_sgd": (RATE,),
    "snapshot": ("norm", optax.global_norm),
    "split_real_and_imaginary": (optax.adam(RATE),),
    "stateless": (lambda updates, params: jax.tree.map(lambda g, w: g + w, updates, params),),
    "stateless_with_tree_map": (lambda g, w: g + RATE * w,),
    "with_extra_args_support": (optax.adam(RATE),),
}
FACTORIES = {
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(RATE), freeze_mask={"layers/0": True, "": False}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(RATE),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adamw)(RATE),
}
# Transformations whose annotation says nothing.
UNANNOTATED = {
    optax: ["scale_by_factored_rms"],
    optax.contrib: ["dog", "dowg", "hutchinson_estimator_diag_hessian"],
}


def transformations() -> dict[str, Any]:
    """A constructor of each public optax transformation, by name."""
    factories: dict[str, Any] = {}
    for module in (optax, optax.contrib):
        for name in dir(module):
            make = getattr(module, name)
            if name.startswith("_") or not inspect.isfunction(make):
                continue
            signature = inspect.signature(make)
            if "GradientTransformation" in str(signature.return_annotation) or name in UNANNOTATED[module]:
                required = [
                    p
                    for p in signature.parameters.values()
                    if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
                ]
                arguments = ARGUMENTS.get(name, (RATE,) * len(required))
                built = FACTORIES.get(name, functools.partial(make, *arguments))
                factories[name] = (
                    functools.partial(with_a_rate, built)
                    if name.startswith("scale_by_") or name == "centralize"
                    else built
                )
    return factories


def with_a_rate(make: Any) -> optax.GradientTransformation:
    """With steps as long as an optimizer's: longer ones saturate the model, whose gradients then are rounding."""
    return optax.chain(make(), optax.scale(-RATE))


# The unsharded twins of what is written by unit.
PLAIN = {
    "masked": lambda: optax.masked(optax.adam(RATE), {"layers": True, "head": False, "bias": False}),
    "freeze": lambda: optax.freeze({"layers": True, "head": False, "bias": False}),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(RATE), freeze_mask={"layers": True, "head": False, "bias": False}
    ),
    **dict.fromkeys(
        ("multi_transform", "partition"),
        lambda: optax.multi_transform(
            {"a": optax.adam(RATE), "b": optax.sgd(RATE)}, {"layers": "a", "head": "b", "bias": "b"}
        ),
    ),
}
