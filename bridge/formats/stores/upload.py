"""A checkpoint written to an object store: converted into a directory of its own, then uploaded.

    1. data files, the manifest, other metadata     nothing reads a checkpoint by these alone
    2. the files by which it is found               .metadata, _METADATA, the index, commit_success.txt

Stores have no renaming: a checkpoint is there once the files of 2 are, and what an upload that fails has sent is
removed. What one that is killed has sent stays; with `resume` it is listed beforehand, and replaced by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from bridge.formats.base import CheckpointError
from bridge.formats.files.manifest import manifest_path
from bridge.formats.stores.store import open_store, store_errors, without_end
from bridge.formats.stores.temporary import TemporaryPlace, remove_abandoned

_FOUND_BY: Final = (
    *("_CHECKPOINT_METADATA", ".safetensors.index.json", ".metadata", "_METADATA", "commit_success.txt"),
)
"""Ends of the names of files that make a checkpoint, in the order in which they are sent."""

_SENDING: Final = "twinshard.sending"
"""In the temporary directory: sizes by name of the files that are being sent; locked by the process that does it."""


class Upload:
    """A place for a checkpoint that is to be at `url`; `path` is where it is to be written meanwhile.

    As a context manager: removes that place at the end, unless `resume`, in which case it is found again by an upload
    to the same URL, and an error leaves it. FileExistsError when something is at the URL, unless `resume` and it is
    a part of what such an upload was sending; FileNotFoundError without a bucket, as none is made; CheckpointError when
    one is still at it, or for a URL without a name. Temporary files are where
    `tempfile` has them (TMPDIR), and need the space of the checkpoint.
    """

    def __init__(self, url: str, *, resume: bool = False) -> None:
        self.url = without_end(url)
        name = self.url.rpartition("/")[2]
        if not name:
            raise CheckpointError(
                f"{url}: expected the URL of a new checkpoint, such as {url}step_40, got no name"
            )
        self._system, self._root = open_store(url)
        if self._in_bucket:
            self._require_bucket()
        self._keep = resume
        self._lock = -1
        self._place: TemporaryPlace | None = None
        self._sending: dict[str, int] = {}
        if resume:
            remove_abandoned()
            number = hashlib.sha256(self.url.encode()).hexdigest()[:16]
            self._directory = Path(tempfile.gettempdir(), f"twinshard-upload-{os.getuid()}-{number}")
            self._directory.mkdir(mode=0o700, exist_ok=True)
            # Anybody may make a directory of this name in a shared place.
            if self._directory.is_symlink() or self._directory.stat().st_uid != os.getuid():
                raise CheckpointError(
                    f"expected {self._directory} to be a directory of this user, found another's"
                )
            self._sending = self._claim()
            try:
                self._require_nothing()
            except BaseException:
                self._keep = len(os.listdir(self._directory)) > 1
                self.__exit__()
                raise
        else:
            self._require_nothing()
            self._place = TemporaryPlace("upload")
            self._directory = self._place.path
        self.path = self._directory / name

    def publish(self, progress: Callable[[int, int], None] = lambda sent, total: None) -> None:
        """Send the checkpoint, telling how many bytes of all have been sent.

        OSError when the store refuses: what was sent is removed again.
        """
        files = [self.path] if self.path.is_file() else [p for p in self.path.rglob("*") if p.is_file()]
        if self.path.is_file() and manifest_path(self.path).is_file():
            files.append(manifest_path(self.path))
        files.sort(key=lambda file: (_rank(file, self.path), str(file)))
        self._require_nothing()
        above = self._root.rpartition("/")[0]
        names = {file: f"{above}/{file.relative_to(self._directory)}" for file in files}
        sizes = {name: file.stat().st_size for file, name in names.items()}
        self._remove(list(self._sending))
        self._note(sizes)
        sent: list[str] = []
        before, total = 0, sum(sizes.values())
        try:
            for file, name in names.items():
                with store_errors(
                    f"cannot write {self.url.rpartition('/')[0]}/{file.relative_to(self._directory)}"
                ):
                    if not self._in_bucket:
                        self._system.makedirs(name.rpartition("/")[0], exist_ok=True)
                    sent.append(name)
                    self._system.put_file(str(file), name, callback=_told(progress, before, total))
                before += sizes[name]
                progress(before, total)
        except BaseException:
            self._remove(sent)
            self._note({})
            raise
        self._keep = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._place is not None:
            self._place.close()
        elif not self._keep:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _claim(self) -> dict[str, int]:
        """Take the directory for this process; what one before it was sending."""
        self._lock = os.open(self._directory / _SENDING, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise CheckpointError(
                f"{self.url} is being written by another process: wait for it, or stop it"
            ) from error
        with suppress(ValueError):
            return json.loads(os.pread(self._lock, os.fstat(self._lock).st_size, 0))
        return {}

    def _note(self, sizes: Mapping[str, int]) -> None:
        if self._lock >= 0:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, json.dumps(sizes).encode(), 0)
            os.fsync(self._lock)

    def _remove(self, names: list[str]) -> None:
        for name in reversed(names):
            with store_errors(f"cannot remove {name}, which an upload that failed has left"):
                if self._system.exists(name):
                    self._system.rm_file(name)

    @property
    def _in_bucket(self) -> bool:
        """Whether the place is in an object store, which has no directories; making one there makes a bucket.

        Paths of file systems begin with their root.
        """
        return not self._root.startswith("/")

    def _require_bucket(self) -> None:
        parts = self._root.split("/")
        try:
            there = any(self._system.exists("/".join(parts[: end + 1])) for end in range(len(parts)))
        except Exception:
            # One may be allowed to write into a bucket that one may not look at.
            return
        if not there:
            raise FileNotFoundError(
                f"expected a bucket that is there in {self.url}, found no bucket {parts[0]!r} (or none that these "
                "credentials may list): correct the name, or create the bucket first; none is created here"
            )

    def _require_nothing(self) -> None:
        self._system.invalidate_cache()
        with store_errors(f"cannot look at {self.url}"):
            there = self._system.find(self._root, detail=True) if self._system.exists(self._root) else {}
        found = {name: info.get("size") for name, info in there.items()}
        if not found or (found.keys() <= self._sending.keys() and not self._sent(found)):
            return
        raise FileExistsError(
            f"expected nothing at {self.url}, found something: remove it first or choose another name"
        )

    def _sent(self, found: Mapping[str, int | None]) -> bool:
        """Whether all that was being sent has arrived below the URL."""
        below = (n for n in self._sending if n == self._root or n.startswith(f"{self._root}/"))
        return all(found.get(name) == self._sending[name] for name in below)


def _told(progress: Callable[[int, int], None], before: int, total: int) -> Any:
    """fsspec's callback for one file, after so many bytes of others."""
    from fsspec.callbacks import Callback

    class Told(Callback):
        def call(self, *_: object, **__: object) -> None:
            progress(min(before + self.value, total), total)

    return Told()


def _rank(file: Path, checkpoint: Path) -> int:
    """Files by which the checkpoint is found come last; one file alone comes after its manifest."""
    if file == checkpoint:
        return len(_FOUND_BY) + 1
    return 1 + next((k for k, end in enumerate(_FOUND_BY) if file.name.endswith(end)), -1)
