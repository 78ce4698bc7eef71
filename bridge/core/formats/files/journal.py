"""The journal of an unfinished checkpoint: which chunks are safely on disk, so that a killed writer can be resumed.

    runs/step_10.tmp-3f9c0a1e/twinshard.journal
        {"source": "/runs/a", "mapping": "decoder", ...}     what is being written, and from what: the key
        ["model.w", 0, 2590166703]                           tensor, number of the chunk, CRC-32C of its elements
        ["model.w", 1, 328867073]

The directory belongs to one attempt (`WorkingDirectory`). A line is written once its chunk has been synced; a truncated
last line does not count. The writer locks the journal while it lives, so that nobody else resumes or removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self

from bridge.core.formats.files.atomic import (
    AtomicDirectory,
    CommitOrAbort,
    is_temporary,
    on_failure,
    remove,
    temporaries_of,
)
from bridge.core.formats.files.certificate import Certificate
from bridge.core.formats.files.manifest import certify
from bridge.core.formats.files.part_files import PARTS_FOLDER
from bridge.core.formats.stores.folder import StoreFolder, another_conversion
from bridge.core.formats.stores.store import is_url
from bridge.core.formats.tensors.base import CheckpointError

JOURNAL_FILE = "twinshard.journal"
_ABANDONED_SECONDS = 3600.0
_quoted = json.encoder.encode_basestring_ascii

Key = Mapping[str, str]
"""Entries that identify a conversion: two conversions with equal entries write the same bytes."""

Done = dict[str, dict[int, int]]
"""For each tensor, the CRC-32C of the chunks that are on disk, by chunk number."""


class InUse(CheckpointError):
    """Another process writes in the directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(f"{directory} is being written by another process: wait for it, or stop it")
        self.directory = directory

    def __reduce__(self) -> tuple[type[InUse], tuple[Path]]:
        return type(self), (self.directory,)


@dataclass
class Journal:
    """An open journal; it holds the lock until `close`. kept: whether it remains after a failed attempt."""

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
        with on_failure(lambda: os.close(descriptor)):
            if not _lock(descriptor):
                raise CheckpointError(
                    f"{directory} is locked by another process: expected to be its only user, try again"
                )
            _write(descriptor, json.dumps(dict(key)).encode() + b"\n")
        return cls(directory, descriptor)

    def record(self, entries: Iterable[tuple[str, int, int]]) -> None:
        """Note chunks that have been synced to disk: (tensor, number of the chunk, CRC-32C)."""
        # Same as `json.dumps` of each entry, in a quarter of the time: there may be 100,000 entries.
        lines = "".join([f"[{_quoted(name)}, {number}, {crc}]\n" for name, number, crc in entries])
        _write(self.descriptor, lines.encode())

    def close(self) -> None:
        """Release the lock."""
        os.close(self.descriptor)


def resume(path: Path, key: Key) -> Journal | None:
    """The journal of an unfinished checkpoint that was to become `path`, locked; None if there is none.

    CheckpointError if unfinished checkpoints exist but none has this key, or if a writer still uses one.
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
        noted, done, length = _parse((directory / JOURNAL_FILE).read_bytes())
        if noted == dict(key):
            # A truncated last line would be joined to the first line of this attempt.
            os.truncate(descriptor, length)
            return Journal(directory, descriptor, done)
        os.close(descriptor)
        if noted:
            differences.append((directory, noted))
    if differences:
        directory, noted = differences[-1]
        raise another_conversion(directory, key, noted)
    return None


def abandoned(path: Path) -> list[Path]:
    """Working directories that were to become `path`, and whose writers are gone."""
    directories = []
    for directory in temporaries_of(path):
        try:
            descriptor = os.open(directory / JOURNAL_FILE, os.O_RDWR)
        except (FileNotFoundError, NotADirectoryError):
            # No journal: a writer was killed while it removed a replaced checkpoint, or a writer has just made the
            # directory. Only the age distinguishes the two cases.
            if time.time() - directory.stat().st_mtime > _ABANDONED_SECONDS:
                directories.append(directory)
            continue
        except OSError:
            continue
        if _lock(descriptor) and not _writes_parts(directory):
            directories.append(directory)
        os.close(descriptor)
    return directories


def _writes_parts(directory: Path) -> bool:
    """Whether a process writes a part of the checkpoint; only the process that joins parts locks the directory."""
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


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it: a disk that is almost full accepts only a part."""
    while data:
        data = data[os.write(descriptor, data) :]


def _lock(descriptor: int) -> bool:
    try:
        # flock belongs to the open file: it is released when its process ends, in whatever way, and needs no clean-up
        # after a kill. Nobody waits for the lock: the caller reports who has it.
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
    # A kill truncates the last line, which then has no line break: its chunk is written again.
    for line in body.split(b"\n")[:-1]:
        try:
            name, chunk, crc = json.loads(line)
        except (ValueError, TypeError):
            break
        done.setdefault(name, {})[chunk] = crc
        length += len(line) + 1
    return key if isinstance(key, dict) else {}, done, length


@dataclass(frozen=True)
class Attempt:
    """One attempt at writing a checkpoint.

    replace: if given, the commit replaces an existing checkpoint. `replace` is called with the checkpoint's path, and
    raises CheckpointError unless the path contains a checkpoint and nothing else
    (`bridge.core.formats.whole.replaceable`). key: if given, progress is noted in a journal, and a later attempt with
    the same key can resume. resume: continue such an attempt, if there is one, and keep the working directory if this
    attempt fails. accompany: called with the complete working directory and the checkpoint's path just before the
    commit; it may write further files. certificate: for the manifest.
    """

    replace: Callable[[Path], None] | None = None
    key: Key = field(default_factory=dict)
    resume: bool = False
    accompany: Callable[[Path, Path], None] | None = None
    certificate: Certificate | None = None

    def __post_init__(self) -> None:
        if self.resume and not self.key:
            raise ValueError("resume: expected a key that identifies the conversion to resume, got none")

    def complete(self, single: bool, working: Path, target: Path) -> None:
        """Add what belongs to the checkpoint in this directory before it moves to ``target``."""
        # A single file has no room for companions.
        if self.accompany is not None and not single:
            self.accompany(working, target)
        if self.certificate is not None:
            certify(working, self.certificate)


class WorkingDirectory(CommitOrAbort):
    """The directory a checkpoint is written in; see `AtomicDirectory` and `Journal`.

    payload: the name of the one file in it that becomes the checkpoint; None if the directory does. `resumed`: whether
    an earlier attempt's directory was taken over. CheckpointError if there is one that cannot be taken over.
    """

    def __init__(self, path: str | os.PathLike[str], attempt: Attempt, *, payload: str | None = None) -> None:
        target = Path(os.path.abspath(path))
        if is_temporary(target):
            raise CheckpointError(
                f"{target} has a name like the directory of an unfinished checkpoint: expected a name that does not "
                "end in .tmp- and 8 digits, choose another"
            )
        self._replace = attempt.replace
        self._complete = partial(attempt.complete, payload is not None)
        self._require_replaceable(target)
        journal = resume(target, attempt.key) if attempt.resume else None
        if journal is not None and payload is not None and not (journal.directory / payload).exists():
            # The earlier attempt was killed after the rename: the journal's chunks are in the finished checkpoint.
            journal.close()
            shutil.rmtree(journal.directory)
            journal = None
        self.resumed = journal is not None
        try:
            self._directory = AtomicDirectory(
                target,
                replace=attempt.replace is not None,
                resumed=journal.directory if journal else None,
                payload=payload,
            )
        except BaseException:
            if journal is not None:
                journal.close()
            raise
        self.path, self.temporary = self._directory.path, self._directory.temporary
        if journal is None and attempt.key:
            # Not kept, even if this attempt should be resumable: without a journal nothing can be resumed.
            with on_failure(self._directory.abort):
                journal = Journal.create(self.temporary, attempt.key)
        self._directory.keep = attempt.resume
        if journal is not None:
            journal.kept = attempt.resume
        self.journal = journal

    @property
    def ended(self) -> bool:
        return self._directory.ended

    def commit(self) -> None:
        """Make the checkpoint appear, and remove everything that earlier attempts left.

        CheckpointError if files that do not belong to a checkpoint have been added to the one to replace.
        """
        with on_failure(self.abort):
            # Checked again: hours may have passed since the first check.
            self._require_replaceable(self.path)
            self._complete(self.temporary, self.path)
        self._directory.commit()
        if self.journal is not None:
            # Only now: a kill before the rename leaves a directory that can still be resumed.
            if self.path.is_dir():
                (self.path / JOURNAL_FILE).unlink(missing_ok=True)
            self.journal.close()
            self.journal = None
            for directory in abandoned(self.path):
                remove(directory)

    def place_beside(self, name: str) -> None:
        """Put the file of this name next to the checkpoint, which is one file."""
        self._directory.sidecar = name

    def _require_replaceable(self, path: Path) -> None:
        if self._replace is not None and os.path.lexists(path):
            self._replace(path)

    def abort(self) -> None:
        """Remove everything, or keep it to be resumed. Does nothing after commit or abort."""
        if not self._directory.ended:
            self._directory.abort()
            if self.journal is not None:
                self.journal.close()
                self.journal = None


def working_place(
    path: str | os.PathLike[str], attempt: Attempt, *, payload: str | None = None
) -> WorkingDirectory | StoreFolder:
    """Where a checkpoint is written until it is complete: a directory on this machine, or the store itself."""
    if is_url(path):
        single = payload is not None
        complete = partial(attempt.complete, single)
        return StoreFolder(str(path), attempt.key, resume=attempt.resume, single=single, complete=complete)
    return WorkingDirectory(path, attempt, payload=payload)
