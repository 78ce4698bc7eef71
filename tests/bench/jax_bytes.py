"""Bytes that XLA plans for a whole step on one device, and the collectives of the step.

The bytes come from ``memory_analysis``: a compiled program holds ``arguments + outputs - aliased + temporary``. The
baseline's step is one program. Our step is two programs, and its peak is the larger of::

    gradients    weights, batch; gradients; temporaries        and the moments, which stay in memory
    update       weights, moments, gradients; temporaries      new weights and moments take the place of the old ones

"State" is weights and moments at rest, padding included.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_impl import count_collectives, count_compiled_collectives, main_weight_adamw, make_gradients
from jax_impl.diagnostics.collectives import Collective
from jax_impl.models import Decoder
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from tests.bench.jax_contestants import ADAMW, baseline_of, loss, plan_of
from tests.bench.jax_setting import BASELINE, BASELINE_XLA, SHARD_MAP, Setting

Traffic = dict[str, tuple[int, int]]
"""For each kind of collective: the number in a step, and the bytes of the full arrays."""


@dataclass(frozen=True)
class Weighed:
    """Bytes on one device. ``temporary``: of the larger program. ``traced``: collectives before XLA, for ours only."""

    state: int
    gradients: int
    temporary: int
    peak: int
    compiled: Traffic
    traced: Traffic


def weigh(name: str, setting: Setting, model: Decoder, mesh: Mesh, microbatches: int = 1) -> Weighed:
    """Bytes of a contestant. ``model`` may be abstract. Raises ``ValueError`` for microbatches of the baseline."""
    if name not in (BASELINE, BASELINE_XLA):
        return _weigh_plan(plan_of(name, setting, model, mesh), setting, microbatches)
    if microbatches != 1:
        raise ValueError(f"{name}: expected one microbatch, got {microbatches}")
    baseline = baseline_of(name, setting, model, mesh)
    state = baseline.abstract_state()
    compiled = baseline.step.lower(state, _rows(setting, baseline.rows)).compile()
    total, temporary = _held(compiled)
    return Weighed(_on_device(state), 0, temporary, total, _traffic(count_compiled_collectives(compiled)), {})


def _weigh_plan(plan: ShardingPlan, setting: Setting, microbatches: int) -> Weighed:
    optimizer = main_weight_adamw(**ADAMW)
    weights = {
        key: jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=plan.sharding(key))
        for key, stored in plan.arrays.items()
    }

    def placed(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        located = plan.locate_buffer(path, leaf)
        sharding = plan.replicated if located is None else plan.sharding(located[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    moments = jax.tree.map_with_path(placed, jax.eval_shape(optimizer.init, weights))
    rows = _rows(setting, jax.sharding.NamedSharding(plan.mesh, plan.axes.batch_spec))
    function = make_gradients(plan, loss, microbatches)
    first = jax.jit(function).lower(weights, rows).compile()
    gradients = {
        key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=plan.sharding(key))
        for key, leaf in jax.eval_shape(function, weights, rows)[1].items()
    }
    update = jax.jit(
        lambda weights, moments, gradients: optimizer.apply(gradients, moments, weights),
        donate_argnums=(0, 1),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, (weights, moments)),
    )
    second = update.lower(weights, moments, gradients).compile()
    held, temporary = _held(first)
    totals = (held + _on_device(moments), temporary), _held(second)
    peak, temporary = max(totals)
    return Weighed(
        _on_device((weights, moments)),
        _on_device(gradients),
        temporary,
        peak,
        _traffic(count_compiled_collectives(first) + count_compiled_collectives(second)),
        _traffic(count_collectives(function, weights, rows)) if plan.engine == SHARD_MAP else {},
    )


def _rows(setting: Setting, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((setting.rows, setting.length + 1), jnp.int32, sharding=sharding)


def _held(compiled: Any) -> tuple[int, int]:
    """All bytes, and the temporary bytes among them."""
    analysis = compiled.memory_analysis()
    temporary = int(analysis.temp_size_in_bytes)
    kept = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(kept) + temporary, temporary


def _on_device(tree: Any) -> int:
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _traffic(counts: Mapping[Collective, int]) -> Traffic:
    calls: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for collective, times in counts.items():
        calls[collective.kind] += times
        sizes[collective.kind] += times * collective.size * jnp.dtype(collective.dtype).itemsize
    return {name: (calls[name], sizes[name]) for name in sorted(calls)}
