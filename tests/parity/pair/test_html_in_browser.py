"""The page in a real browser: Chromium as PyQt6-WebEngine brings it, where that is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from bridge.parity.report_page.html import write_html
from bridge.parity.report_page.report import ParityReport
from tests.parity.pair.reports import llama, odd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("PyQt6") is None
        or importlib.util.find_spec("PyQt6.QtWebEngineWidgets") is None,
        reason="no browser: pip install PyQt6-WebEngine",
    ),
]

SORTED = """(() => {
  const table = document.querySelector('#tables table'), head = table.tHead.rows[0].cells[7];
  head.click();
  return Array.from(table.tBodies[0].rows, row => Number(row.cells[7].textContent));
})()"""
FILTERED = """(() => {
  document.getElementById('only').click();
  document.getElementById('unfold').click();
  const shown = one => one.checkVisibility();
  return {rows: Array.from(document.querySelectorAll('tr.is-same')).filter(shown).length,
          nodes: Array.from(document.querySelectorAll('.tree details.quiet')).filter(shown).length,
          other: Array.from(document.querySelectorAll('.tree details.begin')).filter(shown).length};
})()"""


def opened(
    report: ParityReport,
    folder: Path,
    width: int,
    mode: str = "light",
    scripts: bool = True,
    script: str = "null",
) -> dict[str, Any]:
    write_html(report, folder / "page.html")
    command = [
        sys.executable,
        str(Path(__file__).with_name("browser.py")),
        str(folder / "page.html"),
        str(folder / "page.png"),
        str(width),
        mode,
        "yes" if scripts else "no",
        script,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("report", [llama(6, (2, 4)), odd()], ids=["faults", "odd"])
def test_page_fits_and_runs_nothing_foreign(
    report: ParityReport, width: int, mode: str, tmp_path: Path
) -> None:
    facts = opened(report, tmp_path, width, mode)
    assert facts["width"] <= width, "the page scrolls sideways"
    assert facts["script"], "the page's own script did not run"
    assert facts["alerts"] == facts["messages"] == []
    assert facts["requests"] == [(tmp_path / "page.html").as_uri()]
    shades = [int(part) for part in facts["background"].removeprefix("rgb(").removesuffix(")").split(",")]
    assert (sum(shades) < 200) == (mode == "dark")
    picture = imread(tmp_path / "page.png")[..., :3]
    assert picture.shape[1] == width
    assert picture.std() > 0.02, "nothing was drawn"


def test_script_sorts_and_filters(tmp_path: Path) -> None:
    facts = opened(llama(6, (2, 4)), tmp_path, 1600, script=SORTED)
    assert facts["result"] == sorted(facts["result"], reverse=True)
    shown = opened(llama(6, (2, 4)), tmp_path, 1600, script=FILTERED)["result"]
    assert (shown["rows"], shown["nodes"], shown["other"]) == (0, 0, 2)


def test_page_says_the_same_without_script(tmp_path: Path) -> None:
    text = "document.body.innerText.includes('model.layers.2.attn.q')"
    tools = "getComputedStyle(document.querySelector('.tools')).display"
    facts = opened(llama(6, (2, 4)), tmp_path, 1600, scripts=False, script=f"[{text}, {tools}]")
    assert not facts["script"]
    assert facts["result"] == [True, "none"]
