"""AdamW steps on a public model: unsharded with optax, and sharded with ``jax_impl``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_impl import data_parallel_mesh, fully_shard, init_state, make_train_step, unshard, variable_leaves
from tests.support.jax_impl.third_party_nnx import (
    flax_gemma,
    flax_mnist,
    flax_scanned,
    tunix_gemma2,
    tunix_llama3,
)
from tests.support.jax_impl.third_party_programs import AXIS, DEVICES, Axis, Program, split
from tests.support.jax_impl.third_party_trees import (
    equimo_vit,
    flax_imagenet,
    flax_imagenet_scanned,
    flax_lm1b,
    flax_sst2,
    haiku_transformer,
)

RATE = 1e-3

PROGRAMS: dict[str, Callable[[Axis], Program]] = {
    "flax-gemma": flax_gemma,
    "flax-mnist": flax_mnist,
    "flax-scanned": flax_scanned,
    "flax-lm1b": flax_lm1b,
    "flax-sst2": flax_sst2,
    "flax-imagenet": flax_imagenet,
    "flax-imagenet-scanned": flax_imagenet_scanned,
    "tunix-llama3": tunix_llama3,
    "tunix-gemma2": tunix_gemma2,
    "haiku-transformer": haiku_transformer,
    "equimo-vit": equimo_vit,
}


@dataclass(frozen=True)
class Result:
    """``idle``: see ``Program``."""

    losses: list[float]
    weights: dict[str, np.ndarray]
    variables: dict[str, np.ndarray]
    idle: Sequence[str]


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(RATE, weight_decay=0.1)


@cache
def built(name: str, axis: Axis) -> Program:
    """Raises ``Unreachable`` if a package is missing."""
    return PROGRAMS[name](axis)


@cache
def plain(name: str) -> Result:
    """The same steps on one device, without sharding, by optax."""
    program = built(name, None)
    weights, rest, merge = split(program.model)
    adamw = optimizer()

    @jax.jit
    def step(weights: Any, rest: Any, moments: Any, rows: Any, *statistics: Any) -> Any:
        def loss(weights: Any) -> Any:
            model = merge(weights, rest)
            value = program.loss(model, rows, *statistics)
            value, *after = value if statistics else (value,)
            return value, (split(model)[1], after)

        (value, (rest, after)), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        updates, moments = adamw.update(gradients, moments, weights)
        return optax.apply_updates(weights, updates), rest, moments, value, after

    moments, losses = adamw.init(weights), []
    statistics = [] if program.statistics is None else [program.statistics]
    for rows in program.batches:
        weights, rest, moments, value, statistics = step(weights, rest, moments, rows, *statistics)
        losses.append(float(value))
    return Result(losses, named(weights), named([rest, *statistics]), program.idle)


def named(tree: Any) -> dict[str, np.ndarray]:
    """Floating-point leaves by path, names joined with slashes."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }


def sharded(name: str, engine: str, strategy: str, sizes: Mapping[str, int] | None = None) -> Result:
    """By default on a mesh of one axis."""
    sizes = sizes or {AXIS: DEVICES}
    axis: Any = tuple(sizes) if len(sizes) > 1 else AXIS
    program = built(name, axis if engine == "shard_map" else None)
    plan, weights = fully_shard(
        program.model,
        data_parallel_mesh(sizes),
        engine=engine,
        strategy=strategy,
        units=program.units,
        stacked=program.stacked,
    )
    adamw = optimizer()
    variables = variable_leaves(program.model) if isinstance(program.model, nnx.Module) else None
    state = init_state(plan, weights, adamw, variables)
    statistics = [] if program.statistics is None else [program.statistics]
    step = make_train_step(plan, program.loss, adamw, has_aux=bool(statistics))
    losses = []
    for rows in program.batches:
        state, metrics = step(state, rows, *statistics)
        losses.append(float(metrics["loss"]))
        statistics = [metrics["aux"]] if statistics else []
    return Result(
        losses, named(unshard(plan, state.weights)), named([{**state.variables}, *statistics]), program.idle
    )


def differences(run: Result, expected: Result) -> tuple[float, float]:
    """The largest relative difference of losses, and of weights and other variables.

    That of an array is the norm of the difference against the norm of the array.
    """
    losses = np.abs(np.subtract(run.losses, expected.losses)) / np.abs(expected.losses)
    got, arrays = (result.weights | result.variables for result in (run, expected))
    assert sorted(got) == sorted(arrays)
    parts = [
        np.linalg.norm(got[path] - array) / max(np.linalg.norm(array), RATE)
        for path, array in arrays.items()
        if path.removeprefix("0/") not in expected.idle
    ]
    return float(losses.max()), float(max(parts))
