"""Steps of the baseline and of both engines for one setting, with equal initial weights and tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from jax_impl import (
    data_parallel_mesh,
    init_state,
    main_weight_adamw,
    make_train_step,
    plan_sharding,
    shard_weights,
    simulate_devices,
)
from jax_impl.models import Decoder, DecoderConfig, next_token_loss
from jax_impl.modules.module_tree import parameter_leaves
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from tests.bench.jax_baseline import Baseline, build_baseline
from tests.bench.jax_setting import BASELINE, BASELINE_XLA, NAMES, SIZES, Setting

ADAMW = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def mesh_of(setting: Setting) -> Mesh:
    """Make the mesh. Simulates devices first, for all contestants with the flags that the engines need."""
    if setting.simulated:
        simulate_devices(setting.devices)
    return data_parallel_mesh(setting.devices)


def model_of(setting: Setting) -> Decoder:
    config = DecoderConfig(**SIZES[setting.size])
    return Decoder(config, rngs=nnx.Rngs(0), stacked=setting.stacked)


def tokens_of(setting: Setting) -> np.ndarray:
    """Random int32 tokens, ``[rows, length + 1]``."""
    vocabulary = SIZES[setting.size]["vocab_size"]
    return np.random.default_rng(0).integers(0, vocabulary, (setting.rows, setting.length + 1), np.int32)


def loss(model: Any, rows: jax.Array) -> jax.Array:
    return next_token_loss(model(rows[:, :-1]), rows[:, 1:])


def plan_of(engine: str, setting: Setting, model: Decoder, mesh: Mesh) -> ShardingPlan:
    """The plan sums gradients in the compute dtype, like the baseline's autodiff."""
    return plan_sharding(
        model,
        mesh,
        strategy=setting.strategy,
        engine=engine,
        param_dtype=None if setting.dtype == "float32" else setting.dtype,
        recompute=setting.recompute,
        stacked=["layers"] if setting.stacked else [],
    )


def baseline_of(name: str, setting: Setting, model: Decoder, mesh: Mesh) -> Baseline:
    return build_baseline(
        model,
        mesh,
        optax.adamw(**ADAMW),
        dtype=jnp.dtype(setting.dtype),
        recompute=setting.recompute,
        gather_weights=name == BASELINE,
    )


def build_step(name: str, setting: Setting, model: Decoder, mesh: Mesh) -> Callable[[], float]:
    """A step on ``tokens_of(setting)``. It places the tokens each time, like a training loop, and waits for results.

    Raises ``ValueError`` for an unknown contestant.
    """
    if name not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")
    tokens = tokens_of(setting)
    if name in (BASELINE, BASELINE_XLA):
        baseline = baseline_of(name, setting, model, mesh)
        return _loop(
            lambda state: baseline.step(state, jax.device_put(tokens, baseline.rows)), baseline.state()
        )
    plan = plan_of(name, setting, model, mesh)
    optimizer = main_weight_adamw(**ADAMW)
    step = make_train_step(plan, loss, optimizer)
    state = init_state(plan, shard_weights(plan, parameter_leaves(model)), optimizer)
    return _loop(lambda state: step(state, tokens), state)


def _loop(step: Callable[[Any], tuple[Any, Any]], state: Any) -> Callable[[], float]:
    def once() -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(step(state))
        return float(metrics["loss"] if isinstance(metrics, dict) else metrics)

    return once
