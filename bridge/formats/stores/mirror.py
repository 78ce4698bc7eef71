"""A checkpoint in an object store as local files that are filled when they are read.

    store                       mirror, a temporary directory
    .metadata       4 kB        .metadata       there from the beginning, as all metadata
    __0_0.distcp    80 GB       __0_0.distcp    as long, but sparse: ##....##........####......
                                                                     blocks of 8 MiB, fetched when a range needs them

Readers map these files, and tensorstore opens them, as if they were local. Fetched blocks stay until `close`; those of
a process that was killed, until the next mirror or upload (`temporary.py`).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Self

from bridge.formats.base import CheckpointError
from bridge.formats.stores.store import open_store, store_errors, without_end
from bridge.formats.stores.temporary import TemporaryPlace

BLOCK: Final = 8 << 20
"""Bytes fetched at least: a request costs as much time as some of them."""

_REQUEST_BLOCKS: Final = 8
_MAX_METADATA: Final = 1 << 30
_INDEX_SUFFIX: Final = ".index.json"
_METADATA_ENDS: Final = (
    *(".json", ".metadata", "_METADATA", "_CHECKPOINT_METADATA", "_sharding", "manifest.ocdbt", ".zarray"),
    *("commit_success.txt", "orbax.checkpoint"),
)


@dataclass(frozen=True)
class _File:
    """A file of the store; `present`: the blocks that are here, False for those on their way."""

    name: str
    size: int
    present: dict[int, bool] = field(default_factory=dict)


class Mirror:
    """The files of the checkpoint at a URL; `path` is where they are. Thread-safe, and a context manager.

    FileNotFoundError when nothing is there; CheckpointError for names that lead out of the directory, or that cannot
    be files beside each other; OSError for what the store refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = without_end(url)
        self._system, root = open_store(url)
        listing, home = self._listing(root)
        self._digest = hashlib.sha256(
            repr(sorted((n, self._version(i)) for n, i in listing.items())).encode()
        ).hexdigest()[:16]
        self._ready = threading.Condition()
        self._place = TemporaryPlace("mirror")
        self._directory = self._place.path
        try:
            self.path = self._directory / (PurePosixPath(root).name or "root")
            below = self._directory if root in listing else self.path
            self._files = {below / self._relative(n, home): _File(n, i["size"]) for n, i in listing.items()}
            self._make()
            self._fetch_metadata()
        except BaseException:
            self.close()
            raise

    @property
    def fingerprint(self) -> str:
        """A digest of names, sizes and versions, as far as the store tells them."""
        return self._digest

    def renamed(self, text: str) -> str:
        """A message with the names of files in the store."""
        home = self.path.parent
        store = self.url.rpartition("/")[0]
        return text.replace(f"{home}/", f"{store}/")

    def fetch(self, path: Path, start: int, stop: int) -> None:
        """Make bytes [start, stop) of a file present. OSError when the store has no such file or does not give them."""
        file = self._files.get(path)
        if file is None:
            raise FileNotFoundError(f"expected one of the files of {self.url}, got {self.renamed(str(path))}")
        number, last = start // BLOCK, -(-min(stop, file.size) // BLOCK)
        while number < last:
            count = self._claim(file, number, last)
            if count:
                self._load(path, file, number, count)
            number += count or 1

    def fetch_all(self) -> None:
        """Make all files present."""
        for path, file in self._files.items():
            self.fetch(path, 0, file.size)

    def close(self) -> None:
        """Remove the files."""
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim(self, file: _File, number: int, last: int) -> int:
        """How many absent blocks from here on this thread is to load; 0 once this one is present."""
        with self._ready:
            # Another thread is fetching this block: waiting costs less than a second request.
            while file.present.get(number) is False:
                self._ready.wait()
            end = number
            while end < min(last, number + _REQUEST_BLOCKS) and end not in file.present:
                file.present[end] = False
                end += 1
            return end - number

    def _load(self, path: Path, file: _File, number: int, count: int) -> None:
        start, stop = number * BLOCK, min((number + count) * BLOCK, file.size)
        blocks = range(number, number + count)
        try:
            with store_errors(f"cannot read {self.renamed(str(path))}"):
                data = self._system.cat_file(file.name, start=start, end=stop)
            if len(data) != stop - start:
                raise OSError(
                    f"{self.renamed(str(path))}: expected {stop - start} bytes at {start}, got {len(data)}: did it "
                    "change meanwhile?"
                )
            _write(path, start, data)
        except BaseException:
            # Absent again, so that a waiting thread tries, and gets an error of its own if the store still fails.
            with self._ready:
                for block in blocks:
                    del file.present[block]
                self._ready.notify_all()
            raise
        with self._ready:
            file.present.update(dict.fromkeys(blocks, True))
            self._ready.notify_all()

    def _listing(self, root: str) -> tuple[Mapping[str, Mapping[str, Any]], str]:
        """Files by their name in the store, and the directory there that they are below."""
        parent = root.rpartition("/")[0]
        with store_errors(f"cannot list {self.url}"):
            found = self._system.find(root, detail=True)
            if root.endswith(_INDEX_SUFFIX):
                # An index lists files beside it.
                found |= self._system.find(parent, maxdepth=1, detail=True)
            elif set(found) == {root}:
                manifest = f"{root}.manifest.json"
                found |= self._system.find(manifest, detail=True) if self._system.isfile(manifest) else {}
        files = {n: i for n, i in found.items() if i["type"] == "file" and not n.endswith("/")}
        if not files:
            raise FileNotFoundError(f"{self.url} does not exist: expected a checkpoint there")
        for name, info in files.items():
            if not isinstance(info.get("size"), int):
                raise CheckpointError(
                    f"{self.url}: expected a store that tells the size of {name!r}, got none"
                )
        return files, parent if root in files else root

    def _version(self, info: Mapping[str, Any]) -> str:
        return repr([(key, str(info[key])) for key in sorted(info) if key not in ("atime", "name")])

    def _relative(self, name: str, home: str) -> str:
        relative = name[len(home) :].removeprefix("/")
        if any(part in ("", ".", "..") for part in relative.split("/")) or "\0" in relative:
            raise CheckpointError(f"{self.url}: expected names of files below it, got {name[:200]!r}")
        return relative

    def _make(self) -> None:
        for path, file in self._files.items():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "xb") as created:
                    created.truncate(file.size)
            except OSError as error:
                raise CheckpointError(
                    f"{self.url}: {file.name[:200]!r} of {file.size} bytes cannot be a file in {self._directory}: "
                    f"{error.strerror}"
                ) from error

    def _fetch_metadata(self) -> None:
        for path, file in self._files.items():
            if path.name.endswith(_METADATA_ENDS):
                if file.size > _MAX_METADATA:
                    raise CheckpointError(
                        f"{self.renamed(str(path))}: expected metadata of at most {_MAX_METADATA} bytes, "
                        f"got {file.size}"
                    )
                self.fetch(path, 0, file.size)


def _write(path: Path, offset: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(descriptor)
