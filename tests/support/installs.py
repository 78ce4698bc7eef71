"""Whether what the Makefile installs can be installed from nothing: ``python -m tests.support.installs [WORDS]``.

pip resolves each installation anew (``--dry-run --ignore-installed``) and installs nothing. WORDS choose those whose
names have one of them. pip downloads the metadata of packages and no wheels but those without separate metadata: each
line tells the seconds that its installation took.

The newest ends of both frameworks need the newest Python, whose own pip must resolve them: they are skipped where
that Python is not found.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import versions

ROOT = versions.ROOT
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]["optional-dependencies"]


class Install(NamedTuple):
    """One call of ``pip install`` of the Makefile or of ``versions.py``; end: whose interpreter resolves it."""

    name: str
    end: str
    arguments: tuple[str, ...]


def installs(scratch: Path) -> Iterator[Install]:
    """Every installation of a make target, and every extra by itself, at each end of the versions.

    scratch: folder for the constraints that the Makefile derives for torchtune.
    """
    pinned = ("-c", "constraints.txt")
    yield Install("make relay, make test", "low", (*pinned, ".[all,dev]"))
    yield Install("make test-programs", "low", (*pinned, ".[programs]"))
    looser = scratch / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    looser.write_text("".join(line for line in lines if not line.startswith("antlr4")), encoding="utf-8")
    for extra in ("torchtune", "program-sources"):
        yield Install(f"make test-programs: {extra}", "low", ("--no-deps", "-c", str(looser), *EXTRAS[extra]))
    compilers = EXTRAS["gpu-compiler"] + EXTRAS["tpu-compiler"]
    yield Install("make compilers", "low", ("--no-deps", *pinned, *compilers))
    for end in ("low", "new"):
        yield Install(f"make test-versions: {end}", end, (*versions.INSTALL[end], ".[all,test]"))
        for extra in EXTRAS:
            # These two are read, not installed: they need packages that only GPUs can use.
            no_deps = ("--no-deps", *EXTRAS[extra]) if extra in ("torchtune", "program-sources") else None
            yield Install(f"extra {extra}: {end}", end, no_deps or (f".[{extra}]",))


def resolves(install: Install) -> str:
    """The error of pip, or nothing."""
    command = [
        versions.interpreter(install.end),
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "-q",
    ]
    # A user's or a machine's settings may hold packages back.
    clean = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        [*command, *install.arguments], cwd=ROOT, env=clean, capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stderr


def main(words: list[str]) -> int:
    """Resolve the installations one after the other; 1 when any fails."""
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for install in installs(Path(scratch)):
            if words and not any(word in install.name for word in words):
                continue
            started = time.monotonic()
            try:
                error = resolves(install)
            except SystemExit as missing:
                print(f"skipped: {install.name}: {missing}", flush=True)
                continue
            failed += bool(error)
            seconds = time.monotonic() - started
            print(
                f"{'failed' if error else 'resolved'}: {install.name}, {seconds:.0f} s\n{error}".rstrip(),
                flush=True,
            )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
