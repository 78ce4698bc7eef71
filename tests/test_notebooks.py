"""Every notebook runs from a clean kernel, and is committed with its outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import FOLDER, PICTURE, RELAY, ROOT, execute, relay_picture

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.slow  # `.ci/run` executes them, too
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_a_clean_kernel(path: Path) -> None:
    execute(path, relay="quick")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_outputs_and_without_errors(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_picture_has_an_alternative_text(path: Path) -> None:
    """In its cell's metadata, where the documentation site finds the text: ``{"mystnb": {"image": {"alt": ...}}}``."""
    silent = [
        "".join(cell.source)[-80:]
        for cell in nbformat.read(path, as_version=4).cells
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
        and not cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "").strip()
    ]
    assert silent == []


def test_the_readme_shows_the_relay_of_the_notebook() -> None:
    picture = relay_picture(nbformat.read(RELAY, as_version=4))
    assert picture.startswith(b"\x89PNG")
    assert PICTURE.read_bytes() == picture
    assert f"]({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")
