"""Long calls from Python: who sees their progress, and when Python searches for cycles again."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.core import long_calls
from bridge.core.formats import create_checkpoint
from twinshard import convert


class Bar:
    """What the code uses of tqdm."""

    made: list[Bar] = []  # noqa: RUF012

    def __init__(self, total: int | None, initial: int, **options: Any) -> None:
        self.total, self.n, self.options, self.closed, self.told = total, initial, options, False, list[Any]()
        self.made.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def set_description_str(self, text: str, refresh: bool) -> None:
        self.told.append(text)

    def update(self, count: int) -> None:
        self.n += count


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(long_calls, "is_watched", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    return Bar.made


@pytest.fixture
def checkpoint(tmp_path):
    with create_checkpoint(tmp_path / "a", "dcp") as writer:
        for name in ("x", "y"):
            writer.add_tensor((name,), (4,), np.dtype("float32"))
            for box in writer.chunks(name):
                writer.write(name, box, np.ones(4, np.float32))
    return tmp_path / "a"


def test_a_watched_conversion_fills_a_bar_of_bytes_and_removes_it(bars, checkpoint, tmp_path) -> None:
    convert(checkpoint, tmp_path / "b", to="orbax")
    (bar,) = bars
    assert (bar.total, bar.n, bar.closed) == (32, 32, True)
    assert bar.options["leave"] is False
    assert bar.options["unit"] == "B"
    assert bar.told[-1].startswith("convert: ")


def test_stages_are_told_by_name(bars) -> None:
    with long_calls.followed("parity", None) as tell:
        tell("weights")
        tell("backward")
    (bar,) = bars
    assert (bar.total, bar.told, bar.closed) == (None, ["parity: weights", "parity: backward"], True)


def test_a_function_of_the_callers_is_told_and_false_is_silence(bars, checkpoint, tmp_path) -> None:
    told: list[tuple[int, int, str]] = []
    convert(checkpoint, tmp_path / "b", to="orbax", progress=lambda *news: told.append(news))
    assert told[-1][:2] == (32, 32)
    convert(checkpoint, tmp_path / "c", to="orbax", progress=False)
    assert bars == []


def test_nothing_is_written_where_nobody_watches(bars, monkeypatch, checkpoint, tmp_path, capfd) -> None:
    monkeypatch.setattr(long_calls, "is_watched", lambda: False)
    convert(checkpoint, tmp_path / "b", to="orbax")
    assert bars == []
    assert capfd.readouterr() == ("", "")


def test_without_tqdm_a_watched_call_is_silent(monkeypatch, checkpoint, tmp_path, capfd) -> None:
    monkeypatch.setattr(long_calls, "is_watched", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    convert(checkpoint, tmp_path / "b", to="orbax")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("terminal", "term", "kernel", "watched"), [
    (True, "xterm", False, True),
    (True, "dumb", False, False),
    (False, "xterm", False, False),
    (False, "dumb", True, True),
])  # fmt: skip
def test_who_watches(monkeypatch, terminal: bool, term: str, kernel: bool, watched: bool) -> None:
    shell = SimpleNamespace(kernel=1) if kernel else SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    monkeypatch.setenv("TERM", term)
    assert long_calls.is_watched() is watched


@pytest.mark.parametrize("before", [True, False])
def test_the_last_of_several_long_calls_resumes_the_search_for_cycles(before: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if before else gc.disable)()
    try:
        with long_calls.collection_paused():
            with pytest.raises(ValueError, match="failed"), long_calls.collection_paused():
                raise ValueError("failed")
            assert not gc.isenabled()
        assert gc.isenabled() is before
    finally:
        (gc.enable if was_enabled else gc.disable)()
