"""README.md: short, its commands run as they stand, and they print what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.readme import README, Job, comparable, jobs, missing, run

JOBS = {job.name: job for job in jobs()}


def test_the_readme_is_short_and_has_three_jobs() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= 600
    assert [*JOBS] == ["parity", "convert", "plan"]
    assert all(len(job.commands) == 3 for job in JOBS.values())
    assert text.count("```bash") == 3, "each block of commands has a block of output after it"
    assert all(len(line) <= 80 for job in JOBS.values() for line in job.shown)
    pictures = re.findall(r"!\[([^\]]*)\]", text)
    assert pictures
    assert all(len(alternative.split()) > 10 for alternative in pictures)


@pytest.mark.parametrize("name", [pytest.param("parity", marks=pytest.mark.slow), "convert", "plan"])
def test_the_commands_of_a_job_print_what_the_readme_shows(name: str, tmp_path: Path) -> None:
    statuses, printed = zip(*(run(command, tmp_path) for command in JOBS[name].commands), strict=True)
    assert statuses == {"parity": (0, 1, 0), "convert": (0, 0, 1), "plan": (0, 0, 0)}[name]
    assert missing(JOBS[name], [line for lines in printed for line in lines]) == []
    if name == "parity":
        # As the README says of the corrected port.
        assert run(JOBS[name].commands[1], tmp_path)[0] == 0


def test_passages_that_were_not_printed_are_told() -> None:
    job = Job(("twinshard convert --example x",), ("...", "a 1", "b", "...", "d"))
    assert missing(job, ["first", "a   1", "b", "c", "d"]) == []
    assert missing(job, ["a 1 b", "d"]) == []
    assert missing(job, ["a 2", "b", "d"]) == ["a 1 b"]
    assert missing(job, ["a 1", "c", "b", "d"]) == ["a 1 b"]
    assert missing(job, ["d", "a 1", "b"]) == ["d"]
    assert missing(job, ["a 1", "bb", "d"]) == ["a 1 b"]


def test_only_times_and_what_depends_on_the_machine_may_differ() -> None:
    parity, convert = (Job((f"twinshard {name} --example x",), ()) for name in ("parity", "convert"))
    line = "norm  introduced: epsilon 1e-05  {}  65.38  214"
    assert comparable(line.format("5.1e-06"), parity) == comparable(line.format("4.9e-06"), parity)
    assert comparable("epsilon 1e-05 71.1", parity) != comparable("epsilon 1e-06 71.1", parity)
    assert comparable("321 kB in 0.5 s (684 kB/s)", convert) == comparable(
        "321 kB in 12.0 s (7 kB/s)", convert
    )
    assert comparable("321 kB", convert) != comparable("322 kB", convert)
