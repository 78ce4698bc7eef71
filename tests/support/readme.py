"""The commands of README.md and what they print; ``python -m tests.support.readme [JOB...]`` refreshes the output.

A block of ``bash`` holds commands. The block of ``text`` after it holds their output on a terminal of 80 columns, in
which a line "..." stands for lines that are left out.
"""

from __future__ import annotations

import difflib
import itertools
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
_JOB = re.compile(r"```bash\n(?P<commands>.*?)```\n\n```text\n(?P<shown>.*?)```", re.DOTALL)
_LEFT_OUT = "..."


@dataclass(frozen=True)
class Job:
    """Commands of one block, and the lines that the README shows of their output."""

    commands: tuple[str, ...]
    shown: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.commands[0].split()[1]


def jobs() -> list[Job]:
    """The blocks of README.md in their order."""
    return [
        Job(tuple(match["commands"].splitlines()), tuple(match["shown"].splitlines()))
        for match in _JOB.finditer(README.read_text(encoding="utf-8"))
    ]


def run(command: str, folder: Path) -> tuple[int, list[str]]:
    """Exit status and standard output of a command that runs in ``folder``, on a terminal of 80 columns."""
    environment = {
        **os.environ,
        "COLUMNS": "80",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
    }
    terminal, output = pty.openpty()
    with subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, stdout=output, stderr=subprocess.DEVNULL
    ) as process:
        os.close(output)
        printed = bytearray()
        while True:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            printed += part
        os.close(terminal)
    return process.returncode, [line.rstrip() for line in printed.decode().splitlines()]


def comparable(text: str, job: Job) -> str:
    """The words of ``text`` without times and without the numbers that depend on the machine."""
    text = re.sub(r"in [\d.]+ s \(.*?/s\)", "in # s", " ".join(text.split()))
    if job.name == "parity":
        # The size of an error depends on the machine. The cause of the error does not.
        text = re.sub(r"(?<!epsilon )(?<!\S)\d[\d.]*(e[+-]\d+)?(?!\S)", "#", text)
    return text


def missing(job: Job, printed: list[str]) -> list[str]:
    """The passages of the README, from one "..." to the next, that were not printed, or not in this order.

    Words are compared, since a narrow terminal breaks lines between words.
    """
    text = f" {comparable(' '.join(printed), job)} "
    place, wrong = 0, []
    for left_out, lines in itertools.groupby(job.shown, _LEFT_OUT.__eq__):
        if left_out:
            continue
        passage = comparable(" ".join(lines), job)
        found = text.find(f" {passage} ", place)
        if found < 0:
            wrong.append(passage)
        else:
            place = found + len(passage)
    return wrong


def main(names: list[str]) -> None:
    """Replace each shown line by the most similar printed line, for the jobs with these names, or for all jobs."""
    text = README.read_text(encoding="utf-8")
    with TemporaryDirectory() as folder:
        for job in jobs():
            if names and job.name not in names:
                continue
            printed = [line for command in job.commands for line in run(command, Path(folder))[1]]
            rest, lines = list(printed), []
            for shown in job.shown:
                close = difflib.get_close_matches(shown, rest, 1, 0.3) if shown != _LEFT_OUT else [shown]
                if not close:
                    print(f"{job.name}: nothing printed is like {shown!r}")
                    continue
                lines += close
                if shown != _LEFT_OUT:
                    rest = rest[rest.index(close[0]) + 1 :]
            old, new = ("\n".join(lines) for lines in (job.shown, lines))
            text = text.replace(f"```text\n{old}\n```", f"```text\n{new}\n```")
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
