"""Reports as truth values: what is checked with `assert` fails for strangers, in documents too."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import bridge
from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.compare.ulp import Tolerance
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.commands.main import app
from bridge.core.formats import create_checkpoint

ROOT = Path(__file__).parents[2]
Content = Mapping[str, object]


def save(path: Path, content: Content) -> Path:
    with create_checkpoint(path, "orbax") as writer:
        for name, value in content.items():
            if not isinstance(value, np.ndarray):
                writer.add_object(tuple(name.split("/")), value)
        tensors = {n: v for n, v in content.items() if isinstance(v, np.ndarray)}
        infos = {n: writer.add_tensor(tuple(n.split("/")), v.shape, v.dtype) for n, v in tensors.items()}
        for name, info in infos.items():
            for box in writer.chunks(info.name):
                writer.write(info.name, box, tensors[name][box.slices()])
    return path


BASE: Content = {"p/w": np.arange(6, dtype=np.float32), "p/v": np.ones((2, 2), np.float32), "step": 8}
CHANGES: dict[str, Content] = {
    "all names but one are others": {
        "p/w": BASE["p/w"],
        **{f"q/{n}": np.ones(2, np.float32) for n in "abcdef"},
    },
    "one tensor is missing": {"p/w": BASE["p/w"], "step": 8},
    "one tensor is more": {**BASE, "p/u": np.ones(1, np.float32)},
    "another shape": {**BASE, "p/v": np.ones((4, 1), np.float32)},
    "another dtype": {**BASE, "p/v": np.ones((2, 2), np.float16)},
    "another value beside the tensors": {**BASE, "step": 9},
    "another type of a value": {**BASE, "step": 8.0},
    "nothing in common": {"x": np.ones(3, np.float32)},
}


@pytest.mark.parametrize("case", CHANGES)
def test_strangers_are_not_the_same_by_any_of_the_numbers(tmp_path: Path, case: str) -> None:
    a, b = save(tmp_path / "a", BASE), save(tmp_path / "b", CHANGES[case])
    for report in (diff(a, b), diff(a, b, tolerance=Tolerance(max_ulp=2**64 - 1, rtol=1e9, atol=1e9))):
        assert (bool(report), report.same, report.within) == (False, False, False)
        assert report.max_ulp == math.inf
        assert not report.max_ulp <= 2**64
    result = CliRunner().invoke(app, ["diff", str(a), str(b), "--json"])
    document = json.loads(result.stdout)
    assert (result.exit_code, document["same"], document["within"], document["max_ulp"]) == (
        1,
        False,
        False,
        0,
    )


def test_equal_ones_are_the_same_and_a_tolerance_counts(tmp_path: Path) -> None:
    a = save(tmp_path / "a", BASE)
    near = {**BASE, "p/v": np.nextafter(np.ones((2, 2), np.float32), np.float32(2))}
    b = save(tmp_path / "b", near)
    assert diff(a, a)
    assert (diff(a, a).max_ulp, diff(a, b).max_ulp) == (0, 1)
    assert not diff(a, b)
    assert diff(a, b, tolerance=Tolerance(max_ulp=1)).same
    assert CliRunner().invoke(app, ["diff", str(a), str(b), "--max-ulp", "1"]).exit_code == 0
    assert CliRunner().invoke(app, ["diff", str(a), str(b)]).exit_code == 1


def test_a_value_that_cannot_be_read_in_either_is_not_the_same(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "odd": {1, 2}}, tmp_path / "a.pt")
    report = diff(tmp_path / "a.pt", tmp_path / "a.pt")
    assert not report
    assert report.max_ulp == math.inf


def test_reports_of_verify_and_convert_are_true_where_all_is_well(tmp_path: Path) -> None:
    a = save(tmp_path / "a", {**BASE, "p/big": np.full(3, 1e30, np.float32)})
    assert verify(a)
    assert convert(a, tmp_path / "b")
    overflowed = convert(a, tmp_path / "c", casts=["*=float16"])
    assert overflowed.overflowed
    assert not overflowed
    (chunk,) = (path for path in (a / "d").iterdir() if path.stat().st_size > 64)
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    assert not verify(a)


def documents() -> list[tuple[str, str]]:
    """Texts that show code: pages, cells of notebooks, docstrings."""
    texts = []
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT)
        if any(part.startswith(".") or part in ("build", "dist") for part in relative.parts):
            continue
        if path.suffix == ".md":
            texts.append((str(relative), path.read_text()))
        elif path.suffix == ".ipynb":
            cells = json.loads(path.read_text())["cells"]
            texts.append((str(relative), "\n".join("".join(cell["source"]) for cell in cells)))
        elif path.suffix == ".py" and relative.parts[0] != "tests":
            docstrings = re.findall(r'"""(.*?)"""', path.read_text(), re.DOTALL)
            texts.append((str(relative), "\n".join(docstrings)))
    return texts


def test_no_document_checks_by_a_number_of_what_was_compared() -> None:
    """A distance, a count or a list of tensors in common says nothing of those that are not in common."""
    checks = [
        (where, line.strip())
        for where, text in documents()
        for line in text.splitlines()
        if re.match(r"\s*assert\b", line)
        and re.search(r"max_ulp|\.within\b|differing|offenders|max\(.*values", line)
    ]
    assert checks == []
    assert "assert diff(" in (bridge.__doc__ or "")
    assert ".same" in (bridge.__doc__ or "")
