"""What the planner knows of models: shapes of published ones, ours, and any module by its Python path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bridge.planning import PlanError, Workload, parse_policy, resolve_models
from bridge.planning.answers.comparison import compare
from bridge.planning.models.activations import SegmentBytes
from bridge.planning.models.formulas import FormulaSegment
from bridge.planning.models.model import Model, Parameter
from bridge.planning.models.shipped_models import SHIPPED, shipped_model

# Of the published checkpoints, by their own counts; DeepSeek-V3's 671,026,419,200 less 58 x 256 correction biases.
PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
}


def test_shipped_models_have_the_published_numbers_of_parameters() -> None:
    assert {name: shipped_model(name).numel for name in SHIPPED} == PARAMETERS


def test_shapes_of_the_published_models() -> None:
    shapes = {p.path: p.shape for p in shipped_model("deepseek-v3").parameters}
    assert shapes["layers.2.mlp.w13.weight"] == (2 * 18432, 7168)
    assert shapes["layers.3.mlp.experts.w13"] == (256, 4096, 7168)
    assert shapes["layers.60.mlp.shared.w2.weight"] == (7168, 2048)
    assert shapes["layers.0.attention.wkv_b.weight"] == (32768, 512)
    shapes = {p.path: p.shape for p in shipped_model("mixtral-8x7b").parameters}
    assert shapes["layers.31.mlp.experts.w2"] == (8, 4096, 14336)
    assert shapes["layers.0.mlp.router.weight"] == (8, 4096)


def test_modules_are_those_with_a_forward() -> None:
    modules = shipped_model("llama3-8b").modules
    assert "layers.31.mlp" in modules
    assert "layers" not in modules
    assert "" in modules
    for models in (resolve_models("decoder:default"),):
        for runtime, model in models.items():
            assert {"", "embed", "layers.3", "layers.0.attention", "norm", "lm_head"} <= set(model.modules), (
                runtime
            )
            assert "layers" not in model.modules


def test_the_decoder_has_each_runtimes_shapes() -> None:
    models = resolve_models("decoder:default")
    assert models["torch"].numel == models["jax"].numel
    torch = {p.path: p.shape for p in models["torch"].parameters}
    jax = {p.path: p.shape for p in models["jax"].parameters}
    assert torch["layers.0.mlp.w13.weight"] == (1766, 331)
    assert jax["layers.0.mlp.gate.kernel"] == (331, 883)


def test_a_decoder_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        "[model]\nvocab_size = 300\nd_model = 8\nn_layers = 2\nn_heads = 2\nn_kv_heads = 1\nhead_dim = 4\nd_ff = 16\n"
        "tied = true\n"
    )
    for model in resolve_models(f"decoder:{path}").values():
        assert model.numel == 300 * 8 + 2 * (8 + 64 + 32 + 32 + 64 + 8 + 3 * 128) + 8


def lazy() -> object:
    """A model whose shapes nobody knows before its first call."""
    return torch.nn.LazyLinear(3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "llama4",
            "expected decoder:CONFIG, a path of a config.json, package.module:Factory or one of llama3",
        ),
        ("decoder:nothing.toml", "expected a TOML file or one of .*default"),
        ("no.such.module:Model", "can be imported"),
        ("os:sep", "expected a class or function, got str"),
        (f"{__name__}:lazy", "expected parameters of known shapes, got weight"),
        (
            "pathlib:Path",
            r"expected a torch.nn.Module, or a factory that takes rngs .* or key .*, got PosixPath",
        ),
    ],
)
def test_an_unknown_model_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        resolve_models(name)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("x = 1", r"expected a table \[model\], got None"),
        ("[model]\nlayers = 3", "layers"),
        ("[model", "bad.toml: expected a TOML file, got an error at: "),
    ],
)
def test_a_bad_decoder_file_is_one_clear_error(tmp_path: Path, table: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(table)
    with pytest.raises(PlanError, match=message):
        resolve_models(f"decoder:{path}")


MODULE = """
import torch
from flax import nnx

class Torch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self.second = torch.nn.Linear(10**9, 10**9, bias=False)  # nothing of it is allocated
        self.first.bias.requires_grad_(False)
        self.tied = self.first

class Jax(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, use_bias=False, rngs=rngs) for _ in range(2)])
        self.second = nnx.Linear(10**6, 10**6, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
"""


def test_any_module_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (runtime, model), *others = resolve_models("planned_module:Torch").items()
    assert (runtime, others) == ("torch", [])
    assert model.parameters == (
        Parameter("first.weight", (4, 3), kind="linear"),
        Parameter("first.bias", (4,), trainable=False, kind="bias"),
        Parameter("layers.0.weight", (4, 4), kind="linear"),
        Parameter("layers.1.weight", (4, 4), kind="linear"),
        Parameter("second.weight", (10**9, 10**9), kind="linear"),
    )
    assert model.modules == ("", "first", "layers.0", "layers.1", "second")
    (runtime, model), *others = resolve_models("planned_module:Jax").items()
    assert (runtime, others) == ("jax", [])
    assert [(p.path, p.shape) for p in model.parameters] == [
        ("first.bias", (4,)),
        ("first.kernel", (3, 4)),
        ("layers.0.kernel", (4, 4)),
        ("layers.1.kernel", (4, 4)),
        ("second.kernel", (10**6, 10**6)),
    ]
    assert {"first", "layers.0", "layers.1", "second"} <= set(model.modules)
    with pytest.raises(PlanError, match="expected a model of torch, got one of jax"):
        resolve_models("planned_module:Jax", ["torch"])


TREES = """
import jax
from flax import linen, nnx

def tree(key):
    large = jax.random.normal(key, (10**6, 10**6))  # nothing of it is allocated
    return {"embed": large, "layers": [{"w": large[:3, :4]}, {"w": large[:3, :4]}], "out": (large[:2, :1],)}

def stack(key):
    layers = {"mlp": {"up": jax.numpy.ones((12, 3, 4))}, "norm": jax.numpy.ones((12, 3))}
    return {"embed": jax.numpy.ones((5, 3)), "layers": layers}

def pairs(key):
    return {"layers": (jax.numpy.ones((3, 4, 5)), jax.numpy.ones((3, 5)))}

class Net(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(7)(linen.Dense(5)(x))

def net(key):
    return Net().init(key, jax.numpy.ones((1, 3)))["params"]

def wrong(key):
    return {"a": 3.0}

class Stacked(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs), in_axes=(nnx.StateAxes({...: 0}),))
        self.layers = make(rngs.split(3))
        self.last = nnx.Linear(4, 2, rngs=rngs)
"""


def test_pytrees_and_stacks_by_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planned_trees.py").write_text(TREES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = resolve_models("planned_trees:tree")["jax"]
    assert model.modules == ("", "layers.0", "layers.1", "out")
    assert [(p.path, p.shape) for p in model.parameters] == [
        ("embed", (10**6, 10**6)),
        ("layers.0.w", (3, 4)),
        ("layers.1.w", (3, 4)),
        ("out.0", (2, 1)),
    ]
    model = resolve_models("planned_trees:net")["jax"]
    assert model.modules == ("", "Dense_0", "Dense_1")
    model = resolve_models("planned_trees:stack", stacked=["layers"])["jax"]
    assert model.stacks == ("layers",)
    assert model.modules[:4] == ("", "layers.0", "layers.0.mlp", "layers.1")
    assert [(p.path, p.shape) for p in model.parameters[1:4]] == [
        ("layers.0.mlp.up", (3, 4)),
        ("layers.0.norm", (3,)),
        ("layers.1.mlp.up", (3, 4)),
    ]
    assert model.parameters[-1].path == "layers.11.norm"
    model = resolve_models("planned_trees:Stacked", stacked=["layers"])["jax"]
    assert {"last", "layers.0", "layers.2"} <= set(model.modules)
    assert Parameter("layers.2.kernel", (4, 4)) in model.parameters
    for name, stacked, message in (
        ("wrong", [], "parameter 'a': expected an array, got float"),
        ("stack", ["layer"], "expected paths of submodules, got 'layer'"),
        (
            "tree",
            ["layers"],
            "expected a module whose parameters have a leading axis over layers, got 'layers', a list",
        ),
    ):
        with pytest.raises(PlanError, match=message):
            resolve_models(f"planned_trees:{name}", stacked=stacked)
    model = resolve_models("planned_trees:pairs", stacked=["layers"])["jax"]
    assert model.modules == ("", "layers.0", "layers.1", "layers.2")
    assert Parameter("layers.2.1", (5,)) in model.parameters
    with pytest.raises(PlanError, match=r"expected a JAX model for the stacks .*, got a torch.nn.Module"):
        resolve_models("torch.nn:Identity", stacked=["layers"])
    with pytest.raises(PlanError, match="expected the stack 'layers' or none, got"):
        resolve_models("decoder:quick", stacked=["embed"])
    with pytest.raises(PlanError, match="expected a stack with layers, got 'blocks'"):
        resolve_models("llama3-8b", stacked=["blocks"])


def test_a_parameter_is_validated() -> None:
    with pytest.raises(PlanError, match="expected a shape of ints >= 0"):
        Parameter("w", (2, -1))
    with pytest.raises(PlanError, match=r"expected one of float32, .*, got 'float7'"):
        Parameter("w", (2,), "float7")
    with pytest.raises(PlanError, match="expected each parameter once, got 'w' twice"):
        Model.of("m", [Parameter("w", (2,)), Parameter("w", (3,))])


def test_activations_by_formula() -> None:
    segment = FormulaSegment("x", input=2, saved=10, saved_bytes=3, working=1, working_bytes=5)
    # 3 x 4 tokens of 2 bytes an element.
    expected = [12 * 23, 12 * 4, 12 * (4 + 23 + 7), 12 * (23 + 7), 12 * (4 + 4 + 23 + 7), 12 * (4 + 23 + 7)]
    assert segment.bytes_for(3, 4, "bfloat16") == SegmentBytes(*expected)


MODEL_WITH_TABLES = """
import jax.numpy as jnp
import torch
from flax import nnx


class Torch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("mask", torch.zeros(500, 500))

    def forward(self, x):
        return self.layer(x)


class Jax(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.mask = nnx.BatchStat(jnp.zeros((500, 500)))
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
"""


@pytest.mark.parametrize(
    ("name", "runtime", "nbytes"), [("Torch", "torch", 1_000_000), ("Jax", "jax", 1_000_000 + 2 * 16)]
)
def test_buffers_are_needed_in_any_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, runtime: str, nbytes: int
) -> None:
    (tmp_path / "with_tables.py").write_text(MODEL_WITH_TABLES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "with_tables", raising=False)
    models = resolve_models(f"with_tables:{name}")
    assert models[runtime].buffers == nbytes
    policy = parse_policy('[[unit]]\nmatch = ""\n', "x")
    compared = compare(models, [policy], [2], Workload(), 900_000)
    (plan,) = compared.plans
    assert compared.fits(plan) is False
    assert plan.warnings()[0].startswith("buffers: 1 MB more on each device, in any policy")
    assert plan.least == plan.at_rest.total + nbytes
