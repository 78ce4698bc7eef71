"""A leg's process answers line by line; the answers of ``target_leg`` are what was compiled, here for CPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, Mock

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src import xla_bridge
from jax.errors import JaxRuntimeError
from jax.experimental import topologies

from bridge.compiling import target_leg, target_plan
from bridge.compiling.leg_process import Leg, LegError
from bridge.compiling.machines import compilers, tpu_text
from bridge.compiling.machines.targets import CARDS, target_named
from bridge.compiling.target_step import BatchArray, StepRequest
from bridge.planning import PlanError, Workload, parse_policy
from bridge.planning.cost.optimizers import Optimizer
from tests.support.processes import importing_from

ROOT = Path(__file__).parents[2]
ANSWERING = """
import os
from bridge.compiling.leg_process import serve
from bridge.planning.models.errors import PlanError

def answer(request):
    print("noise of a compiler")
    os.write(1, b"more of it")
    if request["fault"] is not None:
        raise {"plan": PlanError, "other": KeyError}[request["fault"]]("x" * 5000)
    return {"pid": os.getpid(), "backend": os.environ["JAX_PLATFORMS"], **request}

serve(answer)
"""


def test_a_process_answers_until_it_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answering.py").write_text(ANSWERING)
    monkeypatch.setenv("PYTHONPATH", importing_from(tmp_path, ROOT)["PYTHONPATH"])
    with Leg("answering", "gpu") as leg:
        assert not leg.running
        first, again = (leg.ask({"fault": None, "number": number}) for number in (1, 2))
        assert leg.running
        assert first == {"pid": again["pid"], "backend": "cpu", "fault": None, "number": 1}
        for fault, told in (("plan", "x" * 5000), ("other", f"KeyError: '{'x' * 2989}")):
            with pytest.raises(LegError, match=f"^{told}$"):
                leg.ask({"fault": fault})
        process, texts = leg._process, Path(leg._texts.name)
        assert texts.is_dir()
    assert process is not None
    assert (process.returncode, leg.running, texts.exists(), leg._errors.closed) == (-15, False, False, True)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = (nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.first(x))


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]) ** 2)


POLICY = parse_policy('[[unit]]\nmatch = "last"\nstrategy = "optim"\n[[unit]]\nmatch = ""\n', "own.toml")
REQUEST = {
    "step": StepRequest(
        f"{__name__}:Net",
        Workload(microbatches=2),
        loss=f"{__name__}:loss",
        batch={"x": BatchArray((3, 8))},
        optimizer=Optimizer(moments=("bfloat16", "float32"), offload=Fraction(1, 2)),
        frozen=("first.*",),
    ).to_json(),
    "policy": POLICY.to_toml(),
    "source": POLICY.source,
    "target": "v5e:2x2",
    "engine": "shard_map",
    "recommended": False,
}
Lowered = tuple[Any, Any, Any, tuple[Any, Any]]


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_leg, "devices_of", lambda target: jax.devices()[: target.devices])
        return target_leg.lowered_step(REQUEST, target_named("v5e:2x2"))


@pytest.fixture
def answer(
    lowered: Lowered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """The answer for the programs, with the second one replaced if it is given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(target_leg, "versions", lambda platform: {"jax": platform})
    monkeypatch.setattr(target_leg, "options_of", lambda *_: {})

    def call(second: Any = None) -> dict[str, Any]:
        *others, (gradients, update) = lowered

        def warned(*_: object) -> Any:
            warnings.warn("a layer is odd", RuntimeWarning, stacklevel=1)
            warnings.warn("not for people", DeprecationWarning, stacklevel=1)
            return (*others, (gradients, second or update))

        monkeypatch.setattr(target_leg, "lowered_step", warned)
        return target_leg.answer(REQUEST)

    return call


def test_an_answer_counts_what_was_compiled_and_is_kept(
    answer: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tpu_text, "text_of", Mock(side_effect=ValueError("no\n  text")))
        unread = answer()
    assert (unread["unread"], unread["programs"], "collectives" in unread) == ("no text", {}, False)
    # An answer without texts is not taken from the cache.
    first = answer()
    assert answer() == {**first, "cached": True}
    assert first["held"] == {"weights": 128, "moments": 4, "gradients": 64, "batch": 192, "variables": 0}
    assert (first["host"], first["versions"], first["warnings"]) == (96, {"jax": "tpu"}, ["a layer is odd"])
    assert {name: part["beside"] for name, part in first["memory"].items()} == {"gradients": 4, "update": 192}
    listed = {(call["program"], call["kind"], call["times"], call["bytes"]) for call in first["collectives"]}
    gathers = {("gradients", "all_gather", times, 256 * times) for times in (1, 2)}
    assert listed == {*gathers, ("gradients", "reduce_scatter", 1, 256), ("gradients", "psum", 1, 4)}
    assert first["collectives"][0]["arrays"] == [{"dtype": "f32", "size": 64}]
    assert not any(call["overlaps"] for call in first["collectives"])
    texts = {name: Path(path).read_text() for name, path in first["programs"].items()}
    assert {name: "ENTRY" in text for name, text in texts.items()} == {"gradients": True, "update": True}
    assert (0 < first["seconds"] < 60, first["cached"]) == (True, False)


class Refused:
    """A program that does not compile."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def as_text(self) -> str:
        return self._reason

    def compile(self, _: object) -> None:
        raise JaxRuntimeError(self._reason)


def test_a_program_that_does_not_fit_is_an_answer_and_other_errors_are_raised(
    answer: Callable[..., dict[str, Any]],
) -> None:
    full = answer(Refused("Ran out of memory: Used 3.5K of 1.0K hbm"))
    assert (full["exhausted"], full["cached"], full["warnings"]) == (3584, False, ["a layer is odd"])
    assert full.keys() == {
        "held",
        "host",
        "exhausted",
        "seconds",
        "versions",
        "programs",
        "warnings",
        "cached",
    }
    assert Path(full["programs"]["update"]).read_text() == "Ran out of memory: Used 3.5K of 1.0K hbm"
    with pytest.raises(JaxRuntimeError, match="INTERNAL"):
        answer(Refused("INTERNAL: no layout"))


@pytest.mark.parametrize(
    ("program", "arguments", "outputs", "aliased", "expected"),
    [
        # While gradients are computed, moments are alive, and frozen weights that are no arguments.
        ("gradients", 107, 100, 0, {"beside": 200, "peak": 107 + 100 + 50 + 200}),
        ("gradients", 87, 100, 0, {"beside": 220, "peak": 87 + 100 + 50 + 220}),
        # During an update, which gets its state donated, the batch and variables are alive.
        ("update", 400, 300, 300, {"beside": 7, "peak": 400 + 50 + 7}),
    ],
)
def test_a_peak_counts_what_lives_beside_a_program(
    program: str, arguments: int, outputs: int, aliased: int, expected: dict[str, int]
) -> None:
    held = {"weights": 100, "moments": 200, "gradients": 100, "batch": 4, "variables": 3}
    sizes = {"argument": arguments, "output": outputs, "temp": 50, "alias": aliased}
    analysis = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    own = {"arguments": arguments, "outputs": outputs, "temporary": 50, "aliased": aliased}
    compiled = SimpleNamespace(memory_analysis=lambda: analysis)
    assert target_leg._memory(compiled, program, held) == own | expected


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("h100:16", ("1x2x8", "cuda", {"topology": "1x2x8", "target_config": CARDS["h100"].proto()})),
        ("v4:2x2x2", ("v4:2x2x2", "tpu", {"chip_config_name": "megacore"})),
        ("v5e:2x4", ("v5e:2x4", "tpu", {})),
    ],
)
def test_a_compiler_is_asked_for_the_devices_of_a_target(
    target: str, options: tuple[str, str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    named, (topology, platform, more) = target_named(target), options
    described, discover = Mock(return_value=SimpleNamespace(devices=range(named.devices))), Mock()
    monkeypatch.setattr(topologies, "get_topology_desc", described)
    monkeypatch.setattr(xla_bridge, "discover_pjrt_plugins", discover)
    assert compilers.devices_of(named) == [*range(named.devices)]
    described.assert_called_once_with(topology, platform, **more)
    assert discover.call_count == (named.platform == "gpu")
    described.side_effect = [
        SimpleNamespace(devices=range(3)),
        JaxRuntimeError("no\n  such"),
        JaxRuntimeError("the lockfile is held"),
    ]
    for error, text in (
        (PlanError, f"^target {target}: expected {named.devices} devices, the compiler has 3$"),
        (PlanError, f"^target {target}: the compiler knows no such machine: no such$"),
        (JaxRuntimeError, "^the lockfile is held$"),
    ):
        with pytest.raises(error, match=text):
            compilers.devices_of(named)


def test_options_and_versions_are_those_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, tpu = target_named("h100:8"), target_named("v5e:2x2")
    always = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    assert (compilers.options_of(gpu), compilers.options_of(tpu, recommended=True)) == (always, {})
    assert compilers.options_of(gpu, recommended=True) == always | compilers.RECOMMENDED
    monkeypatch.setattr(compilers, "installed_versions", lambda *names: {names[0]: "1.2"})
    assert compilers.versions("tpu") == {"jax": "1.2", "jaxlib": "unknown", "libtpu": "unknown"}
    own = {"jax-cuda12-plugin": "unknown", "nvidia-cuda-nvcc-cu12": "unknown"}
    assert compilers.versions("gpu") == {"jax": "1.2", "jaxlib": "unknown", **own}
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.delenv(compilers.VARIABLE, raising=False)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    environment = compilers.environment("gpu")
    assert environment["PYTHONPATH"] == f"/mine:{compilers.FOLDER}"
    assert (environment["JAX_PLATFORMS"], environment["JAX_ENABLE_COMPILATION_CACHE"]) == ("cpu", "false")
    assert "TPU_SKIP_MDS_QUERY" not in environment


@pytest.mark.parametrize(
    ("platform", "running", "refusals", "waits"),
    [
        ("tpu", False, 0, [False]),
        ("tpu", False, 2, [False, True, True]),
        ("tpu", True, 1, []),
        ("gpu", False, 0, []),
    ],
)
def test_a_lock_is_waited_for_before_a_leg_starts_and_after_a_refusal(
    platform: str, running: bool, refusals: int, waits: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    leg = Mock(platform=platform, running=running)
    leg.ask.side_effect = [*[LegError("the lockfile is held")] * refusals, {"peak": 1}]
    wait = Mock()
    monkeypatch.setattr(target_plan, "wait_for_lock", wait)
    assert target_plan._asked(leg, {"row": 2}, print) == {"peak": 1}
    assert [asked.args for asked in wait.call_args_list] == [(print, ANY, held) for held in waits]
    assert (leg.ask.call_args.args, leg.restart.call_count) == (({"row": 2},), refusals)
    for limit, text in ((3600.0, "no layout"), (-1.0, "the lockfile is held")):
        monkeypatch.setattr(target_plan, "SECONDS", limit)
        leg.ask.side_effect = LegError(text)
        with pytest.raises(LegError, match=text):
            target_plan._asked(leg, {}, print)
