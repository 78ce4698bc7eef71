"""The relay as a user runs it, short; and its error when a leg fails."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from bridge.core.formats import open_checkpoint
from bridge.relay import relay
from bridge.relay.config import ConfigError, Leg, ModelConfig, RelayConfig
from bridge.relay.job import Job
from bridge.relay.launch import LegError, OnStep, Reference, rehearse, run_leg
from bridge.relay.relay import RelayError
from jax_impl import data_parallel_mesh, plan_sharding
from jax_impl.models import decoder as jax_decoder
from torch_impl import plan_layout
from torch_impl.models import decoder as torch_decoder


def twinshard(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bridge.commands.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


class Finished(NamedTuple):
    config: RelayConfig
    done: subprocess.CompletedProcess[str]
    out: Path


def relayed(file: str | Path, folder: Path) -> Finished:
    return Finished(RelayConfig.load(file), twinshard("relay", file, "--out", folder / "run"), folder / "run")


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The first two legs of the quick relay, on two ranks each: half of its CPU time. All workers share one run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "short-relay"
    folder.mkdir(exist_ok=True)
    file, answer = folder / "short.toml", folder / "short.json"
    # The lock makes the other workers wait for the run of the first.
    with (folder / "short.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            text = (Path(__file__).parents[2] / "bridge" / "relay" / "configs" / "quick.toml").read_text()
            legs = "[[leg]]".join(text.split("[[leg]]")[:3])
            file.write_text(re.sub("ranks = [34]", "ranks = 2", legs))
            done = relayed(file, folder).done
            answer.write_text(json.dumps([done.args, done.returncode, done.stdout, done.stderr]))
    done = subprocess.CompletedProcess(*json.loads(answer.read_text()))
    return Finished(RelayConfig.load(file), done, folder / "run")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return relayed("quick", tmp_path_factory.mktemp("relay"))


@pytest.fixture(params=["short", pytest.param("quick", marks=pytest.mark.slow)])
def finished(request: pytest.FixtureRequest) -> Finished:
    return request.getfixturevalue(request.param)


def test_a_short_relay_succeeds_and_says_so(finished: Finished) -> None:
    config, done, out = finished
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert f"jax x{config.legs[1].ranks} zero1" in done.stdout
    assert str(out) in done.stdout.replace("\n", "")
    assert (out / "relay.png").read_bytes().startswith(b"\x89PNG")


def test_every_hop_is_bit_exact_and_every_loss_close_to_both_references(finished: Finished) -> None:
    config, _, out = finished
    report = json.loads((out / "report.json").read_text())
    losses = [loss for leg in report["legs"] for loss in leg["losses"]]
    assert len(losses) == config.steps
    # A model that does not train, or legs that restart from the beginning, would make agreement worthless.
    assert losses[-1] < losses[0] - 0.005
    for leg in report["legs"][1:]:
        assert leg["hop"]["max_ulp"] == 0
        assert leg["hop"]["same"] is True
        assert leg["hop"]["tensors"] > 50
    assert max(report["differences"]["relay_fp32"]) < 1e-5
    assert 1 / 3 < report["closeness_to_fp64"] < 3
    assert 0 < max(report["differences"]["fp32_fp64"]) < 1e-5
    assert report["failures"] == []


def test_the_losses_are_held_against_repeats_that_differ_in_rounding_only(finished: Finished) -> None:
    config, done, out = finished
    report = json.loads((out / "report.json").read_text())
    reference, repeats = np.array(report["reference_fp32"]), np.array(report["repeats"])
    assert repeats.shape == (config.repeats, len(reference))
    # With the norms of the states: on some processors two repeats have equal losses in all of four steps.
    names = ["reference-float32", *(f"repeat{number}" for number in range(1, 1 + len(repeats)))]
    assert len({(out / name / "metrics.jsonl").read_text() for name in names}) == 1 + len(repeats)
    assert np.abs(repeats / reference - 1).max() < 1e-5
    [compared] = report["curves"]["compared"]
    assert (compared["same"], compared["noise"]["method"]) == (True, "t")
    assert "same experiment; band of 3 repeats" in done.stdout.replace("\n", " ")


def test_the_last_checkpoint_holds_the_position_and_optimizer_state(finished: Finished) -> None:
    config, _, out = finished
    steps = config.steps
    with open_checkpoint(out / f"leg{len(config.legs)}-jax" / "checkpoint") as checkpoint:
        assert checkpoint.format == "orbax"
        assert checkpoint.read("train/data/position") == steps
        assert checkpoint.read("opt_state/count") == steps
        moments = checkpoint.read("opt_state/nu/layers/0/mlp/gate/kernel")
        assert moments.shape == (37, 53)
        assert moments.max() > 0


@pytest.mark.slow
def test_each_leg_held_what_its_strategy_holds(quick: Finished) -> None:
    out = quick.out
    with open_checkpoint(out / "start" / "checkpoint") as checkpoint:
        whole = sum(t.nbytes for name, t in checkpoint.tensors.items() if name.startswith("model."))
    legs = [json.loads(path.read_text()) for path in sorted(out.glob("leg*/memory.json"))]
    first, third = legs[0], legs[2]
    assert first["main_weights"] < whole / 2
    assert first["compute_weights"] == 0
    assert whole / 2 <= third["main_weights"] < 0.6 * whole
    assert whole <= third["compute_weights"] < 1.2 * whole
    for leg, share in ((legs[1], 4), (legs[3], 2)):
        assert len(leg["devices"]) == share
        for device in leg["devices"]:
            assert 0.8 * whole / share < device["main_weights"] < 1.2 * whole / share


GRAINS = """
[model]
vocab_size = 257
d_model = 35
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim = 10
d_ff = 64

[data]
seed = 20
batch = 24
length = 16

[optimizer]
lr = 1e-3
betas = [0.9, 0.95]
eps = 1e-8
weight_decay = 0.1
"""


def buffers_of_a_layer(leg: Leg, granularity: str, model: ModelConfig) -> int:
    """In how many flat buffers a leg without alignment keeps the weights of one layer."""
    config = dict(vars(model))
    if leg.framework == "torch":
        layer = torch_decoder.Decoder(torch_decoder.DecoderConfig(**config)).layers[0]
        shapes = {name: tuple(param.shape) for name, param in layer.named_parameters()}
    else:
        built = nnx.eval_shape(
            lambda: jax_decoder.Decoder(jax_decoder.DecoderConfig(**config), rngs=nnx.Rngs(0))
        )
        unit = plan_sharding(built, data_parallel_mesh(1)).units["layers/0"].module
        shapes = dict(zip(unit.parameters, unit.shapes, strict=True))
    return len(plan_layout(shapes, leg.ranks, granularity=granularity, align=1).shard_sizes)


@pytest.mark.slow
def test_a_relay_over_layouts_of_rows_blocks_and_tensors_is_as_exact(tmp_path: Path) -> None:
    legs = [
        ("torch", 3, "optim_grads_params", "block(32)"),
        ("jax", 3, "optim_grads_params", "row"),
        ("torch", 4, "optim_grads", "row"),
        ("jax", 3, "optim", "tensor"),
    ]
    policies = []
    for number, (framework, ranks, strategy, granularity) in enumerate(legs):
        units = f'strategy = "{strategy}"\ngranularity = "{granularity}"\n'
        text = f'[mesh]\nalign = 1\n[[unit]]\nmatch = "layers.*"\n{units}[[unit]]\nmatch = ""\n{units}'
        (tmp_path / f"{number}.toml").write_text(text)
        policies.append((framework, ranks, f"{number}.toml"))
    file = relay_of(tmp_path, policies)
    config = RelayConfig.load(file)
    buffers_of_a_layers = [
        buffers_of_a_layer(leg, granularity, config.model)
        for leg, (*_, granularity) in zip(config.legs, legs, strict=True)
    ]
    assert buffers_of_a_layers == [3, 3, 3, 2]
    done = twinshard("relay", file, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [leg["hop"]["max_ulp"] for leg in report["legs"][1:]] == [0, 0, 0]
    assert max(report["differences"]["relay_fp32"]) < 1e-5
    assert report["failures"] == []


LEVELS = """
[mesh]
outer = "all"
inner = 2
[[unit]]
match = "layers.*.mlp"
strategy = "hsdp"
granularity = "tensor"
recompute = true
[[unit]]
match = "layers.*"
strategy = "hfsdp"
[[unit]]
match = ""
parameters = ["replicate", "replicate"]
gradients = ["partial", "shard"]
optimizer = ["shard", "shard"]
"""


def relay_of(folder: Path, legs: list[tuple[str, int, str]], model: str = GRAINS) -> Path:
    """Write a relay file of legs with a policy each."""
    text = model
    for framework, ranks, policy in legs:
        text += f'\n[[leg]]\nframework = "{framework}"\nranks = {ranks}\npolicy = "{policy}"\nsteps = 2\n'
    (folder / "relay.toml").write_text(text)
    return folder / "relay.toml"


@pytest.mark.slow
def test_one_policy_file_with_two_mesh_axes_and_nested_units_in_both_frameworks(tmp_path: Path) -> None:
    (tmp_path / "levels.toml").write_text(LEVELS)
    file = relay_of(tmp_path, [("torch", 4, "levels.toml"), ("jax", 4, "levels.toml")])
    done = twinshard("relay", file, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [leg["title"] for leg in report["legs"]] == ["torch x4 levels", "jax x4 levels"]
    assert [leg["policy"]["text"] for leg in report["config"]["legs"]] == [LEVELS, LEVELS]
    assert max(report["differences"]["relay_fp32"]) < 1e-5
    assert report["failures"] == []
    held = [json.loads(path.read_text()) for path in sorted((tmp_path / "run").glob("leg*/memory.json"))]
    device = held[1]["devices"][0]
    # HFSDP cuts weights and moments in four, HSDP in two; the frameworks' shapes are not the same.
    with open_checkpoint(tmp_path / "run" / "start" / "checkpoint") as checkpoint:
        whole = sum(t.nbytes for name, t in checkpoint.tensors.items() if name.startswith("model."))
    for memory in (held[0], device):
        assert whole / 4 < memory["main_weights"] < whole / 2
        assert 2 * memory["main_weights"] == pytest.approx(memory["moments"], rel=0.02)


@pytest.mark.slow
def test_one_policy_with_a_tensor_parallel_axis_in_both_frameworks(tmp_path: Path) -> None:
    """From two ranks of the axis to two devices of it, to none, and back."""
    legs = [("torch", 4, "fsdp_tp"), ("jax", 4, "fsdp_tp"), ("torch", 2, "fsdp"), ("jax", 2, "fsdp_tp")]
    file = relay_of(tmp_path, [*legs, ("torch", 4, "fsdp_tp")])
    done = twinshard("relay", file, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["failures"] == []
    assert max(report["differences"]["relay_fp32"]) < 1e-5


def test_only_data_ranks_divide_the_batch_of_a_relay(tmp_path: Path) -> None:
    batch = GRAINS.replace("batch = 24", "batch = 6")
    assert RelayConfig.load(relay_of(tmp_path, [("torch", 4, "fsdp_tp")], batch)).legs[0].ranks == 4
    with pytest.raises(ConfigError, match=r"to divide the global batch of 6 sequences, got '?8 x 1 = 8"):
        RelayConfig.load(relay_of(tmp_path, [("torch", 16, "fsdp_tp")], batch))


NO_SUCH_UNIT = '[[unit]]\nmatch = "layer.*"\n[[unit]]\nmatch = ""\n'
EMBEDDING_APART = '[[unit]]\nmatch = "embed"\n[[unit]]\nmatch = ""\n'
DOUBLE = '[precision]\nmain = "float64"\n[[unit]]\nmatch = ""\n'


UNFIT = {
    "key.toml": (
        "strategy = 1",
        2,
        "strategy: expected no other keys than mesh, precision, unit, parallel, got 'strategy'",
    ),
    "axes.toml": (LEVELS, 3, r"\[mesh\]: expected axes of 3 devices in all, got outer = \"all\" x inner = 2"),
    "none.toml": (
        NO_SUCH_UNIT,
        2,
        r"\[\[unit\]\] 1: match: expected modules that 'layer.\*' matches, got none",
    ),
    "double.toml": (DOUBLE, 2, r"\[precision\] main: expected .*float64 main weights"),
}


@pytest.mark.slow
def test_a_rehearsal_finds_each_policy_that_does_not_fit(tmp_path: Path) -> None:
    legs = [(framework, 4, "fsdp") for framework in ("torch", "jax")]
    for name, (policy, ranks, _) in UNFIT.items():
        (tmp_path / name).write_text(policy)
        legs += [(framework, ranks, name) for framework in ("torch", "jax")]
    config = RelayConfig.load(relay_of(tmp_path, legs))
    errors = rehearse([job(tmp_path / f"{n}", leg, None) for n, leg in enumerate(config.legs)])
    assert errors[:2] == [None, None]
    for (framework, _, name), error in zip(legs[2:], errors[2:], strict=True):
        assert error is not None, (framework, name)
        assert error.startswith(f"PolicyError: {tmp_path / name}: ")
        assert re.search(UNFIT[name][2], error), error


@pytest.mark.slow
def test_a_rehearsal_in_torch_runs_the_model(tmp_path: Path) -> None:
    # The output layer reads the embedding's weights, which outside of their unit are shards.
    (tmp_path / "apart.toml").write_text(EMBEDDING_APART)
    tied = GRAINS.replace("[data]", "tied = true\n[data]")
    config = RelayConfig.load(relay_of(tmp_path, [("torch", 2, "apart.toml"), ("torch", 2, "fsdp")], tied))
    jobs = [
        replace(job(tmp_path / f"{n}", leg, None), model=config.model) for n, leg in enumerate(config.legs)
    ]
    bad, good = rehearse(jobs)
    assert good is None
    assert bad is not None


@pytest.mark.slow
def test_a_policy_that_does_not_fit_a_later_leg_stops_a_relay_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "levels.toml").write_text(LEVELS)
    file = relay_of(tmp_path, [("torch", 2, "fsdp"), ("jax", 3, "levels.toml")])
    done = twinshard("relay", file, "--out", tmp_path / "run")
    assert done.returncode == 2
    said = done.stderr.replace("\n", "")
    assert f"leg 2 (jax x3 levels): PolicyError: {tmp_path / 'levels.toml'}: [mesh]" in said
    assert "initial checkpoint" not in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("error", "error_type", "said"),
    [
        (
            "ValueError: no such unit",
            ConfigError,
            r"leg 2 \(jax x4 zero1\): zero1.toml: ValueError: no such unit",
        ),
        (
            "KeyError: 'num_consts'",
            RelayError,
            r"leg 2 \(jax x4 zero1\): the rehearsal under .* raised KeyError",
        ),
    ],
)
def test_only_errors_that_explain_themselves_are_laid_on_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, error_type: type[Exception], said: str
) -> None:
    monkeypatch.setattr(relay, "rehearse", lambda jobs: [None, error, *[None] * (len(jobs) - 2)])
    with pytest.raises(error_type, match=f"^{said}"):
        relay.run(RelayConfig.load("quick"), tmp_path / "run", Console())
    assert not (tmp_path / "run").exists()


def test_where_nobody_looks_each_begin_and_end_is_a_plain_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(references: Sequence[Reference], follow: Callable[[Reference], OnStep]) -> Iterator[float]:
        follow(references[0])(0, 5.5)
        yield 1.25
        follow(references[1])
        raise LegError("stopped")

    monkeypatch.setattr(relay, "rehearse", lambda jobs: [None] * len(jobs))
    monkeypatch.setattr(relay, "run_references", stop)
    # Colours would show in a log.
    told = Console(file=io.StringIO(), color_system="standard", force_terminal=False, width=200)
    with pytest.raises(RelayError, match=r"^reference float32 failed: stopped"):
        relay.run(RelayConfig.load("quick"), tmp_path / "run", told)
    lines = told.file.getvalue().splitlines()
    assert re.fullmatch(r"rehearsal of the legs: \d+\.\d s", lines.pop(1))
    assert lines == [
        "rehearsal of the legs ...",
        *("initial checkpoint ...", "initial checkpoint: 1.2 s", "reference float32 ..."),
    ]


def share_of_bfloat16_gradients(before: Path, after: Path) -> float:
    """The share of the MLPs' gradients in the step between two checkpoints that bfloat16 represents."""
    beta = RelayConfig.load("quick").optimizer.betas[0]
    shares = []
    with open_checkpoint(before) as old, open_checkpoint(after) as new:
        for name in new.tensors:
            if "mlp." in name.replace("/", ".") and ("/mu/" in name or name.endswith(".exp_avg")):
                start, end = (checkpoint.read(name).astype(np.float64) for checkpoint in (old, new))
                gradient = (end - beta * start) / (1 - beta)
                # Of others the rounding of the float32 moments hides the last bits.
                gradient = gradient[np.abs(gradient) > 0.1 * np.abs(start)]
                rounded = gradient.astype(ml_dtypes.bfloat16).astype(np.float64)
                shares.append(np.mean(np.abs(rounded - gradient) <= 2.0**-14 * np.abs(gradient)))
    assert len(shares) >= 4
    return float(np.mean(shares))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_bfloat16_leg_computes_in_bfloat16_and_sums_gradients_in_float32(
    quick: Finished, tmp_path: Path, framework: str
) -> None:
    source = quick.out / ("start/checkpoint" if framework == "torch" else "hop2-orbax")
    losses, memory, shares = {}, {}, {}
    for precision in ("float32", "bfloat16"):
        leg = Leg(framework, 2, "optim_grads", steps=1, precision=precision)
        run_leg(
            job(tmp_path / precision, leg, source),
            lambda step, loss, precision=precision: losses.update({precision: loss}),
        )
        memory[precision] = json.loads((tmp_path / precision / "memory.json").read_text())
        shares[precision] = share_of_bfloat16_gradients(source, tmp_path / precision / "checkpoint")
    # A sum of two ranks' bfloat16 gradients has a bfloat16 value where no bit is lost, in less than half of all cases.
    assert shares["float32"] < 0.1
    assert 0.2 < shares["bfloat16"] < 0.6
    assert losses["bfloat16"] != losses["float32"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=1e-2)
    if framework == "torch":
        assert 2 * memory["bfloat16"]["compute_weights"] == memory["float32"]["compute_weights"]


def leg_processes(folder: Path) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                pids.append(int(path.parent.name))
    return pids


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("framework", [pytest.param("torch", marks=pytest.mark.slow), "jax"])
def test_an_interrupted_relay_leaves_no_process_behind(
    short: Finished, tmp_path: Path, framework: str
) -> None:
    source = short.out / ("start/checkpoint" if framework == "torch" else "hop2-orbax")
    running: list[int] = []

    def interrupt(step: int, loss: float) -> None:
        running.extend(leg_processes(tmp_path))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_leg(job(tmp_path / "leg", Leg(framework, 2, "optim", steps=100_000), source), interrupt)
    assert len(running) == (3 if framework == "torch" else 1)
    assert leg_processes(tmp_path) == []
    assert not (tmp_path / "leg" / "checkpoint").exists()


def ended(folder: Path, seconds: float = 60) -> bool:
    """Whether all processes of ``folder`` end by themselves; those that do not are killed."""
    deadline = time.monotonic() + seconds
    while leg_processes(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = leg_processes(folder)
    for process in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return not left


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent ended")
def test_ranks_end_when_their_launcher_is_killed(short: Finished, tmp_path: Path) -> None:
    def kill_torchrun(step: int, loss: float) -> None:
        for process in leg_processes(tmp_path):
            if b"torch.distributed.run" in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGKILL)

    long = job(tmp_path / "leg", Leg("torch", 2, "optim", steps=100_000), short.out / "start" / "checkpoint")
    try:
        with pytest.raises(LegError, match="exit status -9"):
            run_leg(long, kill_torchrun)
    finally:
        assert ended(tmp_path, 10)


RUN_LEG = """
import sys
from pathlib import Path
from bridge.relay.config import Leg
from bridge.relay.launch import run_leg
from tests.parity.test_relay import job
leg = Leg(sys.argv[1], 2, "optim", steps=100_000)
run_leg(job(Path(sys.argv[2]) / "leg", leg, Path(sys.argv[3])), lambda step, loss: print(step, flush=True))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent ended")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_leg_ends_when_the_relay_is_killed(short: Finished, tmp_path: Path, framework: str) -> None:
    source = short.out / ("start/checkpoint" if framework == "torch" else "hop2-orbax")
    command = [sys.executable, "-c", RUN_LEG, framework, tmp_path, source]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as relay:
        assert relay.stdout is not None
        assert relay.stdout.readline()
        relay.kill()
    assert ended(tmp_path)


def test_a_leg_whose_parent_ended_before_it_could_ask_does_not_start(tmp_path: Path) -> None:
    written = job(tmp_path / "leg", Leg("jax", 2, "optim", steps=1), tmp_path / "nowhere").write()
    with subprocess.Popen([sys.executable, "-c", ""]) as parent:
        parent.wait()
    command = [sys.executable, "-m", "bridge.relay.jax_leg", str(written)]
    done = subprocess.run(command, env={**os.environ, "TWINSHARD_PARENT": str(parent.pid)}, timeout=200)
    assert done.returncode == 1
    assert f"expected process {parent.pid}, which" in (tmp_path / "leg" / "error-rank0").read_text()


SLOW_RELAY = """
import signal, sys, time
import bridge.commands.main, bridge.relay.relay
def run(*arguments):
    try:
        print("running", flush=True)
        time.sleep(60)
    finally:
        print("cleaning", flush=True)
        time.sleep(1)
        print("cleaned up", flush=True)
bridge.relay.relay.run = run
# Whatever the tests themselves were started with.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
sys.argv[1:] = ["relay", "quick"]
bridge.commands.main.main()
"""


@pytest.mark.fast_cases("plain-signals0-129")
@pytest.mark.parametrize(
    ("start", "signals", "status"),
    [
        ("plain", [signal.SIGHUP, signal.SIGHUP], 128 + signal.SIGHUP),
        ("plain", [signal.SIGTERM, signal.SIGHUP], 128 + signal.SIGTERM),
        ("nohup", [signal.SIGTERM, signal.SIGTERM], 128 + signal.SIGTERM),
    ],
)
def test_a_relay_whose_terminal_closes_stops_its_leg_unless_told_not_to(
    start: str, signals: list[signal.Signals], status: int
) -> None:
    command = [sys.executable, "-c", SLOW_RELAY, start]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdout is not None
        assert relay.stdout.readline() == "running\n"
        if start == "nohup":
            relay.send_signal(signal.SIGHUP)
            time.sleep(0.5)
        first, second = signals
        relay.send_signal(first)
        assert relay.stdout.readline() == "cleaning\n"
        relay.send_signal(second)
        assert relay.stdout.read() == "cleaned up\n"
    assert relay.returncode == status


def test_a_run_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    done = twinshard("relay", "quick", "--out", tmp_path)
    assert done.returncode == 2
    assert "choose another --out" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_relay_file_with_too_many_ranks_is_refused_before_anything_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "bridge" / "relay" / "configs" / "quick.toml").read_text()
    (tmp_path / "wide.toml").write_text(text.replace("ranks = 3", "ranks = 7"))
    done = twinshard("relay", tmp_path / "wide.toml", "--out", tmp_path / "run")
    assert done.returncode == 2
    assert "leg 1 (torch x7" in done.stderr
    assert "7 x 2 = 14" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def job(folder: Path, leg: Leg, source: Path | None) -> Job:
    config = RelayConfig.load("quick")
    return Job(config.model, config.data, config.optimizer, leg, folder, source, folder / "checkpoint")


@pytest.mark.parametrize("framework", [pytest.param("torch", marks=pytest.mark.slow), "jax"])
def test_a_failing_leg_stops_the_run_with_its_own_error(tmp_path: Path, framework: str) -> None:
    leg = Leg(framework, 2, "optim", steps=1)
    with pytest.raises(LegError, match="nowhere") as caught:
        run_leg(job(tmp_path / "leg", leg, tmp_path / "nowhere"), lambda step, loss: None)
    assert "rank" in str(caught.value)
    assert not (tmp_path / "leg" / "checkpoint").exists()


@pytest.mark.slow
def test_more_ranks_than_the_relay_file_says_are_refused_by_the_leg(tmp_path: Path) -> None:
    leg = Leg("torch", 1, "optim", steps=1)
    job(tmp_path / "leg", leg, tmp_path / "nowhere").write()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "bridge.relay.torch_leg", str(tmp_path / "leg" / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    # torchrun stops the other rank as soon as one has ended, perhaps before it wrote its error.
    report = min((tmp_path / "leg").glob("error-rank*")).read_text()
    assert "expected 1 ranks as the relay file says, got 2 from the launcher" in report


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_by_name_of_what_differs(
    short: Finished, tmp_path: Path
) -> None:
    leg = Leg("torch", 2, "optim", steps=1)
    wrong = job(tmp_path / "leg", leg, short.out / "leg1-torch" / "checkpoint")
    wrong = replace(wrong, model=replace(wrong.model, d_ff=59))
    with pytest.raises(LegError, match=r"layers\.0\.mlp\.w"):
        run_leg(wrong, lambda step, loss: None)
