"""Names are anybody's: no command lets one control the terminal, turn the direction of writing, or make a line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bridge.commands.main import app
from bridge.core.formats import create_checkpoint
from bridge.core.text import printable

NAMES = {
    "line": "w\nno problem found",
    "return": "w\rno problem found",
    "escape": "w\x1b[2Jx",
    "string": "w\x9d0;title\x07",
    "bidi": "w\u202etxt.\u2066",
    "separator": "w\u2028x\u2029y",
    "zero width": "w\u200bx\ufeff",
}


def make(path: Path, name: str, value: float) -> Path:
    with create_checkpoint(path, "safetensors") as writer:
        infos = [writer.add_tensor((tensor,), (2,), np.dtype(np.float32)) for tensor in (name, "plain")]
        for info in infos:
            for box in writer.chunks(info.name):
                writer.write(info.name, box, np.full(2, value, np.float32))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_no_command_lets_a_name_out(tmp_path: Path, name: str) -> None:
    bad = NAMES[name]
    finite, other = (make(tmp_path / f"{k}.safetensors", bad, k) for k in (1.0, np.nan))
    lines = (
        ("inspect", finite),
        ("inspect", finite, "--tree"),
        ("inspect", finite, "--layout"),
        ("verify", other, "--finite"),
        ("diff", finite, other),
        ("diff", finite, other, "--all"),
        ("convert", finite, tmp_path / "out", "--dry-run"),
        ("convert", finite, tmp_path / "dropped", "--drop", "w*"),
    )
    for line in lines:
        result = CliRunner().invoke(app, list(map(str, line)))
        assert result.exit_code in (0, 1, 2), result.exception
        shown = result.stdout + result.stderr
        assert bad not in shown, line
        assert printable(shown, lines=True) == shown, line
        assert "no problem found" not in [part.strip() for part in shown.splitlines()], line


def test_text_of_ours_keeps_its_lines() -> None:
    assert printable("a\nb\x1b", lines=True) == "a\nb\\x1b"
    assert printable("a\nb") == "a\\nb"
