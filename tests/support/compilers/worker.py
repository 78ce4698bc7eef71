"""Compile settings for absent devices in a process: ``Compiler`` talks to the process, ``main`` runs in it.

The process allocates nothing: weights and batches are shapes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.compiling.leg_process import Leg, LegError, serve
from bridge.compiling.machines import tpu_text
from bridge.compiling.machines.compilers import devices_of, options_of, why_not
from bridge.compiling.machines.targets import target_named
from bridge.compiling.machines.tpu_lock import held_lock
from jax_impl.diagnostics.scheduled import read_collectives
from tests.support.compilers.setting import BY_HAND, BY_HAND_XLA, SIZES, Compiled, Setting, Stored
from tests.support.compilers.updates import lowered_gradients, lowered_update, read_transfers

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jax_impl.runtime.groups.sharding_plan import ShardingPlan


class Compiler:
    """Compiles settings of one platform in its own process, which lives from the first setting to ``close``."""

    def __init__(self, platform: str) -> None:
        self.platform = platform
        self._leg = Leg("tests.support.compilers.worker", platform)

    def compile(self, setting: Setting) -> Compiled:
        """Raises ``RuntimeError`` with the compiler's error, or with the end of the output of a dead process."""
        if target_named(setting.target).platform != self.platform:
            raise ValueError(f"expected a target of {self.platform}, got {setting.target}")
        try:
            return Compiled.from_json(self._leg.ask(setting.to_json()))
        except LegError as error:
            raise RuntimeError(f"{setting}: {error}") from error

    def close(self) -> None:
        self._leg.close()


def unavailable(platform: str) -> str | None:
    """The reason why nothing can be compiled now: no compiler, or another process uses the compiler."""
    if platform == "tpu" and why_not(platform) is None and (holder := held_lock()):
        return f"another process holds libtpu's lock, {holder}: one process at a time compiles for TPUs"
    return why_not(platform)


def main() -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        lists = {name: tuple(request[name]) for name in ("units", "moments")}
        return compiled(Setting(**{**request, **lists})).to_json()

    serve(answer)


def compiled(setting: Setting) -> Compiled:
    """In a process with the environment of the setting's platform."""
    import jax

    target = target_named(setting.target)
    stored: tuple[Stored, ...] = ()
    travelling: list[int] = []
    mesh = mesh_of(setting)
    if setting.contestant in (BY_HAND, BY_HAND_XLA):
        lowered, shards = _by_hand(setting, mesh), tuple(mesh.shape.values())
    else:
        plan = plan_of(setting, mesh)
        stored, shards = tuple(_stored(plan)), plan.axes.sizes
        if setting.offload is None:
            lowered = _of_plan(setting, plan)
        else:
            lowered, travelling = lowered_update(setting, plan)
    tpu_text.clear()
    begun = time.monotonic()
    program: jax.stages.Compiled = lowered.compile(options_of(target, setting.recommended))
    seconds = time.monotonic() - begun
    analysis: Any = program.memory_analysis()
    text = tpu_text.text_of(program, lowered.as_text())
    if folder := os.environ.get("TWINSHARD_DUMP"):
        Path(folder, f"{setting}.hlo").write_text(text)
        Path(folder, f"{setting}.costs.json").write_text(json.dumps(program.cost_analysis()))
    if setting.offload is not None:
        arguments, host = analysis.argument_size_in_bytes, analysis.host_argument_size_in_bytes
        sizes, transfers = tuple(travelling), tuple(read_transfers(text))
        by_host = text.count('custom_call_target="HostExecute"')
        temporary = analysis.temp_size_in_bytes
        return Compiled(
            seconds, temporary, (), stored, shards, arguments, host, sizes, transfers, by_host=by_host
        )
    products = text.count('"__cublas$lt$matmul$f8"')
    collectives = tuple(read_collectives(text))
    return Compiled(
        seconds,
        analysis.temp_size_in_bytes,
        collectives,
        stored,
        shards,
        analysis.argument_size_in_bytes,
        analysis.host_argument_size_in_bytes,
        products=products,
        results=analysis.output_size_in_bytes,
    )


def mesh_of(setting: Setting) -> Mesh:
    import numpy as np
    from jax.sharding import Mesh

    devices = np.array(devices_of(target_named(setting.target)))
    if setting.tensors:
        return Mesh(devices.reshape(-1, setting.tensors), ("dp", "tp"))
    if setting.inner:
        return Mesh(devices.reshape(-1, setting.inner), ("dp_outer", "dp"))
    return Mesh(devices.reshape(-1), ("dp",))


def model_of(setting: Setting) -> Any:
    from flax import nnx

    from jax_impl import float8_dot_general
    from jax_impl.models import Decoder, DecoderConfig

    sizes: dict[str, Any] = {**SIZES[setting.size]}
    config = DecoderConfig(**sizes)
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), stacked=setting.stacked))
    if setting.products:
        model.set_attributes(dot_general=float8_dot_general)
    return model


def plan_of(setting: Setting, mesh: Mesh) -> ShardingPlan:
    from jax_impl import plan_sharding

    units: Any = {"units": setting.units} if setting.units else {}
    if setting.tensors:
        units["parallel"] = {
            "layers/*/attention/[qkv]*": "colwise",
            "layers/*/mlp/[gu]*": "colwise",
            "layers/*/attention/out": "rowwise",
            "layers/*/mlp/down": "rowwise",
        }
    return plan_sharding(
        model_of(setting),
        mesh,
        strategy=setting.strategy,
        engine=setting.contestant,
        recompute=setting.recompute,
        gather_dtype=setting.gather,
        param_dtype=None if setting.dtype == "float32" else setting.dtype,
        stacked=["layers"] if setting.stacked else [],
        prefetch=setting.prefetch,
        align=setting.align,
        **units,
    )


def _stored(plan: ShardingPlan) -> Iterator[Stored]:
    for unit in plan.units.values():
        for group in unit.groups:
            for key, array in group.stored.items():
                layers = group.layers or 1
                size = math.prod(array.shape) // layers // getattr(group, "rows", 1)
                yield Stored(key, size, layers, any(array.spec))


def _of_plan(setting: Setting, plan: ShardingPlan) -> Any:
    import jax

    from jax_impl import make_eval_step, make_gradients
    from jax_impl.models import next_token_loss

    def loss(model: Any, rows: jax.Array) -> jax.Array:
        return next_token_loss(model(rows[:, :-1]), rows[:, 1:])

    weights = {
        key: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=plan.sharding(key))
        for key, array in plan.arrays.items()
    }
    rows = _rows(setting, plan.mesh, jax.sharding.NamedSharding(plan.mesh, plan.axes.batch_spec))
    if setting.weights_on_host:
        return lowered_gradients(setting, plan, loss, weights, rows)
    if setting.forward:
        return jax.jit(make_eval_step(plan, loss)).lower(weights, rows)
    return jax.jit(make_gradients(plan, loss, setting.microbatches)).lower(weights, rows)


def _by_hand(setting: Setting, mesh: Mesh) -> Any:
    import jax.numpy as jnp
    import optax

    from tests.bench.jax_baseline import build_baseline

    baseline = build_baseline(
        model_of(setting),
        mesh,
        optax.identity(),
        dtype=jnp.dtype(setting.dtype),
        recompute=setting.recompute,
        gather_weights=setting.contestant == BY_HAND,
    )
    parameters, _ = baseline.abstract_state()
    return baseline.gradients.lower(parameters, _rows(setting, mesh, baseline.rows))


def _rows(setting: Setting, mesh: Mesh, sharding: Any) -> Any:
    import jax
    import jax.numpy as jnp

    rows = setting.rows * setting.microbatches * mesh.devices.size
    return jax.ShapeDtypeStruct((rows, setting.length + 1), jnp.int32, sharding=sharding)


if __name__ == "__main__":
    main()
