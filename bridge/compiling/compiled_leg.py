"""Compile a step for simulated devices and report XLA's allocations: the process behind ``compiled.py``.

``python -m bridge.compiling.compiled_leg < request.json > answer.json``. Nothing is trained and no weight is allocated:
programs are compiled for shapes. The two programs of a step, gradients and update, are compiled apart, as at run time.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from bridge.compiling.target_step import StepRequest
from bridge.planning.cost.optimizers import CONSTANTS
from bridge.planning.models.runtimes import framework

_KINDS = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "psum": "all_reduce"}


def main() -> None:
    """Answer one request."""
    json.dump(compiled(json.load(sys.stdin)), sys.stdout)


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """``request``: step, policy text, source, devices."""
    runtime = framework("jax_impl")
    runtime.simulate_devices(request["devices"])
    jax = framework("jax")
    asked = StepRequest.from_json(request["step"])
    policy = runtime.ShardingPolicy.parse(request["policy"], request["source"])
    mesh = runtime.data_parallel_mesh(policy.mesh_sizes(request["devices"]))
    plan = runtime.plan_sharding(asked.abstract_model(), mesh, policy, stacked=asked.stacked)
    rows = asked.global_batch(plan)
    optimizer = asked.optimizer.transformation()
    state = runtime.abstract_state(plan, optimizer)
    loss, microbatches = asked.loss_function(), asked.workload.microbatches
    gradients = runtime.make_gradients(plan, loss, microbatches)
    traced: Counter[tuple[str, str, int]] = Counter()
    for collective, calls in runtime.count_collectives(gradients, state.weights, rows).items():
        nbytes = collective.size * jax.numpy.dtype(collective.dtype).itemsize
        traced[_KINDS[collective.kind], collective.dtype, nbytes] += calls
    step = runtime.make_train_step(plan, loss, optimizer, microbatches=microbatches)
    first, update = (program.compile() for program in step.lower_programs(state, rows))
    kept: Counter[tuple[str, int]] = Counter()
    for collective, calls in runtime.count_compiled_collectives(first).items():
        # The CPU compiler stores bfloat16 as float32, so the numbers of elements are compared.
        kept[_KINDS.get(collective.kind, collective.kind), collective.size] += calls

    moments = held(jax.tree.leaves(state.opt_state))
    leaves = jax.tree.leaves_with_path(state.opt_state)
    counters = [leaf for path, leaf in leaves if jax.tree_util.keystr(path).endswith(CONSTANTS)]
    return {
        "weights": held(state.weights.values()),
        "moments": moments,
        "counters": held(counters),
        "peak": max(moments + allocated(first)["total"], allocated(update)["total"]),
        "traced": [[*key, calls] for key, calls in sorted(traced.items())],
        "compiled": [[*key, calls] for key, calls in sorted(kept.items())],
    }


def held(arrays: Iterable[Any]) -> int:
    """Bytes of arrays with a sharding, also abstract ones."""
    return sum(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)


def allocated(program: Any) -> dict[str, int]:
    """Bytes of a ``jax.stages.Compiled``. ``total``: the most bytes of it that are alive during a run."""
    analysis = program.memory_analysis()
    parts = {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes,
        "temporary": analysis.temp_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
    }
    return {**parts, "total": sum(parts.values()) - 2 * parts["aliased"]}


if __name__ == "__main__":
    main()
