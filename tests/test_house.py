"""Who may import whom: only lower floors and the own room, and never in a circle.

    7  bridge/commands                           the command line, and `bridge` itself, its door
    6  bridge/planning
    5  bridge/parity       bridge/propose
    4  bridge/checkpoints
    3  torch_impl          jax_impl
    2  bridge/core/mapping
    1  bridge/core/sharding     bridge/core/formats        bridge/core/text.py
    0  bridge/core/callers.py   bridge/core/dtype_names.py   bridge/core/text_files.py

Mappings are below the runtimes, which save and load checkpoints under another model's names and layouts.

Imports inside of functions and for type checking count: a reader has to follow them as well.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {
    "bridge": 7,
    "bridge.commands": 7,
    "bridge.planning": 6,
    "bridge.parity": 5,
    "bridge.propose": 5,
    "bridge.checkpoints": 4,
    "bridge.core.mapping": 2,
    "torch_impl": 3,
    "jax_impl": 3,
    "bridge.core.sharding": 1,
    "bridge.core.formats": 1,
    "bridge.core.hlo": 1,
    "bridge.core.text": 1,
    "bridge.core.version": 1,
    "bridge.core.callers": 0,
    "bridge.core.dtype_names": 0,
    "bridge.core.text_files": 0,
}
FORMATS = {
    f"bridge.core.formats.{name}"
    for name in ("dcp", "orbax", "safetensors", "torch_save", "npz", "flax_msgpack")
}


@functools.cache
def imports() -> dict[str, set[str]]:
    """By module of the three packages, the modules of the three packages that it imports anywhere."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in ("torch_impl", "jax_impl", "bridge")
        for path in (ROOT / package).rglob("*.py")
    }
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named: list[str] = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [one if one in files else node.module for one in inner]
            found[name].update(one for one in named if one in files and one != name)
    return found


def room_of(module: str) -> str:
    while module not in FLOORS:
        module = module.rpartition(".")[0]
    return module


def test_a_room_imports_from_lower_floors_only() -> None:
    wrong = [
        f"{module} (floor {FLOORS[room_of(module)]}) imports {other} (floor {FLOORS[room_of(other)]})"
        for module, others in imports().items()
        for other in others
        if room_of(module) != room_of(other)
        and FLOORS[room_of(other)] >= FLOORS[room_of(module)]
        and (module, other) != ("bridge.commands.main", "bridge")
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_formats_do_not_import_each_other() -> None:
    def format_of(module: str) -> str | None:
        return next((one for one in FORMATS if (module + ".").startswith(one + ".")), None)

    # Safetensors is DCP's second serialization. A chunk of DCP is a file of torch.save, whose records have checksums of
    # zip files.
    allowed = {
        ("bridge.core.formats.dcp", "bridge.core.formats.safetensors"),
        ("bridge.core.formats.torch_save", "bridge.core.formats.dcp"),
        ("bridge.core.formats.npz", "bridge.core.formats.dcp"),
    }
    wrong = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if format_of(module) and format_of(other) not in (None, format_of(module))
        if (format_of(module), format_of(other)) not in allowed
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_imports_form_a_circle() -> None:
    graphlib.TopologicalSorter(imports()).prepare()


def test_the_top_level_holds_what_the_layout_names() -> None:
    # A test that writes into the current folder leaves a checkpoint here, which is soon committed.
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git, which tells what is committed")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {path.partition("/")[0] for path in listed.stdout.split("\0") if path}
    folders = {"torch_impl", "jax_impl", "bridge", "tests", "notebooks", ".ci"}
    files = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        ".gitignore",
    }
    assert found <= folders | files | {"constraints.txt", "constraints-lowest.txt"}
