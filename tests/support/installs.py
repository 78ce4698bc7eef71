"""Check that every installation of the Makefile resolves: ``python -m tests.support.installs [WORDS]``.

uv resolves each installation for the Python of its end and installs nothing. WORDS choose installations whose names
contain one of them. Each line shows the seconds of its resolution. If uv is not on the path, the script downloads it.

pip takes minutes for each installation, because it downloads whole wheels if an index has no metadata files. uv reads
the metadata at the ends of wheels and needs seconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
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


LIMIT_S = 300
"""An installation fails after this many seconds. uv took 0 to 80 s on two busy cores."""


class Install(NamedTuple):
    """One call of ``pip install`` in the Makefile or in ``versions.py``.

    end: the end of the versions, which decides the Python. requirements: in pip's syntax. options: for the resolution.
    """

    name: str
    end: str
    requirements: tuple[str, ...]
    options: tuple[str, ...] = ()


def installs(scratch: Path) -> Iterator[Install]:
    """Every installation of a make target, and every extra alone, at each end of the versions.

    scratch: a folder for the constraints that the Makefile derives for torchtune.
    """
    pinned = ("-c", "constraints.txt")
    yield Install("make relay, make test", "low", (".[all,dev]",), pinned)
    yield Install("make docs", "low", (".[docs]",), pinned)
    yield Install("make test-programs", "low", (".[programs]",), pinned)
    looser = scratch / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    looser.write_text("".join(line for line in lines if not line.startswith("antlr4")), encoding="utf-8")
    for extra in ("torchtune", "program-sources"):
        options = ("--no-deps", "-c", str(looser))
        yield Install(f"make test-programs: {extra}", "low", tuple(EXTRAS[extra]), options)
    compilers = (*EXTRAS["gpu-compiler"], *EXTRAS["tpu-compiler"])
    yield Install("make compilers", "low", compilers, ("--no-deps", *pinned))
    for end in ("low", "new"):
        constraints = tuple(versions.INSTALL[end]) if "-c" in versions.INSTALL[end] else ()
        yield Install(f"make test-versions: {end}", end, (".[all,test]",), constraints)
        for extra in EXTRAS:
            # Tests read these two without their dependencies, which only GPUs can use.
            if extra in ("torchtune", "program-sources"):
                yield Install(f"extra {extra}: {end}", end, tuple(EXTRAS[extra]), ("--no-deps",))
            else:
                yield Install(f"extra {extra}: {end}", end, (f".[{extra}]",))


def fetch_uv(scratch: Path) -> str:
    """The path of uv: the installed uv, or a download in ``scratch``."""
    if installed := shutil.which("uv"):
        return installed
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(scratch), "uv"], check=True)
    return str(scratch / "bin" / "uv")


def resolve(uv: str, install: Install) -> str:
    """uv's error, or an empty string."""
    command = [uv, "pip", "compile", "-q", "-", "--python-version", versions.PYTHONS[install.end]]
    # Settings of the user or the machine could hide packages.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    try:
        done = subprocess.run(
            [*command, *install.options],
            cwd=ROOT,
            env={**clean, "UV_NO_CONFIG": "1"},
            input="\n".join(install.requirements),
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"no answer after {LIMIT_S} s"
    return "" if done.returncode == 0 else done.stderr


def main(words: list[str]) -> int:
    """Resolve the installations one after another. Returns 1 if any fails."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        uv = fetch_uv(scratch)
        for install in installs(scratch):
            if words and not any(word in install.name for word in words):
                continue
            started = time.monotonic()
            error = resolve(uv, install)
            failed += bool(error)
            result, seconds = "failed" if error else "resolved", time.monotonic() - started
            print(f"{result}: {install.name}, {seconds:.0f} s\n{error}".rstrip(), flush=True)
    return bool(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.support.installs", description=__doc__)
    parser.add_argument(
        "words", nargs="*", help="parts of names of installations; default: all installations"
    )
    sys.exit(main(parser.parse_args().words))
