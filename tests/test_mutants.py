"""The generator of mutants: what it changes, that a seed repeats it, and that a change takes effect."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.mutants.__main__ import draw, equivalents, table
from tests.support.mutants.edits import compiles, mutants_of
from tests.support.mutants.live import replace_code
from tests.support.mutants.reached import Record, by_promise, instrument
from tests.support.mutants.runs import ROOT, Outcome

SOURCE = '''"""Words with a ü, since columns are counted in bytes."""


class Box:
    """A box."""

    @property
    def size(self) -> int:
        """Its size."""
        return self._size + 1

    @size.setter
    def size(self, size: int) -> None:
        if size < 0 or not size:
            raise ValueError(f"expected a size, got {size + 1}")
        self._size = size
        self.note("ü", size)

    def note(self, text, size, step=2):
        return [text for k in range(size) if k is not None]
'''


@pytest.mark.parametrize(
    ("operator", "after"),
    [
        ("condition", ["if True:", "if False:"]),
        ("negated condition", ["if not (size < 0 or not size):"]),
        ("off by one", ["if size <= 0 or not size:"]),
        ("and or or", ["if size < 0 and not size:"]),
        ("dropped not", ["if size < 0 or (size):"]),
        ("dropped call", ["pass"]),
        ("swapped arguments", ['self.note(size, "ü")']),
        ("early return", ["return\nself._size = size"]),
        ("plus or minus", ["return self._size - 1"]),
        ("returned value", ["return None"]),
        ("range bound", ["return [text for k in range(size - 1) if k is not None]"]),
        ("comparison", ["return [text for k in range(size) if k is None]"]),
        ("constant plus one", ["def note(self, text, size, step=3):"]),
    ],
)
def test_each_operator(operator: str, after: list[str]) -> None:
    mutants = [mutant for mutant in mutants_of("box.py", SOURCE) if mutant.operator == operator]
    assert set(after) <= {mutant.after for mutant in mutants}
    assert all(compiles(mutant, SOURCE) and mutant.apply(SOURCE) != SOURCE for mutant in mutants)


def test_what_errors_say_and_docstrings_stay() -> None:
    changed = {line for mutant in mutants_of("box.py", SOURCE) for line in mutant.before.splitlines()}
    assert not any("ValueError" in line or "Its size" in line for line in changed)


def test_a_seed_draws_the_same_mutants_of_each_room_by_its_lines() -> None:
    rooms = ("bridge/core/sharding", "torch_impl/comm")
    drawn = draw(5, 40, rooms)
    assert drawn == draw(5, 40, rooms)
    assert drawn != draw(6, 40, rooms)
    counts = [sum(of == room for of, _ in drawn) for room in rooms]
    assert sum(counts) == pytest.approx(40, abs=1)
    assert counts[0] > counts[1] > 0


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("box", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions_that_are_imported_get_the_mutants_code(tmp_path: Path) -> None:
    file = tmp_path / "box.py"
    file.write_text(SOURCE)
    box = loaded(file).Box()
    box.note = lambda text, size: None
    box.size = 3
    assert box.size == 4
    # The setter returns before it does anything; then it is as written, and the getter subtracts.
    for after, size in (("return\nself._size = size", 4), ("return self._size - 1", 7)):
        (mutant,) = [m for m in mutants_of("box.py", SOURCE) if m.after == after]
        file.write_text(mutant.apply(SOURCE))
        assert replace_code(tmp_path, mutant.path, mutant.function)
        box.size = 8
        assert box.size == size
    (default,) = [m for m in mutants_of("box.py", SOURCE) if "step=3" in m.after]
    file.write_text(default.apply(SOURCE))
    assert replace_code(tmp_path, "box.py", "Box.note") is False


def test_functions_that_a_function_made_at_import_get_the_mutants_code(tmp_path: Path) -> None:
    source = "def scaled(by):\n    def scale(x):\n        return by * x\n    return scale\n\n\ndouble = scaled(2)\n"
    file = tmp_path / "scales.py"
    file.write_text(source)
    space: dict[str, Any] = {}
    exec(compile(source, str(file), "exec"), space)
    file.write_text(source.replace("by * x", "by + x"))
    assert replace_code(tmp_path, "scales.py", "scaled.scale")
    assert (space["double"](5), space["scaled"](3)(5)) == (7, 8)


def test_functions_say_that_they_were_reached(tmp_path: Path) -> None:
    file = tmp_path / "torch_impl" / "box.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").touch()
    file.write_text(SOURCE.replace("class Box", "from __future__ import annotations\n\n\nclass Box"))
    instrument(tmp_path)
    program = (
        "import pathlib; from torch_impl.box import Box; box = Box(); box.note('', 1);"
        "pathlib.Path('reached.test').open('r+b').write((1).to_bytes(4, 'little')); box.note('', 1); box.note('', 1)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    (tmp_path / "reached.order").write_text("tests/test_a.py::test_b\t0.5\n")
    record = Record()
    assert record.add_run(tmp_path) == 1
    assert record.tests == {"torch_impl/box.py:Box.note": {"tests/test_a.py::test_b"}}
    assert record.imported == {"torch_impl/box.py:Box.note"}
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record


BRANCHES = """\
def sign(x):
    if x > 0:
        return 1
    elif x < 0:
        return -1
    else:
        for _ in range(x):
            pass
        return 0
"""


def test_a_mutant_is_tried_by_the_tests_that_reach_its_block(tmp_path: Path) -> None:
    file = tmp_path / "torch_impl" / "signs.py"
    file.parent.mkdir()
    (file.parent / "__init__.py").touch()
    file.write_text(BRANCHES)
    instrument(tmp_path)
    program = (
        "import pathlib; from torch_impl.signs import sign\n"
        "for number, x in ((1, 5), (2, -5), (3, 0)):\n"
        "    pathlib.Path('reached.test').open('r+b').write(number.to_bytes(4, 'little'))\n"
        "    assert sign(x) == (x > 0) - (x < 0)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    (tmp_path / "reached.order").write_text("plus\t0.5\nminus\t0.5\nzero\t0.5\n")
    record = Record()
    record.add_run(tmp_path)
    tests = {mutant.line: record.reaching(mutant) for mutant in mutants_of("torch_impl/signs.py", BRANCHES)}
    # A condition belongs to the block around its statement; no test reaches the body of the loop.
    expected = {2: {"plus", "minus", "zero"}, 3: {"plus"}, 5: {"minus"}, 9: {"zero"}}
    assert {line: tests[line] for line in expected} == expected
    names = {name.partition("@")[2] for name in record.tests} - {""}
    assert names == {"3-3", "5-5", "7-9"}


def test_tests_that_do_little_else_come_first_and_of_each_file_one() -> None:
    record = Record({"a::1": 1.0, "a::2": 0.1, "b::1": 0.5, "test_box::1": 9.0})
    breadth = {"a::1": 5, "a::2": 5, "b::1": 5, "test_box::1": 500}
    assert by_promise(record, "torch_impl/box.py", record.seconds, breadth) == [
        "test_box::1",
        "a::2",
        "b::1",
        "a::1",
    ]


def test_equivalent_mutants_are_of_lines_that_are_there() -> None:
    for path, before, after in equivalents():
        lines = {line.strip() for line in (ROOT / path).read_text().splitlines()}
        assert set(before.splitlines()) <= lines, (path, before)
        assert before != after


def test_the_table_counts_rooms() -> None:
    (_, mutant), *_ = draw(1, 1, ("torch_impl/comm",))
    outcomes = [("a", mutant, Outcome(said)) for said in ("killed", "killed", "survived", "equivalent")]
    assert table(outcomes).splitlines()[-1].split()[-4:] == ["67", "%", "67", "%"]
