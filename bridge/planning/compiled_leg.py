"""Compile a step for simulated devices and report XLA's allocations: the process behind ``compiled.py``.

``python -m bridge.planning.compiled_leg < request.json > answer.json``. Nothing is trained and no weight is allocated:
programs are compiled for shapes. The two programs of a step, gradients and update, are compiled separately, as they
are at run time.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from bridge.planning.device_bytes import allocated, held
from bridge.planning.runtimes import framework
from bridge.planning.target_step import StepRequest

_KINDS = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "psum": "all_reduce"}


def main() -> None:
    """Answer one request."""
    json.dump(compiled(json.load(sys.stdin)), sys.stdout)


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """``request``: step, policy text, source, devices."""
    runtime = framework("jax_impl")
    runtime.simulate_devices(request["devices"])
    jax = framework("jax")
    step = StepRequest.from_json(request["step"])
    policy = runtime.ShardingPolicy.parse(request["policy"], request["source"])
    mesh = runtime.data_parallel_mesh(policy.mesh_sizes(request["devices"]))
    plan = runtime.plan_sharding(step.abstract_model(), mesh, policy, stacked=step.stacked)
    rows = step.global_batch(plan)
    weights = {
        key: jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=plan.sharding(key))
        for key, stored in plan.arrays.items()
    }
    trained = {key: array for key, array in weights.items() if key in plan.trainable}
    optimizer = runtime.main_weight_adamw(1e-3)
    gradients = runtime.make_gradients(plan, step.loss_function(), step.workload.microbatches)
    traced: Counter[tuple[str, str, int]] = Counter()
    for one, calls in runtime.count_collectives(gradients, weights, rows).items():
        traced[_KINDS[one.kind], one.dtype, one.size * jax.numpy.dtype(one.dtype).itemsize] += calls
    first = jax.jit(gradients).lower(weights, rows).compile()
    kept: Counter[tuple[str, int]] = Counter()
    for one, calls in runtime.count_compiled_collectives(first).items():
        # The CPU compiler carries bfloat16 in float32: elements are what can be compared.
        kept[_KINDS.get(one.kind, one.kind), one.size] += calls

    def placed(leaf: Any) -> Any:
        same = [array.sharding for array in trained.values() if array.shape == leaf.shape]
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=same[0] if same else plan.replicated)

    state = jax.tree.map(placed, jax.eval_shape(optimizer.init, trained))
    moments = held(jax.tree.leaves(state))
    dtypes = {key: out.dtype for key, out in jax.eval_shape(gradients, weights, rows)[1].items()}
    given = {
        key: jax.ShapeDtypeStruct(array.shape, dtypes[key], sharding=array.sharding)
        for key, array in trained.items()
    }
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (trained, state))
    second = jax.jit(
        lambda weights, state, gradients: optimizer.apply(gradients, state, weights),
        donate_argnums=(0, 1),
        out_shardings=shardings,
    )
    update = second.lower(trained, state, given).compile()
    return {
        "weights": held(weights.values()),
        "moments": moments,
        "gradient_program": allocated(first),
        "update_program": allocated(update),
        "peak": max(moments + allocated(first)["total"], allocated(update)["total"]),
        "traced": [[*key, calls] for key, calls in sorted(traced.items())],
        "compiled": [[*key, calls] for key, calls in sorted(kept.items())],
    }


if __name__ == "__main__":
    main()
