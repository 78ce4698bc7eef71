"""`twinshard parity RUN.toml`, as a user calls it: exit status, output, report, and one sentence for every misuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from bridge.commands.main import app
from bridge.core.formats import create_checkpoint
from tests.support.parity import small_twins
from tests.support.parity.small_twins import BATCH, MAPPING

ROOT = Path(__file__).parents[3]
RUN = """
mapping = "small.toml"
steps = 2

[torch]
model = "my_models.twins:TorchMLP"

[jax]
model = "my_models.twins:JaxMLP"

[batch]
file = "batch.npz"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package of two models, a mapping and a batch."""
    package = tmp_path / "my_models"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(small_twins.__file__, package / "twins.py")
    (tmp_path / "small.toml").write_text(MAPPING)
    np.savez(tmp_path / "batch.npz", BATCH)
    # Each test has its own copy of the package.
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_models"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def parity(folder: Path, text: str = RUN, *options: object) -> Result:
    (folder / "run.toml").write_text(text)
    arguments = ["parity", folder / "run.toml", "--out", folder / "report", *options]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def with_table(text: str, table: str, lines: str) -> str:
    """``text`` with ``lines`` at the start of a table, or before all tables for ``""``."""
    if not table:
        return f"{lines}\n{text}"
    assert text.count(f"[{table}]\n") == 1
    return text.replace(f"[{table}]\n", f"[{table}]\n{lines}\n")


def document(folder: Path) -> dict[str, Any]:
    """The report, which has no numbers that JSON lacks."""

    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is no JSON")

    text = (folder / "report" / "report.json").read_text(encoding="utf-8")
    report: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return report


@pytest.mark.parametrize("table", [False, True])
def test_two_models_that_are_the_same(folder: Path, table: bool) -> None:
    done = parity(folder, AS_TABLE if table else RUN)
    assert done.exit_code == 0, done.output
    assert "The two models are the same: 6 weights, 4 forward, 1 loss" in done.stdout
    report = document(folder)
    assert report["same"] is True
    assert report["first_divergence"] is None
    assert {row["stage"] for row in report["rows"]} == {
        *("weights", "forward", "loss", "backward", "gradients", "update", "steps")
    }
    assert (report["torch_only"], report["jax_only"]) == (["act", "drop"], ["act"])
    assert "torch modules without a partner: act, drop" in done.stdout
    assert (folder / "report" / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert (folder / "report" / "parity.png").read_bytes().startswith(b"\x89PNG")


def test_a_fault_is_status_1_and_named(folder: Path) -> None:
    done = parity(folder, with_table(RUN, "jax", "arguments = {eps = 1e-3}"))
    assert done.exit_code == 1, done.output
    assert "The models first diverge in norm (LayerNorm), in forward" in done.stdout
    assert "epsilon 1e-05" in done.stdout
    assert "epsilon 0.001" in done.stdout
    report = document(folder)
    assert report["same"] is False
    assert report["first_divergence"]["name"] == "norm"
    assert [row["name"] for row in report["rows"] if row["verdict"] == "introduced"] == ["norm"]


def test_json_is_one_document(folder: Path) -> None:
    done = parity(folder, RUN, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == document(folder)


@pytest.mark.slow
def test_the_installed_command(folder: Path) -> None:
    (folder / "run.toml").write_text(with_table(RUN, "jax", "arguments = {exact = false}"))
    command = [str(Path(sys.executable).parent / "twinshard"), "parity", "run.toml", "--out", "report"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    assert "torch: gelu (exact); JAX: gelu (tanh)" in done.stdout
    assert done.stderr.splitlines()[0] == "parity: weights"
    assert sorted(path.name for path in (folder / "report").iterdir()) == [
        "parity.png",
        "report.html",
        "report.json",
    ]


def save(folder: Path, convention: str, seed: int) -> str:
    """Weights of a seed as a checkpoint, by torch's or JAX's names; its name."""
    arrays = small_twins.values(seed) if convention == "torch" else small_twins.jax_values(seed)
    if convention == "torch":
        save_file(arrays, folder / "weights.safetensors")
        return "weights.safetensors"
    if convention == "jax":
        save_file({f"params/{name}": array for name, array in arrays.items()}, folder / "weights.safetensors")
        return "weights.safetensors"
    with create_checkpoint(folder / "tree", "orbax") as writer:
        for name, array in arrays.items():
            made = writer.add_tensor(("params", *name.split("/")), array.shape, array.dtype)
            for box in writer.chunks(made.name):
                writer.write(made.name, box, np.ascontiguousarray(array[box.slices()]))
    return "tree"


@pytest.mark.fast_cases("torch-torch")
@pytest.mark.parametrize("convention", ["torch", "jax", "orbax"])
@pytest.mark.parametrize("side", ["torch", "jax"])
def test_a_checkpoint_of_either_convention_goes_into_either_model(
    folder: Path, convention: str, side: str
) -> None:
    name = save(folder, convention, seed=7)
    other = "jax" if side == "torch" else "torch"
    text = with_table(RUN, side, f'checkpoint = "{name}"')
    assert parity(folder, text).exit_code == 1
    assert document(folder)["first_divergence"]["stage"] == "weights"
    done = parity(folder, with_table(text, other, "arguments = {seed = 7}"))
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_weights_are_taken_from_the_side_that_is_named(folder: Path) -> None:
    text = with_table(RUN, "jax", "arguments = {seed = 1}")
    own = parity(folder, text)
    assert own.exit_code == 1
    assert "The weights differ: down.bias" in own.stdout
    losses = {}
    for chosen in ("torch", "jax"):
        done = parity(folder, with_table(text, "", f'weights = "{chosen}"'))
        assert done.exit_code == 0, done.output
        losses[chosen] = document(folder)["losses"][0]
    assert losses["torch"] != losses["jax"]


@pytest.mark.slow
def test_a_larger_scale_and_another_dtype_are_the_same_models(folder: Path) -> None:
    for line in ("scale = 3", 'dtype = "bfloat16"', 'dtype = "float16"', "steps = 0"):
        text = with_table(RUN.replace("steps = 2\n", ""), "", line)
        done = parity(folder, text)
        assert done.exit_code == 0, (line, done.output)
    assert not [row for row in document(folder)["rows"] if row["stage"] in ("update", "steps")]


@pytest.mark.slow
def test_losses_of_ones_own(folder: Path) -> None:
    losses = '\n[loss]\ntorch = "my_models.twins:torch_loss"\njax = "my_models.twins:{}"\n'
    done = parity(folder, RUN + losses.format("jax_loss"))
    assert done.exit_code == 0, done.output
    done = parity(folder, RUN + losses.format("half_jax_loss"))
    assert done.exit_code == 1
    assert "outputs are the same, the losses differ" in done.stdout


def test_the_self_test_says_what_this_batch_shows(folder: Path) -> None:
    done = parity(folder, with_table(RUN, "", "self_test = true"))
    assert done.exit_code == 0, done.output
    assert "self-test: this batch shows" in done.stdout
    report = document(folder)
    faults = {(fault["module"], fault["fault"]) for fault in report["revealed"]}
    assert {("norm", "eps ten times as large"), ("up", "bias left out")} <= faults
    assert all(fault["shown"] for fault in report["revealed"] if fault["fault"] == "bias left out")


def test_modules_without_parameters_are_paired_by_the_caller(folder: Path) -> None:
    text = with_table(RUN, "jax", "arguments = {exact = false}") + '\n[[pair]]\ntorch = "act"\njax = "act"\n'
    done = parity(folder, text)
    assert done.exit_code == 1
    assert "The models first diverge in act (Act), in forward" in done.stdout


def replaced(old: str, new: str) -> str:
    assert RUN.count(old) == 1
    return RUN.replace(old, new)


WITHOUT_MAPPING = replaced('mapping = "small.toml"', "")
AS_TABLE = f"{WITHOUT_MAPPING}[mapping]{MAPPING.replace('[[rule]]', '[[mapping.rule]]')}"

MISUSES = {
    "a key that is none": (with_table(RUN, "", "step = 3"), "got step"),
    "no jax": (replaced('[jax]\nmodel = "my_models.twins:JaxMLP"\n', ""), "expected jax, got none"),
    "no batch": (replaced('[batch]\nfile = "batch.npz"\n', ""), "expected batch, got none"),
    "no model": (replaced('model = "my_models.twins:JaxMLP"\n', ""), "expected a table [jax] with model ="),
    "no TOML": ("mapping = ", "expected a TOML file"),
    "a key of a side that is none": (with_table(RUN, "jax", "seed = 1"), "in [jax], got seed"),
    "a module that is none": (replaced("my_models.twins:JaxMLP", "my_modells:JaxMLP"), "No module named"),
    "a function that is none": (
        replaced(":JaxMLP", ":MLP"),
        "[jax] model: cannot import my_models.twins:MLP",
    ),
    "no colon": (replaced(".twins:JaxMLP", ".twins.JaxMLP"), 'expected "package.module:function"'),
    "no function": (replaced(":JaxMLP", ":WIDTH"), "expected a function, got int"),
    "a function that raises": (replaced(":JaxMLP", ":broken"), "RuntimeError: no weights today"),
    "arguments that do not fit": (with_table(RUN, "jax", "arguments = {depth = 3}"), "depth"),
    "no model comes back": (replaced(":JaxMLP", ":no_model"), "expected an nnx module"),
    "no torch model comes back": (replaced(":TorchMLP", ":no_model"), "expected a torch.nn.Module"),
    "both sides exchanged": (
        RUN.replace("TorchMLP", "?").replace("JaxMLP", "TorchMLP").replace("?", "JaxMLP"),
        "expected a torch.nn.Module",
    ),
    "no mapping": (replaced('"small.toml"', '"smal.toml"'), "smal.toml"),
    "a mapping that is a number": (replaced('"small.toml"', "3"), "expected a text or a table for mapping"),
    "a mapping without rules": (f"{WITHOUT_MAPPING}[mapping]\nname = 'm'", "rule"),
    "a mapping that does not fit": (replaced('"small.toml"', '"llama"'), "the torch model"),
    "no batch file": (replaced("batch.npz", "batches.npz"), "[batch] file: expected arrays in"),
    "a batch that the model refuses": (
        replaced('file = "batch.npz"', "tokens = [2, 3]\nvocabulary = 5"),
        "refused the batch",
    ),
    "a batch of neither kind": (replaced('file = "batch.npz"', "tokens = [2, 3]"), "vocabulary = size"),
    "a batch of negative size": (
        replaced('file = "batch.npz"', "tokens = [2, -3]\nvocabulary = 5"),
        "[batch]",
    ),
    "a batch without rows": (replaced('file = "batch.npz"', "tokens = []\nvocabulary = 5"), "[batch]"),
    "an empty vocabulary": (replaced('file = "batch.npz"', "tokens = [2, 3]\nvocabulary = 0"), "[batch]"),
    "a seed that is none": (
        replaced('file = "batch.npz"', 'tokens = [2, 3]\nvocabulary = 5\nseed = "a"'),
        "[batch]",
    ),
    "a loss that is none": (with_table(RUN, "", 'loss = "mse"'), '"next_token", "probe" or a table [loss]'),
    "a loss of one side": (RUN + '\n[loss]\ntorch = "a:b"\n', "a table [loss] with torch and jax"),
    "a dtype that is none": (with_table(RUN, "", 'dtype = "float8"'), "dtype: expected one of float32"),
    "steps below zero": (replaced("steps = 2", "steps = -1"), "steps: expected 0 or more"),
    "steps that are text": (replaced("steps = 2", 'steps = "2"'), "expected a number for steps"),
    "weights of nobody": (with_table(RUN, "", 'weights = "flax"'), "weights: expected own, torch or jax"),
    "a scale of zero": (with_table(RUN, "", "scale = 0"), "scale: expected"),
    "a scale below zero": (with_table(RUN, "", "scale = -1.5"), "scale: expected"),
    "a scale that is no number": (with_table(RUN, "", "scale = nan"), "scale: expected"),
    "axes that are no sizes": (RUN + '\n[axes]\nd = "wide"\n', "axes"),
    "a pair that names nothing": (
        RUN + '\n[[pair]]\ntorch = "act"\njax = "activation"\n',
        "[[pair]]: expected a jax module that was called, got 'activation'",
    ),
    "a pair of one side": (
        RUN + '\n[[pair]]\ntorch = "act"\n',
        "expected [[pair]] tables with torch and jax",
    ),
    "no checkpoint": (with_table(RUN, "jax", 'checkpoint = "step_40"'), "step_40"),
}


@pytest.mark.parametrize("what", MISUSES)
def test_a_misuse_is_status_2_and_one_sentence(folder: Path, what: str) -> None:
    text, words = MISUSES[what]
    done = parity(folder, text)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if not line.startswith("parity: ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: ")
    assert words in errors[0]
    assert not (folder / "report").exists()


def test_a_checkpoint_of_another_model(folder: Path) -> None:
    save_file({"other": np.zeros(3, np.float32)}, folder / "weights.safetensors")
    done = parity(folder, with_table(RUN, "torch", 'checkpoint = "weights.safetensors"'))
    assert done.exit_code == 2
    assert "weights.safetensors" in done.stderr


def test_a_checkpoint_of_other_shapes(folder: Path) -> None:
    arrays = small_twins.values(0) | {"up.bias": np.zeros(3, np.float32)}
    save_file(arrays, folder / "weights.safetensors")
    done = parity(folder, with_table(RUN, "torch", 'checkpoint = "weights.safetensors"'))
    assert done.exit_code == 2
    assert "up.bias" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no.toml"], "no.toml: expected a TOML file"),
        (["a", "b"], "expected one run file (*.toml) or two traces"),
        (["run.toml", "run.toml"], "expected one run file (*.toml) or two traces"),
        (["run.toml", "--mapping", "llama"], "expected mapping and axes in the file"),
    ],
)
def test_arguments_that_are_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    (folder / "run.toml").write_text(RUN)
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["parity", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr


HEADED = """
import torch
from flax import nnx
import jax.numpy as jnp
from my_models.twins import JaxMLP, TorchMLP

class Headed(TorchMLP):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))

class Wide(JaxMLP):
    def __call__(self, x):
        y = super().__call__(x)
        return jnp.concatenate([y, y[:1]])
"""


@pytest.mark.fast_cases(
    'twins:TorchMLP-others:Headed-[[rule]]\\ntorch = "scale"\\njax = "scale"\\n-1 torch parameters without a partner'
)
@pytest.mark.parametrize(
    ("old", "new", "rule", "said"),
    [
        (
            "twins:TorchMLP",
            "others:Headed",
            '[[rule]]\ntorch = "scale"\njax = "scale"\n',
            "1 torch parameters without a partner",
        ),
        ("twins:JaxMLP", "others:Wide", "", "the outputs of (model)"),
    ],
)
def test_what_was_not_compared_is_status_1_if_strict(
    folder: Path, old: str, new: str, rule: str, said: str
) -> None:
    (folder / "my_models" / "others.py").write_text(HEADED)
    (folder / "small.toml").write_text(MAPPING + rule)
    losses = '\n[loss]\ntorch = "my_models.twins:first_rows_torch"\njax = "my_models.twins:first_rows_jax"\n'
    text = replaced(old, new) + losses
    done = parity(folder, text)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == f"not compared (1): {said}"
    strict = parity(folder, text, "--strict")
    assert strict.exit_code == 1
    assert f"parity: --strict: not compared (1): {said}" in strict.stderr
    assert document(folder)["not_compared"] == [said]


def test_strict_is_status_0_where_all_was_compared(folder: Path) -> None:
    done = parity(folder, RUN, "--strict")
    assert done.exit_code == 0, done.output
    assert "not compared" not in done.stdout
