"""The installed package: typed, described, and complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("package", ["torch_impl", "jax_impl", "bridge"])
def test_a_package_is_marked_as_typed_and_ships_what_it_reads(package: str) -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"][package]
    shipped = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
    assert ROOT / package / "py.typed" in shipped
    read = {path for path in (ROOT / package).rglob("*.toml") if path.is_file()}
    assert read <= shipped


def test_the_notebooks_extra_has_what_the_notebooks_import() -> None:
    extra = " ".join(PROJECT["project"]["optional-dependencies"]["notebooks"])
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.ipynb"))
    imported = set(re.findall(r'"(?:import|from) ([a-z_]+)', text))
    needed = {"orbax": "orbax-checkpoint", "transformers": "transformers", "safetensors": "safetensors"}
    assert {"orbax", "transformers"} <= imported
    assert all(package in extra for module, package in needed.items() if module in imported)


def test_the_readme_has_no_links_that_a_package_index_would_break() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", readme)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(
        path
        for folder in ("docs", "bridge", "torch_impl", "jax_impl", "tests")
        for path in (ROOT / folder).rglob("*.md")
    ),
]


@pytest.mark.parametrize("document", sorted(str(path.relative_to(ROOT)) for path in DOCUMENTS))
def test_links_to_files_lead_to_files(document: str) -> None:
    path = ROOT / document
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    files = [link.partition("#")[0] for link in links if not link.startswith(("https://", "http://", "#"))]
    assert [file for file in files if not (path.parent / file).exists()] == []
