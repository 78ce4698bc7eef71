"""Both sides captured at two times, and compared where neither framework is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from bridge.commands.main import app
from bridge.core.mapping import parse_mapping
from bridge.parity import capture_jax, capture_torch, compare_traces, parity
from bridge.parity.recorded.trace import TraceError, TraceSide
from tests.support.parity.bugs import BUGS
from tests.support.parity.pairs import build
from tests.support.parity.small_twins import BATCH, MAPPING, JaxMLP, TorchMLP

ROOT = Path(__file__).parents[3]
TABLE = parse_mapping(MAPPING, "small")
WITHOUT = ("torch", "torch_impl", "jax", "jaxlib", "flax", "optax", "orbax", "jax_impl")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``torch``, ``jax`` and the JAX model with another epsilon, ``eps``."""
    folder = tmp_path_factory.mktemp("traces")
    capture_torch(TorchMLP().eval(), BATCH, folder / "torch", steps=2)
    capture_jax(JaxMLP(), BATCH, folder / "jax", steps=2)
    capture_jax(JaxMLP(eps=1e-3), BATCH, folder / "eps", steps=2)
    (folder / "small.toml").write_text(MAPPING)
    return folder


def compared_elsewhere(first: Path, second: Path, mapping: Path) -> dict[str, Any]:
    """``compare_traces`` in a process that can import no framework."""
    script = f"""
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {WITHOUT!r}:
            raise ImportError(name + " is not here")

sys.meta_path.insert(0, Refuse())
from bridge.parity import compare_traces
from bridge.core.text import plain_json

report = compare_traces({str(first)!r}, {str(second)!r}, mapping={str(mapping)!r})
assert not any(name in sys.modules for name in {WITHOUT!r})
print(json.dumps(plain_json(report.as_dict())))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_reference_is_for_sharded_models_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="reference: expected none for a model that is not sharded"):
        capture_torch(TorchMLP(), BATCH, tmp_path / "trace", reference=TorchMLP())
    assert not (tmp_path / "trace").exists()


@pytest.mark.slow
def test_traces_are_compared_without_either_framework(traces: Path) -> None:
    report = compared_elsewhere(traces / "torch", traces / "jax", traces / "small.toml")
    assert report["same"] is True
    live = parity(TorchMLP().eval(), JaxMLP(), BATCH, mapping=TABLE, steps=2)
    assert live.same
    assert report["losses"] == list(live.losses)
    assert [(row["stage"], row["name"]) for row in report["rows"]] == [
        (row.stage, row.name) for row in live.rows
    ]


def test_a_fault_is_in_the_module_that_a_live_comparison_names(traces: Path) -> None:
    report = compared_elsewhere(traces / "eps", traces / "torch", traces / "small.toml")
    live = parity(TorchMLP().eval(), JaxMLP(eps=1e-3), BATCH, mapping=TABLE, steps=2)
    assert live.first_divergence is not None
    assert report["same"] is live.same is False
    assert report["first_divergence"]["name"] == live.first_divergence.name == "norm"
    verdicts = {row["name"]: row["verdict"] for row in report["rows"] if row["stage"] == "forward"}
    # The model around the norm has the same inputs, too, but a module inside of it differs.
    assert verdicts == {"": "inherited", "up": "same", "norm": "introduced", "down": "inherited"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit"])
def test_models_that_are_the_same_are_so_as_traces(tmp_path: Path, name: str) -> None:
    pair = build(name, 0)
    capture_torch(pair.torch_model, pair.batch, tmp_path / "torch", loss=pair.loss, steps=2)
    capture_jax(pair.jax_model, pair.batch, tmp_path / "jax", loss=pair.loss, steps=2)
    report = compare_traces(tmp_path / "torch", tmp_path / "jax", mapping=pair.mapping, axes=pair.axes)
    assert report.same, report.summary()


@pytest.mark.slow
def test_a_planted_bug_is_named_from_traces(tmp_path: Path) -> None:
    bug = next(
        bug for bug in BUGS if bug.pair == "llama" and bug.side == "jax" and bug.module.endswith("mlp")
    )
    pair = build("llama", 0)
    bug.apply(pair)
    capture_torch(pair.torch_model, pair.batch, tmp_path / "torch", loss=pair.loss, steps=0)
    capture_jax(pair.jax_model, pair.batch, tmp_path / "jax", loss=pair.loss, steps=0)
    report = compare_traces(tmp_path / "torch", tmp_path / "jax", mapping=pair.mapping, axes=pair.axes)
    assert report.first_divergence is not None
    assert report.first_divergence.name == bug.module


@pytest.mark.fast_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(tmp_path: Path, dtype: str) -> None:
    capture_torch(TorchMLP().eval(), BATCH, tmp_path / "torch", dtype=dtype, steps=1)
    capture_jax(JaxMLP(), BATCH, tmp_path / "jax", dtype=dtype, steps=1)
    capture_jax(JaxMLP(exact=False, eps=0.1), BATCH, tmp_path / "other", dtype=dtype, steps=1)
    same = compare_traces(tmp_path / "torch", tmp_path / "jax", mapping=TABLE)
    assert same.same, same.summary()
    assert same.dtype == dtype
    low = TraceSide.read(tmp_path / "jax").record(None, dtype)
    assert low.calls[0].outputs[""].dtype == (ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    assert not compare_traces(tmp_path / "torch", tmp_path / "other", mapping=TABLE).same


def torch_trace(path: Path, **changes: Any) -> None:
    capture_torch(TorchMLP().eval(), changes.pop("batch", BATCH), path, **{"steps": 2, **changes})


CANNOT: dict[str, tuple[Callable[[Path], None], str]] = {
    "another batch": (lambda path: torch_trace(path, batch=BATCH + 1), "expected traces of one batch"),
    "fewer rows": (lambda path: torch_trace(path, batch=BATCH[:3]), "expected traces of one batch"),
    "another dtype": (
        lambda path: torch_trace(path, dtype="bfloat16"),
        "expected traces with the same compute dtype",
    ),
    "fewer steps": (lambda path: torch_trace(path, steps=1), "the same compute dtype and number of steps"),
    "two of JAX": (
        lambda path: capture_jax(JaxMLP(), BATCH, path, steps=2),
        "expected a trace of a torch model and one of a JAX model, got two of jax: compare checkpoints with",
    ),
}


@pytest.mark.parametrize("what", CANNOT)
def test_traces_that_do_not_belong_together(tmp_path: Path, traces: Path, what: str) -> None:
    make, words = CANNOT[what]
    make(tmp_path / "mine")
    with pytest.raises(TraceError, match=words) as error:
        compare_traces(tmp_path / "mine", traces / "jax", mapping=TABLE)
    assert str(tmp_path / "mine") in str(error.value)
    options = ["--mapping", traces / "small.toml", "--out", tmp_path / "out"]
    arguments = ["parity", tmp_path / "mine", traces / "jax", *options]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_batch_may_have_other_dtypes_and_names(tmp_path: Path, traces: Path) -> None:
    torch_trace(tmp_path / "torch", batch={"x": BATCH.astype(np.float64)})
    assert compare_traces(tmp_path / "torch", traces / "jax", mapping=TABLE).same


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a bit of the arrays": lambda trace: damage(trace / "model.safetensors", -5),
    "a bit of the header": lambda trace: damage(trace / "model.safetensors", 60),
    "an end that is missing": lambda trace: cut(trace / "model.safetensors"),
    "no arrays": lambda trace: (trace / "model.safetensors").unlink(),
    "no directory": lambda trace: None,
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_trace_is_refused_by_name(tmp_path: Path, traces: Path, what: str) -> None:
    mine = tmp_path / "mine"
    if what != "no directory":
        torch_trace(mine, steps=0)
        compare_traces(mine, _jax_without_steps(tmp_path), mapping=TABLE)
    DAMAGES[what](mine)
    with pytest.raises(TraceError, match=r"expected an? (unchanged )?trace") as error:
        compare_traces(mine, traces / "jax", mapping=TABLE)
    assert str(mine) in str(error.value)


def _jax_without_steps(folder: Path) -> Path:
    capture_jax(JaxMLP(), BATCH, folder / "jax", steps=0)
    return folder / "jax"


def test_a_checkpoint_is_no_trace(tmp_path: Path, traces: Path) -> None:
    save_file({"a": BATCH}, tmp_path / "a.safetensors")
    with pytest.raises(TraceError, match="expected a trace of format"):
        compare_traces(tmp_path / "a.safetensors", traces / "jax", mapping=TABLE)


def test_what_is_there_is_not_written_over(tmp_path: Path, traces: Path) -> None:
    before = (traces / "jax" / "trace.json").read_bytes()
    for path in (traces / "jax", tmp_path):
        with pytest.raises(TraceError, match="expected no file or directory, found one"):
            capture_jax(JaxMLP(), BATCH, path)
    assert (traces / "jax" / "trace.json").read_bytes() == before


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"dtype": "float64"}, "dtype: expected one of float32, bfloat16, float16, got 'float64'"),
        ({"dtype": "int8"}, "dtype: expected one of"),
        ({"steps": -1}, "steps: expected 0 or more, got -1"),
    ],
)
def test_choices_that_are_none_write_nothing(tmp_path: Path, choice: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        capture_torch(TorchMLP(), BATCH, tmp_path / "mine", **choice)
    assert not (tmp_path / "mine").exists()


def test_the_readable_part_is_json_with_statistics(traces: Path) -> None:
    table = json.loads((traces / "jax" / "trace.json").read_text(encoding="utf-8"))
    assert table["framework"] == "jax"
    numbers = table["statistics"]["batch:"]
    assert numbers["shape"] == list(BATCH.shape)
    assert numbers["rms"] == pytest.approx(float(np.sqrt(np.mean(np.square(BATCH, dtype=np.float64)))))


def test_the_command_compares_traces(tmp_path: Path, traces: Path) -> None:
    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["parity", *map(str, arguments), "--out", str(tmp_path / "out")])

    both = traces / "torch", traces / "jax"
    done = run(*both, "--mapping", traces / "small.toml")
    assert done.exit_code == 0, done.output
    done = run(traces / "eps", traces / "torch", "--mapping", traces / "small.toml")
    assert done.exit_code == 1
    assert "The models first diverge in norm" in done.stdout
    done = run(*both)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "expected --mapping" in done.stderr
