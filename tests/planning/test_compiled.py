"""The check of a plan against XLA: its lines, what it asks of the process that compiles, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from dataclasses import astuple, replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from bridge.compiling import compiled
from bridge.compiling.compiled import check_compiled
from bridge.compiling.target_step import StepRequest
from bridge.core.sharding import PrecisionPolicy
from bridge.planning import PlanError, Workload, load_policy, make_plan, parse_policy
from bridge.planning.cost.optimizers import Optimizer
from bridge.planning.models.formulas import Attention, FormulaSegment
from bridge.planning.models.model import Model, Parameter

LEG = "bridge.compiling.compiled_leg"
POLICY = parse_policy(
    '[[unit]]\nmatch = "layers.*"\nstrategy = "optim_grads"\n[[unit]]\nmatch = ""\nstrategy = "no_shard"\n',
    "own",
)
PARAMETERS = [Parameter(f"layers.{k}.w", (8, 16 + 8 * k)) for k in range(2)] + [Parameter("head", (8, 4))]
MODEL = Model.of("m", PARAMETERS, [FormulaSegment("", working=3)])
# Per layer a gather and a scatter; of the root a sum, and one of the loss, which XLA leaves out.
TRACED = [
    *([kind, "float32", nbytes, 1] for kind in ("all_gather", "reduce_scatter") for nbytes in (512, 768)),
    *(["all_reduce", "float32", nbytes, 1] for nbytes in (128, 4)),
]
KEPT = [["all_gather", 128, 1], ["all_gather", 192, 1], ["reduce_scatter", 160, 2], ["all_reduce", 32, 1]]
MEASURED = {"weights": 448, "counters": 4, "moments": 900, "peak": 6000, "traced": TRACED, "compiled": KEPT}
AGREED = [
    ("main weights", 448, 448, True),
    ("moments, step counter", 900, 900, True),
    ("all_gather calls", 2, 2, True),
    ("all_gather bytes", 1280, 1280, True),
    ("all_gather calls that XLA kept", 2, 2, True),
    ("reduce_scatter calls", 2, 2, True),
    ("reduce_scatter bytes", 1280, 1280, True),
    ("reduce_scatter calls that XLA kept", 2, 2, False),
    ("all_reduce calls", 2, 2, True),
    ("all_reduce bytes", 132, 132, True),
    ("all_reduce calls that XLA kept", 2, 1, False),
]


def lines(model: Model = MODEL, compute: str = "float32", **measured: Any) -> list[tuple[Any, ...]]:
    policy = replace(POLICY, precision=PrecisionPolicy(compute=compute))
    plan = make_plan(model, policy, 4, "jax", Workload(1, 1))
    return [astuple(line) for line in compiled._lines(plan, {**MEASURED, **measured})]


def test_every_figure_of_a_plan_has_a_line() -> None:
    *calls, peak = lines()
    assert calls == AGREED
    assert peak == ("peak", 5888, 6000, True)
    assert [lines(peak=nbytes)[-1][-1] for nbytes in (5300, 5400, 6500, 6600)] == [False, True, True, False]
    assert lines(replace(MODEL, activations=()))[-1] == ("peak", 3968, 6000, None)
    assert lines(compute="bfloat16")[-1][-1] is None
    # All sizes must agree, not only their sums.
    traced = [["all_gather", "float32", 640, 2], ["reduce_scatter", "float32", 512, 3]]
    assert lines(weights=440, moments=901, traced=traced, compiled=[])[:-1] == [
        ("main weights", 448, 440, False),
        ("moments, step counter", 900, 901, False),
        ("all_gather calls", 2, 2, False),
        ("all_gather bytes", 1280, 1280, True),
        ("all_gather calls that XLA kept", 2, 0, False),
        ("reduce_scatter calls", 2, 3, False),
        ("reduce_scatter bytes", 1280, 1536, False),
        ("reduce_scatter calls that XLA kept", 2, 0, False),
        ("all_reduce calls", 2, 0, False),
        ("all_reduce bytes", 132, 0, False),
        ("all_reduce calls that XLA kept", 2, 0, False),
    ]


def test_a_process_compiles_the_step_without_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Mock(return_value=SimpleNamespace(returncode=0, stdout=json.dumps(MEASURED)))
    monkeypatch.setattr(subprocess, "run", run)
    check = partial(check_compiled, "llama3-8b", load_policy("fsdp"), 512, Workload(1, 16, 2), ["layers"])
    answer = check(Optimizer("sgd"))
    assert (answer.policy, answer.devices, answer.workload) == ("fsdp.toml", 512, Workload(1, 16, 2))
    assert not answer.agrees
    assert (run.call_args.args[0][1:], run.call_args.kwargs["timeout"]) == (["-m", LEG], 900)
    request = json.loads(run.call_args.kwargs["input"])
    step = StepRequest("llama3-8b", Workload(1, 16, 2), ("layers",), optimizer=Optimizer("sgd"))
    assert StepRequest.from_json(request.pop("step")) == step
    serial = replace(load_policy("fsdp"), prefetch=0).to_toml()
    assert request == {"policy": serial, "source": "fsdp.toml", "devices": 512}
    run.side_effect = [
        SimpleNamespace(returncode=1, stderr="Traceback\nMemoryError: all\n"),
        SimpleNamespace(returncode=-9, stderr=" \n"),
        subprocess.TimeoutExpired("python", 900),
    ]
    for text in (
        "compiling failed: MemoryError: all",
        "compiling failed: no message",
        "expected XLA to finish",
    ):
        with pytest.raises(PlanError, match=f"^--compile: {text}"):
            check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "m:f"},
            "expected decoder:CONFIG, a config.json or a built-in shape, got 'm:f'; compile your own",
        ),
        (
            {"attention": Attention.fused},
            "expected --attention plain or none, since jax_impl's models run plain",
        ),
        (
            {"policy": load_policy("fsdp_tp")},
            "expected a policy without model axes, .*, got tp in fsdp_tp.toml; ",
        ),
        ({"devices": 513}, "expected at most 512 devices to simulate, got 513$"),
        (
            {"optimizer": Optimizer(offload=Fraction(1))},
            "expected no --offload: simulated devices have no separate",
        ),
    ],
)
def test_what_simulated_devices_cannot_check_is_refused(changes: dict[str, Any], message: str) -> None:
    step = {
        "model": "llama3-8b",
        "policy": load_policy("fsdp"),
        "devices": 8,
        "workload": Workload(),
        **changes,
    }
    with pytest.raises(PlanError, match=f"^--compile: {message}"):
        check_compiled(**step)
