"""Command lines that people really type: each ends in one sentence that says what to do."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge.commands.main import main
from bridge.commands.parents import missing_parent
from bridge.core.formats.stores.store import hub_hint
from tests.support.processes import importing_from

ROOT = Path(__file__).parents[2]
PROGRAM = "from bridge.commands.main import main; main()"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, as from a shell without a terminal, in a folder with a few checkpoints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bridge.commands.main.stop_on_signals", lambda: None)
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    arrays: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": np.zeros((50, 16), np.float32),
        "model.norm.weight": np.zeros(16, np.float32),
        "lm_head.weight": np.zeros((50, 16), np.float32),
    }
    for i in range(2):
        sizes = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}
        at = f"model.layers.{i}."
        arrays |= {f"{at}self_attn.{n}.weight": np.zeros(shape, np.float32) for n, shape in sizes.items()}
        arrays |= {f"{at}mlp.{n}_proj.weight": np.zeros((24, 16), np.float32) for n in ("gate", "up")}
        arrays[f"{at}mlp.down_proj.weight"] = np.zeros((16, 24), np.float32)
        arrays |= {
            f"{at}{n}.weight": np.zeros(16, np.float32)
            for n in ("input_layernorm", "post_attention_layernorm")
        }
    save_file(arrays, "hf.safetensors")
    (tmp_path / "-dash").mkdir()
    save_file({"w": np.zeros(2)}, "-dash/model.safetensors")
    (tmp_path / "ünï cöde").mkdir()
    save_file({"wäight": np.zeros(2)}, "ünï cöde/model.safetensors")
    (tmp_path / "empty").mkdir()

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["twinshard", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capfd.readouterr()
        assert isinstance(end.value.code, int)
        assert "Traceback" not in shown.err
        return end.value.code, shown.out, shown.err

    return call


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("convert hf.safetensors |", "expected a value after 'convert hf.safetensors', got an empty one"),
        ("inspect |", "is a variable in your script not set?"),
        ("convert hf.safetensors x --mapping |", "got an empty one"),
        ("convert hf.safetensors x --mapping lama", "got 'lama'; did you mean llama?"),
        ("convert hf.safetensors x --mapping llama --into Flax", "got 'Flax'; did you mean flax?"),
        ("convert hf.safetensors x --mapping llama --from HF --into flax", "got 'HF'; did you mean hf?"),
        (
            "convert hf.safetensors x --mapping llama --into flax",
            "size of axis d (by the shapes one of 1, 2, 4, 8)",
        ),
        (
            "convert hf.safetensors x --mapping llama --into flax --axis d=0",
            "the sizes of axes r, h do not follow",
        ),
        ("convert hf.safetensors x --cast *=fp8", "did you mean float8_e4m3fn or float8_e5m2?"),
        ("convert hf.safetensors nope/deep/x", "nope does not exist: expected the directory for"),
        ("convert hf.safetensors nope/x", "let the command create it (--parents)"),
        ("convert hf:org/name x", "write hf://org/name"),
        ("convert https://huggingface.co/org/name x", "write hf://org/name"),
        ("convert hf.safetensors s3:/bucket/x", "(--parents); for a URL, write s3://bucket/x"),
        ("inspect gs:bucket/x", "expected a checkpoint there; for a URL, write gs://bucket/x"),
        ("verify GS:/bucket/x", "for a URL, write gs://bucket/x"),
        ("convert file:/nope/x y", "for a URL, write file:///nope/x"),
        ("inspect zip://x::nope.zip", "cannot open zip://x::nope.zip: FileNotFoundError: "),
        ("convert hf.safetensors https://example.org/x", "https://example.org/x is read-only"),
        (
            "convert hf.safetensors hf://org/name",
            "convert to a directory, and upload the directory (hf upload)",
        ),
        ("convert hf.safetensors HF://org/name", "is read-only"),
        ("convert hf.safetensors x --mapping s3://bucket/map.toml", "got a URL: copy the file here first"),
        ("map hf.safetensors ./-dash --out s3://bucket/x.toml", "--out takes paths of this machine only"),
        ("convert hf.safetensors memory://b/x --engine processes", "expected a directory that all parts see"),
        ("convert hf.safetensors x.safetensors --engine processes", "is one file, which has one writer"),
        ("convert -dash x", "No such option"),
        ("convert -dash x", "To name the file or directory -dash, write ./-dash"),
        ("map hf.safetensors ./-dash --out nope/x.toml", "nope does not exist: expected the directory"),
        ("inspect hf.safetensors --depth -1", "Invalid value for '--depth'"),
        ("inspect hf.safetensors --depth 2 --list", "expected no --list with --depth"),
        pytest.param(
            "plan fsdp --model org/name", "hf download org/name config.json", marks=pytest.mark.slow
        ),
        pytest.param("plan fsdp --model llama3-80b", "did you mean llama3-8b or", marks=pytest.mark.slow),
        pytest.param(
            "plan fsdp --model llama3-8b --optimizer adam", "did you mean adamw?", marks=pytest.mark.slow
        ),
        pytest.param("plan fsdp --model llama3-8b --moments bf17", "got 'bf17'", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_line_says_what_to_do(run: Run, line: str, message: str) -> None:
    status, out, err = run(*("" if word == "|" else word for word in line.split(" ")))
    assert (status, out) == (2, "")
    assert message in " ".join(err.split())
    assert err.count("To name the file or directory") == line.startswith("convert -dash")
    assert not Path("x").exists()
    assert not Path("nope").exists()


@pytest.mark.parametrize(
    "line",
    [
        *("convert org/name x", "inspect org/name", "inspect org/name --layout", "verify org/name"),
        *("diff org/name hf.safetensors", "diff hf.safetensors org/name", "map org/name hf.safetensors"),
        *("map hf.safetensors org/name", "diff hf.safetensors hf.safetensors --noise org/name"),
        "convert org/name x --dry-run",
    ],
)
def test_an_id_of_the_hub_gets_the_hint_from_every_command_that_takes_a_checkpoint(
    run: Run, line: str
) -> None:
    status, _, err = run(*line.split(" "))
    assert status == 2
    assert "; for a repository of the Hugging Face Hub, write hf://org/name" in err


def test_local_paths_get_no_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in (
        "runs/step_1",
        "name",
        "/org/name",
        "./org/name",
        "a/b/c",
        "org/w.safetensors",
        "hf://org/name",
    ):
        assert hub_hint(path) == ""


@pytest.mark.parametrize(
    "line", ["convert hf.safetensors x --to DCP", "convert ./-dash x", "inspect -- -dash"]
)
def test_lines_that_work(run: Run, line: str) -> None:
    assert run(*line.split(" "))[0] == 0


def test_parents_are_created_when_asked_for(run: Run, tmp_path: Path) -> None:
    assert missing_parent("nope/deep/x") == tmp_path / "nope"
    assert missing_parent("x") is None
    assert missing_parent("memory://nope/deep/x") is None
    status, out, _ = run("convert", "hf.safetensors", "nope/deep/x", "--dry-run")
    assert (status, "the command would ask first" in out) == (0, True)
    assert run("convert", "hf.safetensors", "nope/deep/x", "--parents")[0] == 0
    assert run("convert", "hf.safetensors", "nope/deep/y")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("n", 2), ("", 2)])
def test_parents_are_asked_about_on_a_terminal(run: Run, tmp_path: Path, answer: str, status: int) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "convert", "hf.safetensors", "nope/x"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=tmp_path,
        env={**importing_from(ROOT), "TERM": "dumb"},
    ) as process:
        os.write(ours, f"{answer}\n".encode())
        assert process.wait(60) == status
    os.close(theirs)
    shown = os.read(ours, 10000).decode()
    os.close(ours)
    assert f"nope does not exist. Create {tmp_path / 'nope'}? [y/N]" in " ".join(shown.split())
    assert (tmp_path / "nope/x").exists() is (status == 0)


def test_diff_names_the_mappings_that_fit(run: Run) -> None:
    assert (
        run("convert", "hf.safetensors", "fx", "--mapping", "llama", "--into", "flax", "--axis", "d=4")[0]
        == 0
    )
    status, out, _ = run("diff", "hf.safetensors", "fx")
    assert status == 1
    assert "these options may translate the names of A to names of B: " in out
    assert "--mapping llama --into flax" in out
    assert "--mapping llama --into hf" in run("diff", "fx", "hf.safetensors")[1]
    assert "may translate" not in run("diff", "hf.safetensors", "./-dash")[1]


def test_every_document_has_a_version_first(run: Run) -> None:
    lines = (
        "inspect hf.safetensors",
        "verify hf.safetensors",
        "families",
        "diff hf.safetensors hf.safetensors",
    )
    more = (
        "convert hf.safetensors x --dry-run",
        "convert hf.safetensors x",
        "map hf.safetensors x",
        "inspect none",
    )
    for line in (*lines, *more):
        document = json.loads(run(*line.split(" "), "--json")[1])
        assert next(iter(document.items())) == ("version", 1), line


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--tree",), ("--json",)])
def test_names_that_the_encoding_lacks_are_escaped(
    run: Run, tmp_path: Path, options: tuple[str, ...]
) -> None:
    command = [sys.executable, "-c", PROGRAM, "inspect", "ünï cöde", *options]
    env = {**importing_from(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"xe4ight" in done.stdout or b"u00e4ight" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_that_is_full_is_one_sentence(run: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "inspect", "hf.safetensors"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env=importing_from(ROOT), stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 2
    assert done.stderr == b"error: standard output cannot be written: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["20", "1", "0", "x"])
def test_no_width_of_the_terminal_cuts_a_name_in_a_pipe(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for options in ((), ("--tree",)):
        status, out, _ = run("inspect", "hf.safetensors", *options)
        assert (status, "embed_tokens.weight" in out) == (0, True)
