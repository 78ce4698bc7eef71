"""Whatever goes wrong inside of a command: one sentence, a status other than "no", and the document of --json."""

from __future__ import annotations

import errno
import gc
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import typer

from bridge.commands import main as module
from bridge.core.formats import create_checkpoint


class _StrangeError(Exception):
    """Of a library that has no base class for its errors."""


FAULTS = {
    "strange": (
        _StrangeError("first line\nsecond line"),
        2,
        "_StrangeError: first line; TWINSHARD_TRACEBACK=1",
    ),
    "empty": (AssertionError(), 2, "AssertionError: no message"),
    "memory": (MemoryError("Unable to allocate 8 GiB"), 2, "not enough memory (Unable to allocate 8 GiB)"),
    "recursion": (RecursionError("maximum recursion depth exceeded"), 2, "RecursionError: maximum"),
    "value": (ValueError("invalid literal"), 2, "ValueError: invalid literal"),
    "fork": (OSError(errno.ENOMEM, "Cannot allocate memory"), 2, "Cannot allocate memory"),
    "interrupt": (KeyboardInterrupt(), 130, "stopped by SIGINT"),
    "unanswered": (typer.Abort(), 2, "the question was not answered"),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with create_checkpoint(tmp_path / "c.safetensors", "safetensors") as writer:
        writer.add_tensor(("w",), (0,), np.dtype(np.float32))
    return tmp_path / "c.safetensors"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """`main` in this process, without what it changes for all of a process."""
    monkeypatch.setattr(sys, "argv", ["twinshard", *map(str, arguments)])
    monkeypatch.setattr(module, "stop_on_signals", lambda: None)
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    with pytest.raises(SystemExit) as raised:
        module.main()
    return int(str(raised.value.code))


@pytest.mark.parametrize("fault", FAULTS)
def test_no_error_ends_with_status_1_or_a_traceback(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    error, status, text = FAULTS[fault]

    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("bridge.checkpoints.inspect.summary.inspect", broken)
    assert run(monkeypatch, "inspect", checkpoint, "--json") == status
    told, said = capsys.readouterr()
    assert text in said
    assert "Traceback" not in said
    assert said.count("\n") == 1
    if isinstance(error, OSError):
        assert "standard output" not in said
    document = json.loads(told)["error"]
    assert (document["kind"], document["status"]) == (type(error).__name__, status)
    assert text in document["message"]


def test_the_traceback_is_there_for_the_asking(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(module.TRACEBACK, "1")
    monkeypatch.setattr("bridge.checkpoints.inspect.summary.inspect", lambda *_, **__: 1 // 0)
    assert run(monkeypatch, "inspect", checkpoint) == 2
    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said.splitlines()[-1]
    assert "Traceback (most recent call last)" in said


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), SystemExit(1)])
def test_a_closed_pipe_is_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    def broken(**_: object) -> None:
        raise error

    monkeypatch.setattr(module, "app", broken)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert run(monkeypatch, "families") == 141
    assert capsys.readouterr().err == ""
