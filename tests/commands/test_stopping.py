"""Signals, closed pipes and JSON errors of the `twinshard` command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge.checkpoints.convert.conversion import convert
from bridge.commands.stopping import Stopped, stop_on_signals
from bridge.core.formats.files.journal import JOURNAL_FILE
from tests.checkpoints.test_convert import tensors, write
from tests.support.processes import importing_from

ROOT = Path(__file__).parents[2]

KILLED = """
import os, signal, sys
from bridge.checkpoints.convert import engine
from bridge.commands.main import main
from bridge.core.formats.dcp.writer import DcpWriter
stock, number, calls = DcpWriter.write_from, signal.Signals[os.environ["SIGNAL"]], []
engine.TOGETHER_BYTES = 1
def write(*arguments):
    done = stock(*arguments)
    calls.append(arguments)
    if len(calls) == 3:
        os.kill(os.getpid(), number)
        signal.pause()
    return done
DcpWriter.write_from = write
main()
"""


def run(
    program: str, *arguments: object, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    env = {**importing_from(ROOT), **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


MAIN = "from bridge.commands.main import main; main()"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    arrays: dict[str, Any] = {f"w{k}": np.full((100, 10), k, np.float32) for k in range(6)}
    write(tmp_path / "a", "dcp", arrays, {})
    return tmp_path / "a"


@pytest.mark.fast_cases("SIGTERM")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_a_conversion_in_one_sentence_and_leaves_nothing(
    tmp_path: Path, source: Path, name: str
) -> None:
    done = run(KILLED, "convert", source, tmp_path / "b", "--to", "dcp", "--workers", "1", SIGNAL=name)
    assert done.returncode == 128 + signal.Signals[name]
    assert (
        done.stderr == f"stopped by {name}: {tmp_path / 'b'} does not exist, and none of the work is kept\n"
    )
    assert done.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_resumable_conversion_flushes_its_journal_on_sigterm(tmp_path: Path, source: Path) -> None:
    arguments = ("convert", source, tmp_path / "b", "--to", "dcp", "--workers", "1", "--resume")
    done = run(KILLED, *arguments, SIGNAL="SIGTERM")
    assert done.returncode == 143
    (working,) = (path for path in tmp_path.iterdir() if path.name != "a")
    assert (
        f"the finished work is in {working}, and the same command with --resume continues from there"
        in done.stderr
    )
    assert len((working / JOURNAL_FILE).read_text().splitlines()) == 1 + 3
    report = convert(source, tmp_path / "b", to="dcp", resume=True)
    assert report.resumed_bytes == 3 * 4000
    assert {n: a.tobytes() for n, a in tensors(tmp_path / "b").items()} == {
        n: a.tobytes() for n, a in tensors(source).items()
    }


@pytest.mark.slow
def test_a_stopped_replacement_leaves_the_old_checkpoint_and_says_so_in_json(
    tmp_path: Path, source: Path
) -> None:
    convert(source, tmp_path / "b", to="dcp")
    before = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    arguments = ("convert", source, tmp_path / "b", "--to", "dcp", "--workers", "1", "--replace", "--json")
    done = run(KILLED, *arguments, SIGNAL="SIGTERM")
    assert done.returncode == 143
    error = json.loads(done.stdout)
    assert (error["version"], error["error"]["kind"], error["error"]["status"]) == (1, "Stopped", 143)
    assert error["error"]["message"] == done.stderr.strip()
    assert "is one complete checkpoint, the old or the new" in done.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == before


@pytest.mark.slow
def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path, source: Path) -> None:
    program = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{KILLED}".replace(
        "signal.pause()", "pass"
    )
    done = run(program, "convert", source, tmp_path / "b", "--to", "dcp", "--workers", "1", SIGNAL="SIGHUP")
    assert done.returncode == 0, done.stderr


def test_a_reader_that_goes_away_ends_the_command_without_a_word(tmp_path: Path) -> None:
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "a.safetensors")
    command = [sys.executable, "-c", MAIN, "inspect", str(tmp_path / "a.safetensors"), "--json"]
    with subprocess.Popen(
        command, env=importing_from(ROOT), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.parametrize("arguments", [["families", "nope"], ["inspect", "nope"]], ids=["usage", "error"])
def test_a_reader_of_errors_that_goes_away_is_no_answer(arguments: list[str]) -> None:
    command = [sys.executable, "-c", MAIN, *arguments]
    with subprocess.Popen(command, env=importing_from(ROOT), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.wait(60) == 141


@pytest.mark.parametrize(
    ("arguments", "error_kind", "message"),
    [
        (("inspect", "none"), "FileNotFoundError", "none does not exist: expected a checkpoint there"),
        (("diff", "a", "none"), "FileNotFoundError", "none does not exist: expected a checkpoint there"),
        (("verify", "none"), "FileNotFoundError", "none does not exist: expected a checkpoint there"),
        (("map", "a", "none"), "FileNotFoundError", "none does not exist: expected a checkpoint there"),
        (("convert", "a", "a"), "FileExistsError", "a exists already: remove it first"),
        (
            ("convert", "a", "b", "--cast", "*=fp7"),
            "CheckpointError",
            "cast '*=fp7': expected a floating-point dtype",
        ),
        (("convert", "a"), "MissingParameter", "Missing argument 'DST'"),
        (("convert", "a", "b", "--wrong"), "NoSuchOption", "No such option"),
        pytest.param(("plan", "fsdp", "--model", "none"), "PlanError", "none", marks=pytest.mark.slow),
        pytest.param(
            ("relay", "none.toml"),
            "ConfigError",
            "relay file none.toml: expected a TOML file",
            marks=pytest.mark.slow,
        ),
        pytest.param(("parity", "none"), "ValueError", "expected one run file", marks=pytest.mark.slow),
        pytest.param(
            ("curves", "none", "--against", "none"), "FileNotFoundError", "none", marks=pytest.mark.slow
        ),
    ],
)
def test_errors_are_one_json_document_too(
    tmp_path: Path,
    source: Path,
    arguments: tuple[str, ...],
    error_kind: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from bridge.commands.main import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["twinshard", *arguments, "--json"])
    monkeypatch.setattr("bridge.commands.main.stop_on_signals", lambda: None)
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert set(document) == {"version", "error"}
    assert document["error"]["kind"] == error_kind
    assert message in document["error"]["message"]
    assert document["error"]["status"] == 2
    assert message in " ".join(shown.err.split())


def test_ignored_signals_raise_nothing() -> None:
    """As SIGHUP under nohup."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop_on_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
