"""Run one setting in its own process, because XLA reads its flags once. ``run`` starts it, ``main`` runs in it.

The request arrives as JSON on standard input. The answer is the last line of standard output.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.jax_setting import BASELINE, BASELINE_XLA, PJIT, SHARD_MAP, STRATEGIES, Setting

ROOT = Path(__file__).parents[2]
WARM_STEPS = 2


def run(request: dict[str, Any], timeout: float = 3600) -> dict[str, Any]:
    """The answer of a new process. Raises ``RuntimeError`` with the end of its standard error if the process fails."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.bench.jax_leg"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(
            f"expected the process of {request} to succeed, got exit status {process.returncode}: "
            f"{process.stderr[-3000:]}"
        )
    answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return answer


def main() -> None:
    json.dump(answer(json.loads(sys.stdin.read())), sys.stdout)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request whose ``what`` is "devices", "times" or "bytes"."""
    what = request["what"]
    if what == "devices":
        return devices()
    setting = Setting(**request["setting"])
    if what == "times":
        return times(setting, request["contestants"], request["rounds"], request["repeat"])
    return weights(setting, request["microbatches"])


def devices() -> dict[str, Any]:
    """The devices that JAX finds without simulation."""
    import jax

    chips = jax.devices()
    return {"platform": chips[0].platform, "kind": chips[0].device_kind, "count": len(chips)}


def times(setting: Setting, contestants: list[str], rounds: int, repeat: int) -> dict[str, Any]:
    """Run all contestants in turn: ``costs`` by round, ``losses`` by step, warm-up steps included."""
    from tests.bench.jax_contestants import build_step, mesh_of, model_of
    from tests.bench.jax_rounds import interleaved

    mesh = mesh_of(setting)
    model = model_of(setting)
    steps = {name: build_step(name, setting, model, mesh) for name in contestants}
    _, losses = interleaved(steps, 1, WARM_STEPS)
    costs, timed = interleaved(steps, rounds, repeat)
    return {
        "setting": setting.to_json(),
        "costs": {
            name: [dataclasses.asdict(cost) for cost in per_round] for name, per_round in costs.items()
        },
        "losses": {name: losses[name] + timed[name] for name in contestants},
    }


def weights(setting: Setting, microbatches: int) -> dict[str, Any]:
    """Compiled bytes of the baselines, and of both engines under every strategy. Allocates no weight."""
    from flax import nnx

    from tests.bench.jax_bytes import weigh
    from tests.bench.jax_contestants import mesh_of, model_of

    mesh = mesh_of(setting)
    model = nnx.eval_shape(lambda: model_of(setting))
    # The baselines shard like optim_grads_params and have no microbatches.
    pairs = [(name, STRATEGIES[-1]) for name in (BASELINE, BASELINE_XLA) if microbatches == 1]
    pairs += [(name, strategy) for name in (SHARD_MAP, PJIT) for strategy in STRATEGIES]
    footprints = []
    for name, strategy in pairs:
        footprint = weigh(name, dataclasses.replace(setting, strategy=strategy), model, mesh, microbatches)
        footprints.append({"contestant": name, "strategy": strategy, **dataclasses.asdict(footprint)})
    return {"setting": setting.to_json(), "microbatches": microbatches, "found": footprints}


if __name__ == "__main__":
    main()
