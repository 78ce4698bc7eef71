"""The pins of the low end are the bounds that users are promised. Interpreters that do not run are skipped."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support import versions

PROJECT = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_the_lowest_end_is_what_pyproject_allows_at_least():
    pins = dict(
        line.split("==")
        for line in (versions.ROOT / "constraints-lowest.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    texts = [text for extra in ("torch", "jax", "test") for text in EXTRAS[extra]]
    bounds = {}
    for requirement in map(Requirement, [*PROJECT["dependencies"], *texts]):
        (bounds[requirement.name],) = (
            bound.version for bound in requirement.specifier if bound.operator == ">="
        )
    assert {name: Version(pin) for name, pin in pins.items()} == {
        name: Version(bound) for name, bound in bounds.items()
    }
    assert PROJECT["requires-python"] == f">={versions.PYTHONS['low']}"


def test_every_file_of_the_slice_is_there():
    assert [name for name in versions.SLICE if not (versions.ROOT / name).is_file()] == []


def test_an_interpreter_that_is_found_and_fails_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shim, right = tmp_path / "python3.11", tmp_path / ".pyenv" / "versions" / "3.11.99" / "bin" / "python3.11"
    shim.write_text("#!/bin/sh\nexit 127\n")
    right.parent.mkdir(parents=True)
    right.write_text("#!/bin/sh\necho 3.11\n")
    for script in (shim, right):
        script.chmod(0o755)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / ".pyenv"))
    monkeypatch.delenv("PYTHON_LOW", raising=False)
    monkeypatch.setattr(sys, "executable", str(shim))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert versions.interpreter("low") == str(right)


def test_an_interpreter_that_is_named_and_missing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHON_NEW", "/nowhere/python3.14")
    with pytest.raises(SystemExit, match=re.escape("none among /nowhere/python3.14; set PYTHON_NEW=")):
        versions.interpreter("new")


def test_the_interpreter_of_another_environment_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PYTHON_MAXTEXT", sys.executable)
    assert versions.main(["--interpreter", "maxtext"]) == 0
    assert capsys.readouterr().out == f"{sys.executable}\n"
