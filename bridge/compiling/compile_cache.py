"""Answers of compilers, kept on disk by the hash of everything that an answer depends on.

An entry is ``<key>.json``, and next to it the texts that its answer names. Entries are written whole or not at all, and
an unreadable entry counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Version of the entries: answers of other versions have other fields, so their keys must differ.
VERSION = 1


def cache_folder() -> Path:
    """``twinshard`` below ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "twinshard" / "compiled"


def key_of(parts: Iterable[str]) -> str:
    """A key for the texts that an answer depends on, such as a program, a target and versions."""
    digest = hashlib.sha256(f"twinshard {VERSION}".encode())
    for part in parts:
        # Digests have one length, so that ("ab", "c") and ("a", "bc") have different keys.
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()[:32]


def load(key: str) -> dict[str, Any] | None:
    """The answer, if its texts still exist; None if there is no readable answer."""
    try:
        entry = json.loads((cache_folder() / f"{key}.json").read_text(encoding="utf-8"))
        answer = entry["answer"]
        whole = entry["version"] == VERSION and entry["digest"] == _digest(answer)
        return answer if whole and all(Path(path).is_file() for path in answer["programs"].values()) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save(key: str, answer: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """Store ``answer`` and the ``texts`` by name. Returns the answer with ``programs``, the paths of the texts."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    programs = {name: folder / f"{key}.{name}.hlo" for name in texts}
    for name, text in texts.items():
        _write(programs[name], text)
    answer = {**answer, "programs": {name: str(path) for name, path in programs.items()}}
    entry = {"version": VERSION, "digest": _digest(answer), "answer": answer}
    _write(folder / f"{key}.json", json.dumps(entry, indent=1) + "\n")
    return answer


def _digest(answer: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    # Several commands may compile the same step at once: each writes its own file and renames it.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
