"""``plan --target``: what XLA's own compilers say of whole steps, for machines that are not there.

Skipped where the compilers are not installed. Nothing runs: these tests say what was compiled.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from bridge.commands.main import app
from bridge.compiling import target_leg, target_plan
from bridge.compiling.compile_cache import cache_folder, key_of, load, save
from bridge.compiling.leg_process import Leg
from bridge.compiling.machines import tpu_lock
from bridge.compiling.machines.compilers import why_not
from bridge.compiling.machines.targets import target_named
from bridge.compiling.target_plan import Task
from bridge.compiling.target_step import StepRequest, load_batch_shapes
from bridge.planning import Workload, make_plan, resolve_models
from bridge.planning.cost.cost import load_policy, parse_policy
from bridge.planning.cost.optimizers import Optimizer
from bridge.planning.models.errors import PlanError
from tests.support.compilers.setting import Setting
from tests.support.compilers.worker import Compiler, unavailable
from tests.support.processes import importing_from

POLICY = parse_policy('[[unit]]\nmatch = "layers.*"\n[[unit]]\nmatch = ""\n', "own.toml")
MODEL = "decoder:quick"
WORK = Workload(batch=2, length=128)
NET = """
import jax.numpy as jnp
from flax import nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(nnx.Linear(24, 24, rngs=rngs) for _ in range(9))

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def loss(model, batch):
    errors = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(errors * batch["mask"]), jnp.sum(batch["mask"])


def mean_of_masked(model, batch):
    total, weight = loss(model, batch)
    return total / weight
"""
SHAPES = "x = { shape = [3, 24] }\ny = { shape = [3, 24] }\nmask = { shape = [3] }\n"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def gpu(cache: None) -> Iterator[Leg]:
    if reason := why_not("gpu"):
        pytest.skip(reason)
    with Leg("bridge.compiling.target_leg", "gpu") as leg:
        yield leg


@pytest.fixture(scope="module")
def compiler(gpu: Leg) -> Iterator[Compiler]:
    started = Compiler("gpu")
    yield started
    started.close()


def request(engine: str, work: Workload = WORK) -> dict[str, Any]:
    return {
        "step": StepRequest(MODEL, work).to_json(),
        "policy": POLICY.to_toml(),
        "source": POLICY.source,
        "target": "h100:8",
        "engine": engine,
        "recommended": False,
    }


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.mark.slow
def test_a_step_with_a_model_axis_holds_what_the_plan_says(gpu: Leg, tmp_path: Path) -> None:
    sizes = (
        "vocab_size = 257\nd_model = 32\nn_layers = 2\nn_heads = 4\nn_kv_heads = 2\nhead_dim = 8\nd_ff = 48\n"
    )
    (tmp_path / "sizes.toml").write_text(f"[model]\n{sizes}")
    model, policy = f"decoder:{tmp_path / 'sizes.toml'}", load_policy("fsdp_tp")
    answer = gpu.ask(
        {**request("shard_map"), "step": StepRequest(model, WORK).to_json(), "policy": policy.to_toml()}
    )
    planned = make_plan(resolve_models(model, ["jax"])["jax"], policy, 8, "jax", WORK)
    assert planned.mesh.all_axes == {"dp": 4, "tp": 2}
    held, rest = answer["held"], planned.at_rest
    assert (held["weights"], held["moments"]) == (rest.main_weights.allocated, rest.moments.allocated + 4)
    # The rows of a data rank are whole on both places of the axis.
    assert held["batch"] == WORK.batch * (WORK.length + 1) * 4
    # XLA joins gathers, and has some of its own over the axis.
    gathered = sum(call["bytes"] for call in answer["collectives"] if call["kind"] == "all_gather")
    assert gathered >= planned.traffic.nbytes("all_gather", "dp") > 0
    whole = replace(policy, mesh={"dp": 8}, parallel=())
    alone = make_plan(resolve_models(model, ["jax"])["jax"], whole, 8, "jax", WORK)
    assert gathered < alone.traffic.nbytes("all_gather", "dp")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shard_map", pytest.param("pjit", marks=pytest.mark.slow)])
def test_the_gradients_are_the_program_that_is_compiled_directly(
    gpu: Leg, compiler: Compiler, engine: str
) -> None:
    answer = gpu.ask(request(engine))
    direct = compiler.compile(Setting("h100:8", engine, "quick"))
    assert answer["memory"]["gradients"]["temporary"] == direct.temporary
    collectives = [dict(call) for call in answer["collectives"] if call.pop("program") == "gradients"]
    assert [(call["kind"], call["times"], call["bytes"], call["overlaps"]) for call in collectives] == [
        (call.kind, call.times, call.bytes, call.overlaps) for call in direct.collectives
    ]
    assert direct.collectives
    for path in answer["programs"].values():
        assert "ENTRY" in Path(path).read_text()


@pytest.mark.slow
def test_weights_and_moments_are_the_plans(gpu: Leg) -> None:
    held = gpu.ask(request("shard_map"))["held"]
    plan = make_plan(resolve_models(MODEL, ["jax"])["jax"], POLICY, 8, "jax", WORK)
    counter = 4
    assert held["weights"] == plan.at_rest.main_weights.allocated
    assert held["moments"] == plan.at_rest.moments.allocated + counter
    assert held["batch"] == 2 * 129 * 4


def test_a_peak_counts_what_lives_beside_a_program_and_the_update_gets_its_state_donated(gpu: Leg) -> None:
    answer = gpu.ask(request("shard_map"))
    held, memory = answer["held"], answer["memory"]
    gradients, update = memory["gradients"], memory["update"]
    state = held["weights"] + held["moments"]
    assert gradients["beside"] == held["moments"]
    assert update["beside"] == held["batch"]
    assert update["aliased"] == state
    # A few bytes are the loss and the compiler's tables of pointers.
    expected = state + held["gradients"] + held["batch"]
    for program in (gradients, update):
        assert program["peak"] == pytest.approx(expected + program["temporary"], abs=256)


@pytest.mark.slow
def test_a_second_run_answers_from_the_cache_and_a_broken_entry_is_compiled_anew(gpu: Leg) -> None:
    first = gpu.ask(request("shard_map"))
    second = gpu.ask(request("shard_map"))
    assert second == {**first, "cached": True}
    other = gpu.ask(request("shard_map", work=Workload(1, 128)))
    assert (other["cached"], other["programs"] == first["programs"]) == (False, False)
    entry = Path(first["programs"]["update"].replace(".update.hlo", ".json"))
    entry.write_text(entry.read_text()[:-20])
    anew = gpu.ask(request("shard_map"))
    assert {**anew, "seconds": 0} == {**first, "cached": False, "seconds": 0}


def test_an_entry_that_is_not_whole_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = key_of(["program", "target"])
    assert key != key_of(["programtarget"])
    assert load(key) is None
    answer = save(key, {"temporary": 7}, {"update": "ENTRY"})
    assert load(key) == answer
    entry = cache_folder() / f"{key}.json"
    whole = entry.read_text()
    for broken in (whole[:-20], whole.replace('"temporary": ', '"temporary": 1'), "[]", "{}", "null"):
        entry.write_text(broken)
        assert load(key) is None
    entry.write_text(whole)
    Path(answer["programs"]["update"]).unlink()
    assert load(key) is None


@pytest.mark.slow
def test_a_users_own_model_with_its_loss_and_batch(
    cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_not("gpu"):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    Path("target_net.py").write_text(NET)
    Path("batch.toml").write_text(SHAPES)
    arguments = ("--target", "h100:8", "--model", "target_net:Net", "--batch-shapes", "batch.toml")
    result = call("fsdp", *arguments, "--loss", "target_net:loss", "--engine", "both", "--json")
    assert result.exit_code == 0, result.stderr
    assert "compiling 2 steps of target_net:Net" in result.stderr
    assert "9 layers of layers are compiled one by one" in result.stderr
    document = json.loads(result.stdout)
    rows = document["targets"]["rows"]
    assert [(row["policy"], row["engine"], row["fits"]) for row in rows] == [
        ("fsdp.toml", engine, True) for engine in ("shard_map", "pjit")
    ]
    for row in rows:
        assert row["held"]["batch"] == 3 * (24 + 24 + 1) * 4
        assert row["time"]["total"] > 0
        assert row["time"]["rate"] is None
    priced = call(
        "fsdp",
        *arguments,
        "--loss",
        "target_net:loss",
        "--tokens",
        24,
        "--price",
        2,
        "--engine",
        "both",
        "--json",
    )
    for row in json.loads(priced.stdout)["targets"]["rows"]:
        assert row["cached"]
        rate = 8 * 24 / row["time"]["total"]
        assert row["time"]["rate"]["tokens_per_second"] == pytest.approx(rate)
        assert row["time"]["rate"]["dollars"] == pytest.approx(8 * 2 / 3600 / rate * 1e6)
    without = call("fsdp", *arguments, "--loss", "target_net:loss", "--price", 2)
    assert without.exit_code == 2
    assert "--price: expected --tokens N, per device and microbatch, with --price" in without.stderr
    rest = document["plans"][0]["at_rest"]
    assert rest["main_weights"] <= rows[0]["held"]["weights"] <= rest["main_weights"] + rest["padding"]
    refused = call("fsdp", *arguments, "--loss", "target_net:mean_of_masked")
    assert refused.exit_code == 1
    assert "failed: ValueError: loss" in refused.stdout
    assert "nothing fits" in refused.stdout


GPT = """
import jax, jax.numpy as jnp
from flax import nnx

class Block(nnx.Module):
    def __init__(self, d, rngs):
        self.ln = nnx.LayerNorm(d, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(4, d, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(d, 4 * d, rngs=rngs), nnx.Linear(4 * d, d, rngs=rngs)
    def __call__(self, x, mask):
        x = x + self.attn(self.ln(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))

class GPT(nnx.Module):
    def __init__(self, rngs):
        self.wte = nnx.Embed(512, 64, rngs=rngs)
        self.blocks = nnx.List([Block(64, rngs) for _ in range(2)])
    def __call__(self, tokens):
        x, mask = self.wte(tokens), nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.wte.attend(x)

def loss(model, batch):
    logp = jax.nn.log_softmax(model(batch["tokens"][:, :-1]).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, batch["tokens"][:, 1:, None], -1))
"""
VIT = """
import flax.linen as nn, jax, jax.numpy as jnp, jax_impl

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
        return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(x)))

class ViT(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(64, (8, 8), (8, 8))(images)
        x = x.reshape(x.shape[0], -1, 64)
        for i in range(2):
            x = Block(name=f"blocks_{i}")(x)
        return nn.Dense(10)(x.mean(1))

net = ViT()

def params(key):
    return net.init(key, jnp.zeros((1, 32, 32, 3)))["params"]

def loss(model, batch):
    logits = jax_impl.apply_linen(net, {"params": model}, batch["images"])
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][:, None], -1))
"""
BATCHES = {
    "gpt": 'tokens = { shape = [2, 129], dtype = "int32" }',
    "vit": 'images = { shape = [4, 32, 32, 3] }\nlabels = { shape = [4], dtype = "int32" }',
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "factory"), [("gpt", GPT, "GPT"), ("vit", VIT, "params")])
def test_models_as_users_write_them_with_layers_of_another_name(
    name: str, text: str, factory: str, cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := why_not("gpu"):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    Path(f"users_{name}.py").write_text(text)
    Path("batch.toml").write_text(BATCHES[name])
    arguments = (
        "--model",
        f"users_{name}:{factory}",
        "--loss",
        f"users_{name}:loss",
        "--batch-shapes",
        "batch.toml",
    )
    units = "blocks.*" if name == "gpt" else "blocks_*"
    result = call(
        "fsdp_bf16", "zero1", *arguments, "--units", units, "--target", "h100:8", "--json", "--html", "p.html"
    )
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["targets"]["rows"]
    assert [row["fits"] for row in rows] == [True, True]
    # Two blocks and the root: each gathered in forward and, sharded, once more in backward.
    gathers = [
        sum(call["times"] for call in row["collectives"] if call["kind"] == "all_gather") for row in rows
    ]
    assert gathers == [6, 3]
    assert Path("p.html").read_text().count("<svg") == 3


@pytest.mark.slow
def test_a_step_for_tpus(cache: None) -> None:
    if reason := unavailable("tpu"):
        pytest.skip(reason)
    result = call("fsdp", "--model", MODEL, "--target", "v5e:2x2", "--batch", 2, "--length", 128, "--json")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["targets"]["rows"]
    assert row["device_memory"] == 16_000_000_000
    assert row["memory"]["update"]["aliased"] > 0
    assert any(call["kind"] == "all_gather" for call in row["collectives"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "decoder:quick", "--target", "h100"), "expected GPUs a100|h100|h200|b200:N"),
        (
            ("--model", "decoder:quick", "--target", "h100:8", "--devices", "4"),
            "those of the targets, 8, got 4",
        ),
        (("--model", "decoder:quick", "--target", "h100:8", "--runtime", "torch"), "since XLA compiles JAX"),
        (
            ("--model", "deepseek-v3", "--target", "h100:8"),
            "expected a model that jax_impl.models.CausalLM supports",
        ),
        (("--model", "some.module:Net", "--target", "h100:8"), "expected --loss package.module:function"),
        (("--model", "decoder:quick", "--loss", "a:b"), "expected --target NAME,..."),
        (
            ("--model", "decoder:quick", "--target", "h100:8", "--loss", "a:b"),
            "expected none for a language model of jax_impl",
        ),
    ],
)
def test_options_that_contradict_are_one_message(arguments: tuple[str, ...], message: str) -> None:
    result = call("fsdp", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 3", "x: expected shape and dtype as in tokens = "),
        ("x = { shape = [] }", "x: shape: expected a list of ints >= 1, rows first, got []"),
        ("x = { shape = [2, 0] }", "got [2, 0]"),
        ('x = { shape = [2], dtype = "int33" }', "x: dtype: expected one of "),
        (
            "x = { shape = [2] }\ny = { shape = [3] }",
            "expected one or more arrays with the same first dimension",
        ),
        ("", "expected one or more arrays"),
        ("x = ", "batch.toml: expected a TOML file, got an error at: "),
    ],
)
def test_batch_shapes_are_checked(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "batch.toml"
    path.write_text(text)
    with pytest.raises(PlanError) as raised:
        load_batch_shapes(path)
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.slow
def test_a_lock_taken_by_another_process_since_is_waited_for_again_and_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "locked.py").write_text(
        "import pathlib, sys\nfrom bridge.compiling.leg_process import serve\n"
        f"starts = pathlib.Path({str(tmp_path / 'starts')!r})\n"
        "starts.write_text(starts.read_text() + 'x' if starts.exists() else 'x')\n"
        "def answer(request):\n"
        "    if len(starts.read_text()) < 3:\n"
        "        raise RuntimeError('ABORTED: Internal error when accessing libtpu multi-process lockfile')\n"
        "    return {'held': {}, 'exhausted': 5}\n"
        "serve(answer)\n"
    )
    monkeypatch.setenv("PYTHONPATH", importing_from(tmp_path, Path(__file__).parents[2])["PYTHONPATH"])
    monkeypatch.setattr(target_plan, "LEG", "locked")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tpu_lock, "_PAUSE", 0.01)
    said: list[str] = []
    tasks = [Task(POLICY, target_named("v5e:2x2"), "pjit")]
    (row,) = target_plan.compile_tasks(
        StepRequest(MODEL, WORK), tasks, (None, 0.1), lambda task: None, said.append
    )
    assert (row.peak, row.fits) == (5, False)
    assert said == [
        f"waiting for another process that compiles for TPUs and holds {tmp_path / 'libtpu_lockfile'}"
    ]


def offloaded(target: str) -> dict[str, Any]:
    step = StepRequest(
        MODEL, WORK, optimizer=Optimizer(moments=("bfloat16", "float8_e4m3fn"), offload=Fraction(1, 2))
    )
    return {
        "step": step.to_json(),
        "policy": POLICY.to_toml(),
        "source": POLICY.source,
        "target": target,
        "engine": "shard_map",
        "recommended": False,
    }


def test_moments_in_the_memory_of_a_host_of_absent_gpus_are_refused() -> None:
    with pytest.raises(
        PlanError,
        match="target h100:8: --offload: expected a TPU, since JAX gives absent GPUs no host memory",
    ):
        target_leg.lowered_step(offloaded("h100:8"), target_named("h100:8"))


@pytest.mark.slow
def test_moments_in_the_memory_of_a_host_are_no_part_of_a_tpu_s() -> None:
    if reason := unavailable("tpu"):
        pytest.skip(reason)
    leg = Leg("bridge.compiling.target_leg", "tpu")
    try:
        answer = leg.ask(offloaded("v5e:2x2"))
    finally:
        leg.close()
    chosen = Optimizer(moments=("bfloat16", "float8_e4m3fn"), offload=Fraction(1, 2))
    model = resolve_models(MODEL, ["jax"])["jax"]
    rest = make_plan(model, POLICY, 4, "jax", WORK, optimizer=chosen).at_rest
    # A step count is on the device.
    assert (answer["host"], answer["held"]["moments"]) == (rest.host, rest.moments.allocated + 4)
    assert rest.host > 0
    assert (
        answer["memory"]["update"]["arguments"]
        < 1.1 * sum(answer["held"][part] for part in ("weights", "moments", "gradients")) + 2**16
    )
