"""Findings of one kind are one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from bridge.checkpoints.convert.conversion import convert
from bridge.commands.grouping import by_param_group, grouped
from bridge.commands.main import app
from tests.checkpoints.test_convert import write


def test_few_findings_are_a_line_each() -> None:
    assert grouped([("a", "x 1"), ("b", "x 2"), ("c", "y")]) == ["a: x 1", "b: x 2", "c: y"]


def test_many_of_a_kind_are_one_sentence_a_count_and_three_names() -> None:
    same = [(f"layers.{k}.w", "missing") for k in range(60)]
    assert grouped(same) == ["layers.0.w, layers.1.w, layers.2.w and 57 more (60 in all): missing"]
    damaged = [
        (f"w{k}", f"w{k}: chunk at ({k}, 0), expected CRC-32C {k + 1:08x}, got 2fa5ad7d") for k in range(4)
    ]
    assert grouped([*damaged, ("x", "another")]) == [
        "w0, w1, w2 and 1 more (4 in all), of the first: w0: chunk at (0, 0), expected CRC-32C 00000001, got 2fa5ad7d",
        "x: another",
    ]
    assert len(grouped([("w", f"expected shape {shape}") for shape in [(1,), (2, 3), (4, 5, 6), (7,)]])) == 1


def test_values_of_an_optimizers_group_are_one_name() -> None:
    names = [f"optimizer.param_groups.{k}.{name}" for k in range(2) for name in ("lr", "betas", "eps")]
    assert by_param_group(["step", *names, "x.param_groups.0.lr", "param_groups"]) == [
        "step",
        "optimizer.param_groups.0 (3 values)",
        "optimizer.param_groups.1 (3 values)",
        "x.param_groups.0.lr",
        "param_groups",
    ]


def test_diff_names_a_group_that_one_side_lacks_once(tmp_path: Path) -> None:
    group = {
        ("optimizer", "param_groups", 0, name): value for name, value in {"lr": 0.1, "eps": 1e-8}.items()
    }
    empty = {("optimizer", "param_groups", 0, name): None for name in ("foreach", "fused", "x", "y")}
    write(tmp_path / "a", "orbax", {"optimizer/w": np.ones(2, np.float32)}, group | empty)
    write(tmp_path / "b", "orbax", {"optimizer/w": np.ones(2, np.float32)}, {})
    lines = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")]).stdout.splitlines()
    assert lines[:2] == [
        "values that are not tensors, only in A: optimizer/param_groups/0 (2 values)",
        "optimizer/param_groups/0 (4 values): None in a, not in the tree of b",
    ]


def test_verify_and_diff_do_not_grow_with_the_tensors(tmp_path: Path) -> None:
    arrays = {f"layers.{k}.w": np.full((4, k + 1), k, np.float32) for k in range(40)}
    write(tmp_path / "a", "dcp", arrays, {("lr", str(k)): k for k in range(40)})
    write(tmp_path / "b", "dcp", {n: a.T for n, a in arrays.items()}, {("lr", str(k)): -k for k in range(40)})
    result = CliRunner().invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code == 1
    assert "layers.0.w, layers.1.w, layers.2.w and 36 more (39 in all), of the first: " in result.stdout
    assert "... and 19 more values that differ (--all lists them)" in result.stdout
    convert(tmp_path / "a", tmp_path / "c", to="safetensors")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    size = sum(a.nbytes for a in arrays.values())
    data[-size:] = bytes(255 - byte for byte in data[-size:])
    file.write_bytes(data)
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "c")])
    assert result.exit_code == 1
    assert " and 37 more (40 in all), of the first: " in result.stdout
    assert "40 problems found" in result.stdout
    assert len(result.stdout.splitlines()) < 7
