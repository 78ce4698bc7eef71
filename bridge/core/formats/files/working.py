"""One attempt at writing a checkpoint: its working directory, and what an earlier attempt left there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bridge.core.formats.files.atomic import AtomicDirectory, CommitOrAbort, is_temporary
from bridge.core.formats.files.journal import JOURNAL_FILE, Journal, Key, remove_abandoned, resume
from bridge.core.formats.stores.folder import StoreFolder
from bridge.core.formats.stores.store import is_url
from bridge.core.formats.tensors.base import CheckpointError


@dataclass(frozen=True)
class Attempt:
    """One attempt at writing a checkpoint.

    replace: with one, an existing checkpoint is replaced at the commit; it is called with the checkpoint's path, and
    raises CheckpointError unless a checkpoint and nothing else is there (`bridge.core.formats.whole.replaceable`). key:
    with one, progress is noted in a journal, and a later attempt with the same key can resume. resume: take over what
    such an attempt has written, if there is any, and keep the working directory when this attempt fails. accompany:
    called with the complete working directory and the checkpoint's path just before the commit; it may write further
    files.
    """

    replace: Callable[[Path], None] | None = None
    key: Key = field(default_factory=dict)
    resume: bool = False
    accompany: Callable[[Path, Path], None] | None = None

    def __post_init__(self) -> None:
        if self.resume and not self.key:
            raise ValueError("resume needs a key that says what is resumed: expected one, got none")


class WorkingDirectory(CommitOrAbort):
    """The directory a checkpoint is written in; see `AtomicDirectory` and `Journal`.

    payload: the name of the one file in it that becomes the checkpoint; None where the directory does. `resumed`:
    whether an earlier attempt's directory was taken over. CheckpointError when there is one that cannot be.
    """

    def __init__(self, path: str | os.PathLike[str], attempt: Attempt, *, payload: str | None = None) -> None:
        target = Path(os.path.abspath(path))
        if is_temporary(target):
            raise CheckpointError(
                f"{target} is named like the directory of an unfinished checkpoint: expected a name without .tmp- and "
                "8 digits at its end, choose another"
            )
        self._replace = attempt.replace
        # One file has no place for others.
        self._accompany = attempt.accompany if payload is None else None
        self._require_replaceable(target)
        journal = resume(target, attempt.key) if attempt.resume else None
        if journal is not None and payload is not None and not (journal.directory / payload).exists():
            # Killed after the file was renamed: the chunks that the journal names are in the finished checkpoint.
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
            try:
                journal = Journal.create(self.temporary, attempt.key)
            except BaseException:
                # Not kept even if this attempt is to be resumable: without a journal nothing can be resumed.
                self._directory.abort()
                raise
        self._directory.keep = attempt.resume
        if journal is not None:
            journal.kept = attempt.resume
        self.journal = journal

    @property
    def ended(self) -> bool:
        return self._directory.ended

    def commit(self) -> None:
        """Let the checkpoint appear, and remove what earlier attempts left.

        CheckpointError when files that are no part of a checkpoint have come to the one that is to be replaced.
        """
        try:
            # A second time: hours may have passed since the first.
            self._require_replaceable(self.path)
            if self._accompany is not None:
                self._accompany(self.temporary, self.path)
        except BaseException:
            self.abort()
            raise
        self._directory.commit()
        if self.journal is not None:
            # Only now: a kill before the renaming leaves a directory that can still be resumed.
            if self.path.is_dir():
                (self.path / JOURNAL_FILE).unlink(missing_ok=True)
            self.journal.close()
            self.journal = None
            remove_abandoned(self.path)

    def place_beside(self, name: str) -> None:
        """Let the file of this name go beside the checkpoint, which is one file."""
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
    """Where a checkpoint is written until it is whole: a directory of this machine, or in the store itself."""
    if is_url(path):
        return StoreFolder(
            str(path),
            attempt.key,
            resume=attempt.resume,
            single=payload is not None,
            accompany=attempt.accompany,
        )
    return WorkingDirectory(path, attempt, payload=payload)
