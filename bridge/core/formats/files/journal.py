"""The journal of an unfinished checkpoint: which chunks are safely on disk, so that a killed writer can be resumed.

    runs/step_10.tmp-3f9c0a1e/twinshard.journal
        {"source": "/runs/a", "mapping": "decoder", ...}     what is being written, from what: the key
        ["model.w", 0, 2590166703]                           tensor, number of the chunk, CRC-32C of its elements
        ["model.w", 1, 328867073]

A line is written once its chunk has been synced; a last line cut short is not counted. The writer locks the journal
while it lives, so that nobody else resumes or removes the directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from bridge.core.formats.files.atomic import remove, temporaries_of
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.tensors.share import PARTS_FOLDER

JOURNAL_FILE = "twinshard.journal"
_ABANDONED_SECONDS = 3600.0
_quoted = json.encoder.encode_basestring_ascii

Key = Mapping[str, str]
"""Entries that identify a conversion: two conversions that agree in all of them write the same bytes."""

Done = dict[str, dict[int, int]]
"""For each tensor the CRC-32C of the chunks that are on disk, by the number of the chunk."""


class InUse(CheckpointError):
    """Another process writes in the directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"{directory} is being written by another process: wait for it, or stop it")
        self.directory = directory

    def __reduce__(self) -> tuple[type[InUse], tuple[Path]]:
        return type(self), (self.directory,)


@dataclass
class Journal:
    """An open journal; it holds the lock until `close`. kept: whether it stays when the attempt fails."""

    directory: Path
    descriptor: int
    done: Done = field(default_factory=dict)
    kept: bool = False

    @classmethod
    def create(cls, directory: Path, key: Key) -> Self:
        """A new journal in a working directory, locked. CheckpointError when another process holds the lock."""
        descriptor = os.open(
            directory / JOURNAL_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644
        )
        try:
            if not _lock(descriptor):
                raise CheckpointError(
                    f"{directory} is locked by another process: expected to be its only user, try again"
                )
            _write(descriptor, json.dumps(dict(key)).encode() + b"\n")
        except BaseException:
            os.close(descriptor)
            raise
        return cls(directory, descriptor)

    def record(self, entries: Iterable[tuple[str, int, int]]) -> None:
        """Note chunks that have been synced to disk: (tensor, number of the chunk, CRC-32C)."""
        # As `json.dumps` of each, in a quarter of its time: there may be 100,000 entries.
        lines = "".join([f"[{_quoted(name)}, {number}, {crc}]\n" for name, number, crc in entries])
        _write(self.descriptor, lines.encode())

    def close(self) -> None:
        """Release the lock."""
        os.close(self.descriptor)


def resume(path: Path, key: Key) -> Journal | None:
    """The journal of an unfinished checkpoint that was to become `path`, locked; None when there is none.

    CheckpointError when unfinished checkpoints are there but none has this key, or when a writer still uses one.
    """
    differences = []
    for directory in temporaries_of(path):
        try:
            descriptor = os.open(directory / JOURNAL_FILE, os.O_RDWR | os.O_APPEND)
        except OSError:
            continue
        if not _lock(descriptor):
            os.close(descriptor)
            raise InUse(directory)
        found, done, length = _parse((directory / JOURNAL_FILE).read_bytes())
        if found == dict(key):
            os.truncate(descriptor, length)
            return Journal(directory, descriptor, done)
        os.close(descriptor)
        if found:
            differences.append((directory, found))
    if differences:
        directory, found = differences[-1]
        parts = [
            f"{name}: expected {key.get(name, 'nothing')}, found {found.get(name, 'nothing')}"
            for name in dict.fromkeys((*key, *found))
            if key.get(name) != found.get(name)
        ]
        raise CheckpointError(
            f"{directory} is unfinished, but it is of another conversion ({'; '.join(parts)}): resume that conversion "
            "with its own source and options, or start anew without resuming"
        )
    return None


def abandoned(path: Path) -> list[Path]:
    """Working directories of what was to become `path`, whose writers are gone."""
    found = []
    for directory in temporaries_of(path):
        try:
            descriptor = os.open(directory / JOURNAL_FILE, os.O_RDWR)
        except (FileNotFoundError, NotADirectoryError):
            # No journal: a writer was killed while it removed a replaced checkpoint, or a writer has made the directory
            # this moment. Only the age tells the two apart.
            if time.time() - directory.stat().st_mtime > _ABANDONED_SECONDS:
                found.append(directory)
            continue
        except OSError:
            continue
        if _lock(descriptor) and not _writes_parts(directory):
            found.append(directory)
        os.close(descriptor)
    return found


def _writes_parts(directory: Path) -> bool:
    """Whether a process writes a part of the checkpoint; only who joins the parts locks the directory itself."""
    for journal in (directory / PARTS_FOLDER).glob(f"*/{JOURNAL_FILE}"):
        try:
            descriptor = os.open(journal, os.O_RDWR)
        except OSError:
            continue
        free = _lock(descriptor)
        os.close(descriptor)
        if not free:
            return True
    return False


def remove_abandoned(path: Path) -> None:
    """Remove what earlier attempts to write `path` left behind."""
    for directory in abandoned(path):
        remove(directory)


def _write(descriptor: int, data: bytes) -> None:
    """All of it: a disk that is almost full takes a part."""
    while data:
        data = data[os.write(descriptor, data) :]


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _parse(data: bytes) -> tuple[dict[str, str], Done, int]:
    """Key and finished chunks of a journal, and the length of its whole lines; no key if the journal is damaged."""
    head, newline, body = data.partition(b"\n")
    length = len(head) + len(newline)
    try:
        key = json.loads(head)
    except ValueError:
        return {}, {}, 0
    done: Done = {}
    for line in body.split(b"\n")[:-1]:
        try:
            name, chunk, crc = json.loads(line)
        except (ValueError, TypeError):
            break
        done.setdefault(name, {})[chunk] = crc
        length += len(line) + 1
    return key if isinstance(key, dict) else {}, done, length
