"""Writes the example of a command into a new folder."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

_FILES = Path(__file__).parent / "files"
EXAMPLES = tuple(sorted(path.name for path in _FILES.iterdir() if path.is_dir()))
"""The commands that have an example."""


def write_example(command: str, folder: str | os.PathLike[str]) -> str:
    """Write the example of a command, one of ``EXAMPLES``, into ``folder``. Returns its README: what to run next.

    Raises FileExistsError unless ``folder`` is new or an empty directory, FileNotFoundError where the directory that is
    to hold ``folder`` does not exist.
    """
    target = Path(folder)
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(
            f"{target} exists already: expected a new folder or an empty one for --example; choose another name"
        )
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"{target.absolute().parent} does not exist: expected the directory that is to hold {target}"
        )
    target.mkdir(exist_ok=True)
    for path in sorted((_FILES / command).iterdir()):
        if path.is_file():
            # Commands in a README name the folder as the user did, so they run from where the user stands.
            text = path.read_text(encoding="utf-8").replace("{folder}", shlex.quote(str(target)))
            (target / path.name).write_text(text, encoding="utf-8")
    if command == "convert":
        from bridge.examples.checkpoints import write_checkpoints

        write_checkpoints(target)
    return (target / "README.md").read_text(encoding="utf-8")
