"""Writes the example of a command into a new folder."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

FILES = Path(__file__).parent / "files"


def write_example(command: str, folder: str | os.PathLike[str]) -> str:
    """Copy the example of a command into ``folder``. Returns its README, which says what to run next.

    Raises FileExistsError unless ``folder`` is new or an empty directory, and FileNotFoundError if the parent directory
    of ``folder`` does not exist.
    """
    target = Path(folder)
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} exists already: expected a new or an empty folder for --example")
    if not (parent := target.absolute().parent).is_dir():
        raise FileNotFoundError(f"{parent} does not exist: expected the directory for {target}")
    shutil.copytree(FILES / command, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    # Commands name the folder as the user did, so they run from where the user stands.
    text = (target / "README.md").read_text(encoding="utf-8").replace("{folder}", shlex.quote(str(target)))
    (target / "README.md").write_text(text, encoding="utf-8")
    return text
