"""A checkpoint written into an object store: data files part by part, small files at the end, from memory.

    step_40/twinshard.uploading           who writes it, from what; the names of its files         first
    step_40/twinshard.uploading.000001    chunks whose parts are in the store, and checksums       every 256 MiB
    step_40/twinshard.uploading.x.00001   a part of x, on Google's storage (see composed.py)
    step_40/__0_0.distcp                  appears when its last part is there
    step_40/twinshard_manifest.json
    step_40/.metadata                     makes it a checkpoint                                    last
    then the first three are removed

A store cannot rename: files without the last file are not a checkpoint. A killed attempt leaves the first three files,
and on S3 parts that take space but are not an object. The next attempt at the same place continues with them
(`resume`), or removes them all.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from bridge.core.formats.stores.numbered_parts import (
    ComposedParts,
    FinishedParts,
    OrderedParts,
    Parts,
    S3Parts,
    composes,
    objects_from,
    put_object,
    remove_objects,
    retried,
    s3_uploads,
)
from bridge.core.formats.stores.store import (
    cannot_be_reached,
    open_store,
    require_writable,
    store_errors,
    without_end,
)
from bridge.core.formats.stores.upload import Note, UploadFile, UploadPath
from bridge.core.formats.stores.writing_process import ACTIVE, lives, this_process
from bridge.core.formats.tensors.base import CheckpointError

CLAIM: Final = "twinshard.uploading"
_FOUND_BY: Final = (
    *("_CHECKPOINT_METADATA", ".safetensors.index.json", ".metadata", "_METADATA", "commit_success.txt"),
)
"""Suffixes of the files that complete a checkpoint, in the order in which they are sent."""


class StoredJournal:
    """An earlier attempt's notes, for `ChunkRecord`; `record` notes what this attempt has sent."""

    kept = False

    def __init__(self, note: Callable[[], None], done: Mapping[str, Mapping[int, int]]) -> None:
        self._note = note
        self.done = {name: dict(numbers) for name, numbers in done.items()}

    def record(self, entries: object) -> None:
        """Note all chunks whose parts have reached the store."""
        self._note()

    def close(self) -> None:
        """Does nothing: it holds no resources."""


class StoreFolder:
    """The place of a checkpoint at a URL.

    key: identifies the conversion. resume: continue with the data that an attempt with the same key has sent, and keep
    sent data if this attempt fails. single: whether the URL names one file. complete: see `Attempt`.

    FileExistsError if something else is there; FileNotFoundError if the bucket does not exist, as buckets are not
    created; CheckpointError for a URL without a name, if another process on this machine writes there, or if `resume`
    finds another conversion.
    """

    def __init__(
        self,
        url: str,
        key: Mapping[str, str],
        *,
        resume: bool,
        single: bool,
        complete: Callable[[UploadPath, UploadPath], None],
    ) -> None:
        self.url = without_end(url)
        if not self.url.rpartition("/")[2]:
            raise CheckpointError(
                f"{url}: expected the URL of a new checkpoint, such as {self.url}bucket/runs/step_40, got no name"
            )
        self.small: dict[str, bytes] = {}
        self.data: dict[str, UploadFile] = {}
        self.recalled: dict[tuple[str, int], int] = {}
        self._key, self._resume, self._single = dict(key), resume, single
        self._complete = complete
        require_writable(self.url)
        self._system, self._root = open_store(url)
        # s3fs's `merge` is different: it uploads parts that are copies.
        self._composes = "gs" in _names(self._system.protocol)
        if self._in_bucket:
            self._require_bucket()
        self._claimed = self.ended = False
        self._lock = threading.RLock()
        self._notes = 0
        earlier = self._earlier()
        self._require_free(earlier)
        goes_on = resume and earlier.get("key") == self._key
        if resume and earlier and not goes_on:
            raise another_conversion(self.url, self._key, earlier["key"])
        self.earlier_names: list[str] = list(earlier.get("data", ())) if goes_on else []
        self._uploads = self._open_uploads()
        self._pieces = self._left_pieces()
        self.resumed = goes_on
        done: dict[str, dict[int, int]] = {}
        if goes_on:
            done = self._recall()
        elif earlier or self._uploads or self._pieces:
            self._remove(earlier)
            self._uploads, self._pieces = {}, {}
        self.journal = StoredJournal(self._note, done)

    @property
    def path(self) -> UploadPath:
        """The checkpoint, to be written to."""
        return UploadPath(self, ())

    temporary = path

    def open_data(self, name: str) -> UploadFile:
        """A data file, by its path in the checkpoint."""
        self.data[name] = UploadFile(f"{self.url}/{name}", lambda size: self._parts(name, size), self._claim)
        return self.data[name]

    def place_beside(self, name: str) -> None:
        """Put the file of this name next to the checkpoint, which is one file."""

    def commit(self) -> None:
        """Make the checkpoint appear by sending its last file. On failure, remove everything that was sent."""
        try:
            self._claim()
            self._complete(self.path, self.path)
            self._put(CLAIM, json.dumps(self._description()).encode())
            ordered = sorted(self.small, key=lambda name: (_rank(name), name))
            # If none of these completes the checkpoint, its one data file does.
            early = [name for name in ordered if not _rank(name)] if not _rank(ordered[-1]) else []
            for name in early:
                self._put(name, self.small[name])
            for name, file in self.data.items():
                with store_errors(f"cannot write {self.url}/{name}"):
                    file.finish()
            for name in ordered[len(early) :]:
                self._put(name, self.small[name])
        except BaseException:
            self.abort()
            raise
        self.ended = True
        self._forget()

    def abort(self) -> None:
        """Remove everything that was sent; with `resume`, note and keep it."""
        if self.ended:
            return
        self.ended = True
        if self._resume and self._claimed:
            for file in self.data.values():
                file.stop()
            with suppress(OSError):
                self._note()
            ACTIVE.discard(self._root)
            return
        for file in self.data.values():
            with suppress(OSError):
                file.abort()
        if self._claimed:
            self._remove(self._description())

    def _name(self, name: str) -> str:
        """The name in the store of a file of the checkpoint."""
        if not self._single:
            return f"{self._root}/{name}"
        if name.endswith(".safetensors"):
            return self._root
        # The manifest, which goes next to the file, and temporary files.
        return f"{self._root}.{name.removeprefix('twinshard_')}"

    def _parts(self, name: str, size: int) -> Parts:
        """Where the parts of a data file go."""
        stored = self._name(name)
        if not self._keeps_parts:
            if not self._in_bucket:
                self._system.makedirs(stored.rpartition("/")[0], exist_ok=True)
            return OrderedParts(self._system, stored, size)
        if self.resumed and self._exists(stored):
            return FinishedParts(int(self._system.info(stored)["size"]), size)
        if self._composes:
            # In the checkpoint's own folder: some buckets keep empty folders.
            start = self._name(f"{CLAIM}.{name.replace('/', '-')}.")
            return ComposedParts(self._system, stored, start, self._pieces)
        uploads = self._uploads.pop(stored, [])
        for upload in uploads[:-1]:
            S3Parts(self._system, stored, upload).abort()
        return S3Parts(self._system, stored, uploads[-1] if uploads else None)

    def _description(self) -> dict[str, Any]:
        return {
            "key": self._key,
            "process": this_process(),
            "data": list(self.data),
            "files": sorted(self.small),
        }

    def _claim(self) -> None:
        """Claim the place for this process, before anything else is sent."""
        with self._lock:
            if self._claimed:
                return
            self._put(CLAIM, json.dumps(self._description() | {"files": []}).encode())
            self._claimed = True
            self._composes = self._composes and composes(self._system, self._name(CLAIM))

    def _note(self) -> None:
        with self._lock:
            notes: list[Note] = [note for file in self.data.values() for note in file.noted()]
            if notes and self._keeps_parts:
                self._notes += 1
                self._put(f"{CLAIM}.{self._notes:06}", json.dumps(notes).encode())

    def _recall(self) -> dict[str, dict[int, int]]:
        """Checksums of chunks that are in the store, by tensor and number."""
        done: dict[str, dict[int, int]] = {}
        while self._exists(note := self._name(f"{CLAIM}.{self._notes + 1:06}")):
            self._notes += 1
            with store_errors(f"cannot read {note}"):
                entries = json.loads(retried(partial(self._system.cat_file, note)))
            for name, number, crc, remembered in entries:
                done.setdefault(name, {})[number] = crc
                self.recalled[name, number] = remembered
        return done

    def _earlier(self) -> dict[str, Any]:
        """The claim of an attempt that did not end. CheckpointError while its process lives."""
        self._system.invalidate_cache()
        claim = self._name(CLAIM)
        with store_errors(f"cannot look at {self.url}"):
            if not self._exists(claim):
                return {}
            try:
                claimed = json.loads(retried(lambda: self._system.cat_file(claim)))
                process = dict(claimed["process"])
                claimed["key"], claimed["data"], claimed["files"]  # KeyError if the claim is not ours
            except (ValueError, LookupError, TypeError):
                return {}
        if lives(process, self._root):
            raise CheckpointError(f"{self.url} is being written by another process: wait for it, or stop it")
        return dict(claimed)

    def _require_free(self, earlier: Mapping[str, Any]) -> None:
        """FileExistsError if anything but parts of an earlier attempt is there, or if that attempt had ended."""
        with store_errors(f"cannot look at {self.url}"):
            if self._single:
                names = (self._root, self._name("twinshard_manifest.json"))
                taken = {name for name in names if self._exists(name)}
            else:
                there = retried(lambda: self._system.find(self._root)) if self._exists(self._root) else []
                taken = {name for name in there if not name.startswith(self._name(CLAIM))}
        files = [self._name(name) for name in earlier.get("files", ())]
        known = {*files, *(self._name(name) for name in earlier.get("data", ()))}
        complete = bool(files) and taken == known
        if complete:
            # Its process was killed before it removed them.
            self._forget()
        if taken and (complete or not taken <= known):
            raise FileExistsError(
                f"expected nothing at {self.url}, found something: remove it first or choose another name"
            )

    def _open_uploads(self) -> dict[str, list[str]]:
        # Some credentials may write into a bucket but not list its uploads.
        with suppress(PermissionError):
            return s3_uploads(self._system, self._root) if self._is_s3 else {}
        return {}

    def _left_pieces(self) -> dict[str, int]:
        """Objects that are notes or, where objects are composed of parts, parts, with their sizes."""
        if not self._composes:
            return {}
        with store_errors(f"cannot look at {self.url}"):
            return objects_from(self._system, f"{self._name(CLAIM)}.")

    def _remove(self, earlier: Mapping[str, Any]) -> None:
        """Abort uploads, and remove the files that an attempt sent."""
        with store_errors(f"cannot remove the files that an earlier attempt left at {self.url}"):
            for name, uploads in self._uploads.items():
                for upload in uploads:
                    S3Parts(self._system, name, upload).abort()
            for name in (*earlier.get("data", ()), *earlier.get("files", ())):
                self._delete(self._name(name))
        self._forget()

    def _forget(self) -> None:
        """Remove the notes, the parts that are objects, and the claim."""
        with store_errors(f"cannot remove {self.url}/{CLAIM}"):
            remove_objects(self._system, self._left_pieces())
            number = 1
            while number <= self._notes or self._exists(self._name(f"{CLAIM}.{number:06}")):
                self._delete(self._name(f"{CLAIM}.{number:06}"))
                number += 1
            self._notes = 0
            self._delete(self._name(CLAIM))
        ACTIVE.discard(self._root)

    def _put(self, name: str, data: bytes) -> None:
        stored = self._name(name)
        ACTIVE.add(self._root)
        with store_errors(f"cannot write {self.url}/{name}"):
            if not self._in_bucket:
                self._system.makedirs(stored.rpartition("/")[0], exist_ok=True)
            put_object(self._system, stored, data)

    def _exists(self, name: str) -> bool:
        self._system.invalidate_cache()
        return bool(retried(lambda: self._system.exists(name)))

    def _delete(self, name: str) -> None:
        if self._exists(name):
            retried(lambda: self._system.rm_file(name))

    @property
    def _is_s3(self) -> bool:
        return hasattr(self._system, "call_s3")

    @property
    def _keeps_parts(self) -> bool:
        """Whether parts outlive an attempt."""
        return self._is_s3 or self._composes

    @property
    def _in_bucket(self) -> bool:
        """Whether the place is in an object store.

        A store has no directories, and making one would make a bucket. Paths of file systems begin with their root.
        """
        return not self._root.startswith("/")

    def _require_bucket(self) -> None:
        parts = self._root.split("/")
        try:
            there = any(self._system.exists("/".join(parts[: end + 1])) for end in range(len(parts)))
        except Exception as error:
            # Some credentials may write into a bucket but not list it. But an unreachable store is not retried: its
            # library has already retried for half a minute.
            if cannot_be_reached(error):
                with store_errors(f"cannot look at {self.url}"):
                    raise
            return
        if not there:
            raise FileNotFoundError(
                f"expected an existing bucket in {self.url}, found no bucket {parts[0]!r} (or none that these "
                "credentials may list): correct the name, or create the bucket first; Twinshard creates no buckets"
            )


def _names(protocol: str | Sequence[str]) -> Sequence[str]:
    """The protocols of a file system."""
    return (protocol,) if isinstance(protocol, str) else protocol


def another_conversion(place: object, key: Mapping[str, str], noted: Mapping[str, str]) -> CheckpointError:
    """The error for an unfinished checkpoint at ``place`` whose claim or journal notes a key other than ``key``."""
    parts = [
        f"{name}: expected {key.get(name, 'nothing')}, found {noted.get(name, 'nothing')}"
        for name in dict.fromkeys((*key, *noted))
        if key.get(name) != noted.get(name)
    ]
    return CheckpointError(
        f"{place} is unfinished, but belongs to another conversion ({'; '.join(parts)}): resume that conversion with "
        "its own source and options, or start anew without resuming"
    )


def _rank(name: str) -> int:
    """Sort key: files by which the checkpoint is found come last."""
    return 1 + next((k for k, end in enumerate(_FOUND_BY) if name.endswith(end)), -1)
