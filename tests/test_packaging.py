"""The installed package: typed, described, and complete."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
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
    examples = [path for path in (ROOT / package / "examples" / "files").rglob("*") if path.is_file()]
    read |= {path for path in examples if path.parent.name != "__pycache__"}
    assert read <= shipped


def test_the_notebooks_extra_has_what_the_notebooks_import() -> None:
    extra = " ".join(PROJECT["project"]["optional-dependencies"]["notebooks"])
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.ipynb"))
    imported = set(re.findall(r'"(?:import|from) ([a-z_]+)', text))
    needed = {"orbax": "orbax-checkpoint", "transformers": "transformers", "safetensors": "safetensors"}
    assert {"orbax", "transformers"} <= imported
    assert all(package in extra for module, package in needed.items() if module in imported)


def test_the_readme_links_to_its_headings_to_files_and_by_https() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", readme)
    headings = {
        f"#{title.lower().replace(' ', '-')}" for title in re.findall(r"^#+ (.+)$", readme, re.MULTILINE)
    }
    assert [link for link in links if link.startswith("#") and link not in headings] == []
    elsewhere = [link for link in links if ":" in link or link.startswith("/")]
    assert [link for link in elsewhere if not link.startswith("https://")] == []


ROOMS = ("bridge", "torch_impl", "jax_impl", "tests")
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", *ROOMS) for path in (ROOT / folder).rglob("*.md")),
]


def test_python_files_that_documents_name_exist() -> None:
    """By a path or by its end. The changelog names files of the past.

    Some files are a reader's own. A page says so where it shows one: ``# name.py`` begins the code, or "as `name.py`".
    """
    shown = re.compile(r"^ *# ((?:\w+/)*\w+\.py)$|\bas `((?:\w+/)*\w+\.py)`", flags=re.MULTILINE)
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS if path.name != "CHANGELOG.md"}
    own = {name for text in texts.values() for names in shown.findall(text) for name in names}
    own |= {"capture.py", "twinshard.py", "port/jax_model.py", "port/torch_model.py"}
    paths = ["/" + str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    missing = {
        (document.name, name)
        for document, text in texts.items()
        for name in re.findall(r"(?<![\w/.])(?:\w+/)*\w+\.py\b", text)
        if name not in own and not any(path.endswith("/" + name) for path in paths)
    }
    assert not missing


def test_the_changelog_has_three_headings_a_release_and_short_lines() -> None:
    first, *releases = re.split(
        r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert first == "# Changelog\n\n"
    for release in releases:
        title, *sections = re.split(r"^### ", release, flags=re.MULTILINE)
        assert re.fullmatch(r"\d+\.\d+\.\d+ \((unreleased|\d{4}-\d\d-\d\d)\)\n\n", title)
        headings = [section.partition("\n")[0] for section in sections]
        assert headings == [name for name in ("Added", "Changed", "Fixed") if name in headings]
        for section in sections:
            entries = [line for line in section.splitlines()[1:] if line]
            assert [line for line in entries if not line.startswith("- ")] == []
            assert [line for line in entries if len(line.split()) - 1 > 25] == []
            assert len(entries) == len(set(entries)) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_works_in_an_environment_that_has_nothing_else(tmp_path: Path) -> None:
    # With this path, pip would find the package already installed.
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # In a copy, because a build writes into the source folder, where other tests run.
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if name.partition("/")[0] not in ("tests", "notebooks"):
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "source" / name)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, tmp_path / "source")
    (wheel,) = tmp_path.glob("twinshard-*.whl")
    assert {"twinshard.py", "twinshard-stubs/__init__.pyi"} <= set(zipfile.ZipFile(wheel).namelist())
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel)
    assert run(python.with_name("twinshard"), "--version").startswith("twinshard ")
    assert "llama" in run(python.with_name("twinshard"), "families")
    sizes = [path.stat().st_size for path in (tmp_path / "env").rglob("*") if path.is_file()]
    assert sum(sizes) < 250e6, "what pip installs for the bridge alone, and pip itself"
    for command in ("convert", "parity", "plan", "relay"):
        assert "twinshard " in run(python.with_name("twinshard"), command, "--example", command)
    run(python.with_name("twinshard"), "convert", "convert/torch", "convert/jax", "--mapping", "llama")
    run(python.with_name("twinshard"), "plan", "plan/fsdp.toml", "--model", "llama3-8b", "--memory", "80GB")
    program = (
        "import numpy as np, twinshard\n"
        "with twinshard.create_checkpoint('a', 'dcp') as writer:\n"
        "    name = writer.add_tensor(('w',), (3, 4), np.dtype('float32')).name\n"
        "    for box in writer.chunks(name): writer.write(name, box, np.ones(box.sizes, np.float32))\n"
        "twinshard.convert('a', 'b', to='orbax')\n"
        "print(twinshard.diff('a', 'b').same, twinshard.plan('llama3-8b', 'fsdp', 8, 'torch',"
        " twinshard.Workload(batch=1, length=128)).at_rest.total > 0)\n"
        "try: twinshard.torch\n"
        "except ImportError as error: print(error)\n"
    )
    lines = run(python, "-c", program).splitlines()
    # The advice of a wheel has a command that its user can run.
    (requirement,) = re.findall(
        r"^torch_impl needs PyTorch, .*; without a clone: pip install '(.*)'$", lines.pop()
    )
    assert lines == ["True True"]
    assert requirement.startswith("torch<")
