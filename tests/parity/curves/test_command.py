"""`twinshard curves`: its arguments, output, picture and exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bridge.commands.curves import spread
from bridge.commands.main import app
from tests.parity.curves.test_compare import BASE, experiment, from_step, write


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["curves", *map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "spelled"),
    [
        ("A A2 --against B B2 --metric m", "A A2 --against B --against B2 --metric m"),
        ("--against B B2 --json A", "--against B --against B2 --json A"),
        ("--against B --against B2 B3", "--against B --against B2 --against B3"),
        ("--against=B B2 -- A", "--against=B --against B2 -- A"),
        ("A --rtol 1 A2", "A --rtol 1 A2"),
    ],
)
def test_all_values_after_against_are_its_own(arguments: str, spelled: str) -> None:
    assert spread(arguments.split()) == spelled.split()


def test_verdict_picture_and_status_of_experiments(tmp_path: Path) -> None:
    a = experiment(tmp_path, "a", 3, 1)
    same, other = experiment(tmp_path, "s", 3, 2), experiment(tmp_path, "o", 3, 3, from_step(90, 1.02))
    result = call(*a, "--against", *same)
    assert result.exit_code == 0
    assert "same experiment: loss of 3 + 3 runs, 300 common steps 0 to 299" in result.stdout
    picture = tmp_path / "curves.png"
    result = call(*a, "--against", *other, "--out", picture)
    assert result.exit_code == 1
    assert "beyond the band of seeds, B is +" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    result = call(*a, "--against", *other, "--json")
    table = json.loads(result.stdout)
    assert (result.exit_code, table["same"], table["noise"]["method"]) == (1, False, "t")
    assert abs(table["departures"][0]["first"] - 90) <= 8


def test_single_runs(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.jsonl", BASE), write(tmp_path / "b.jsonl", BASE * from_step(20, 1 + 1e-6))
    assert call(a, "--against", b, "--rtol", "1e-5").exit_code == 0
    result = call(a, "--against", b)
    assert result.exit_code == 1
    assert "different from step 20" in result.stdout
    assert "Noise was not estimated: one run on each side." in result.stdout


def test_misuse_has_status_two_and_one_message(tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", BASE)
    for arguments, said in [
        ((a, "--against", tmp_path / "none.jsonl"), "none.jsonl': No such file"),
        ((a, "--against", a, "--metric", "accuracy"), "expected the metric 'accuracy', found loss"),
        (
            (a, "--against", a, "--out", tmp_path / "picture.xyz"),
            "picture.xyz: expected a name that ends in .",
        ),
        ((a, "--against", a, "--window", "4"), "window: expected an odd number of steps, found 4"),
        ((a,), "--against"),
    ]:
        result = call(*arguments)
        assert result.exit_code == 2
        assert said in result.stderr
        assert "Traceback" not in result.stderr
