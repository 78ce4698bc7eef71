"""``capabilities.md`` tells what works in both halves; its commands name tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("capabilities.md")
COLUMNS = ["capability", "PyTorch", "JAX", "PyTorch: command", "JAX: command"]
STATE = re.compile(r"(?P<letter>[WPAN])(?:: (?P<reason>.+))?")
COMMAND = re.compile(
    r"`pytest (?P<places>tests/\S+\.py(?:::\w+)?(?: tests/\S+\.py(?:::\w+)?)*)"
    r"(?: -k (?P<words>\w+))?(?P<slow> -m \"slow or not slow\")?`"
)


@dataclass(frozen=True)
class Side:
    """One capability in one half: the cell with its state, and the cell with its command."""

    table: str
    capability: str
    half: str
    state: str
    command: str

    def __str__(self) -> str:
        return f"{self.half}, {self.table}: {self.capability}"


def rows() -> Iterator[tuple[str, list[str]]]:
    """Each row of the page with the title of its table, without headers and rules."""
    title = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            title = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and cells != COLUMNS and set("".join(cells)) != {"-"}:
            yield title, cells


@functools.cache
def sides() -> tuple[Side, ...]:
    listed = []
    for title, cells in rows():
        capability, torch, jax, torch_command, jax_command = cells
        listed.append(Side(title, capability, "PyTorch", torch, torch_command))
        listed.append(Side(title, capability, "JAX", jax, jax_command))
    return tuple(listed)


@functools.cache
def cases_of(path: str) -> dict[str, bool]:
    """The tests of a file by name, each with whether ``make test`` leaves out all of its cases."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))

    def slow(marks: list[ast.expr]) -> bool:
        return any(ast.unparse(mark) == "pytest.mark.slow" for mark in marks)

    marks = [
        mark
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for mark in (node.value.elts if isinstance(node.value, ast.List) else [node.value])
    ]
    return {
        node.name: slow(marks) or slow(node.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def faults_of(command: str) -> Iterator[str]:
    """Files and tests that a command names but that do not exist."""
    match = COMMAND.fullmatch(command)
    if match is None:
        yield f"expected `pytest FILE::TEST ...`, `-k WORD` and `-m` last, got {command}"
        return
    chosen = []
    for node_id in match["places"].split():
        path, _, name = node_id.partition("::")
        if not (ROOT / path).is_file():
            yield f"{path} is no file"
        elif name and name not in cases_of(path):
            yield f"{path} has no {name}"
        else:
            chosen += [(path, case) for case in ([name] if name else cases_of(path))]
    word = match["words"]
    if word and not any(word in case or word in Path(path).read_text("utf-8") for path, case in chosen):
        yield f"-k {word} chooses nothing"
    if chosen and not match["slow"] and all(cases_of(path)[case] for path, case in chosen):
        yield "all tests are slow: expected -m"


def test_tables_have_their_columns_and_titles() -> None:
    table_rows = list(rows())
    assert {title for title, _ in table_rows} == {
        "Sharding",
        "States of optimizers",
        "Bytes at rest and at the peak",
        "Offload",
        "Fused projections and items",
    }
    assert [cells for _, cells in table_rows if len(cells) != len(COLUMNS) or not cells[0]] == []
    names = Counter((title, cells[0]) for title, cells in table_rows)
    assert [name for name, count in names.items() if count > 1] == []


def test_states_are_known_and_what_is_not_whole_has_a_reason() -> None:
    wrong = []
    for side in sides():
        match = STATE.fullmatch(side.state)
        if match is None or (match["letter"] == "W") != (match["reason"] is None):
            wrong.append(f"{side}: {side.state!r}")
    assert not wrong, "expected W, or P, A or N with a colon and a reason:\n" + "\n".join(wrong)


def test_what_works_has_a_command_and_what_is_absent_none() -> None:
    assert [str(side) for side in sides() if side.state == "W" and not side.command] == []
    assert [str(side) for side in sides() if side.state.startswith("P") and not side.command] == []


def test_commands_name_tests_that_exist() -> None:
    wrong = [f"{side}: {fault}" for side in sides() if side.command for fault in faults_of(side.command)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pytest tests/test_house.py", "expected `pytest"),
        ("`pytest tests/nowhere.py`", "no file"),
        ("`pytest tests/test_house.py::test_nothing`", "has no test_nothing"),
        ("`pytest tests/test_house.py -k nothing_of_the_kind`", "chooses nothing"),
        ("`pytest tests/parity/test_relay_faults.py`", "slow"),
    ],
)
def test_a_wrong_command_is_seen(command: str, message: str) -> None:
    assert [fault for fault in faults_of(command) if message in fault]
