"""Compile a decoder's step for simulated devices and report XLA's allocations: the process behind ``compiled.py``.

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
from bridge.planning.optimizers import CONSTANTS, Optimizer
from bridge.planning.runtimes import framework, part

_KINDS = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "psum": "all_reduce"}


def main() -> None:
    """Answer one request."""
    json.dump(compiled(json.load(sys.stdin)), sys.stdout)


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """``request``: sizes of the decoder, its stacked modules, policy text, devices, workload and optimizer."""
    runtime = framework("jax_impl")
    runtime.simulate_devices(request["devices"])
    jax, nnx, models = framework("jax"), framework("flax.nnx"), part("jax", "models")
    policy = runtime.ShardingPolicy.parse(request["policy"], request["source"])
    sizes = models.DecoderConfig(**request["sizes"])
    model = nnx.eval_shape(lambda: models.Decoder(sizes, rngs=nnx.Rngs(0), stacked=bool(request["stacked"])))
    mesh = runtime.data_parallel_mesh(policy.mesh_sizes(request["devices"]))
    plan = runtime.plan_sharding(model, mesh, policy, stacked=request["stacked"])
    batch = request["devices"] * request["microbatches"] * request["batch"]
    rows = jax.ShapeDtypeStruct(
        (batch, request["length"] + 1),
        "int32",
        sharding=jax.sharding.NamedSharding(plan.mesh, plan.axes.batch_spec),
    )
    optimizer = Optimizer.from_json(request["optimizer"]).transformation()
    state = runtime.abstract_state(plan, optimizer)

    def loss(model: Any, tokens: Any) -> Any:
        return models.next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])

    gradients = runtime.make_gradients(plan, loss, request["microbatches"])
    traced: Counter[tuple[str, str, int]] = Counter()
    for one, calls in runtime.count_collectives(gradients, state.weights, rows).items():
        traced[_KINDS[one.kind], one.dtype, one.size * jax.numpy.dtype(one.dtype).itemsize] += calls
    step = runtime.make_train_step(plan, loss, optimizer, microbatches=request["microbatches"])
    first, update = (program.compile() for program in step.lower_programs(state, rows))
    kept: Counter[tuple[str, int]] = Counter()
    for one, calls in runtime.count_compiled_collectives(first).items():
        # The CPU compiler carries bfloat16 in float32: elements are what can be compared.
        kept[_KINDS.get(one.kind, one.kind), one.size] += calls

    moments = held(jax.tree.leaves(state.opt_state))
    counters = [
        leaf
        for path, leaf in jax.tree.leaves_with_path(state.opt_state)
        if jax.tree_util.keystr(path).endswith(CONSTANTS)
    ]
    return {
        "weights": held(state.weights.values()),
        "moments": moments,
        "counters": held(counters),
        "gradient_program": allocated(first),
        "update_program": allocated(update),
        "peak": max(moments + allocated(first)["total"], allocated(update)["total"]),
        "traced": [[*key, calls] for key, calls in sorted(traced.items())],
        "compiled": [[*key, calls] for key, calls in sorted(kept.items())],
    }


if __name__ == "__main__":
    main()
