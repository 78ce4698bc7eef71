"""One object of a store, sent in numbered parts; it appears, complete, when it is finished.

S3 (s3fs)       a multipart upload: parts in any order, several at once; existing parts can be listed
GCS (gcsfs)     parts are objects; the service composes one object of them, without moving bytes
other stores    fsspec's file for writing: parts one after the other

On Google's storage, parts stay until the folder removes them, so composing can be repeated:

    step_40/twinshard.uploading.__0_0.distcp.00001      parts 1, 2, ...: in any order, several at once; can be listed
    step_40/twinshard.uploading.__0_0.distcp.1-00000    32 parts as one, where there are more than 32, and so on
    step_40/__0_0.distcp                                appears composed of the last of these, whole
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from bridge.core.formats.stores.ranges import ATTEMPTS
from bridge.core.formats.stores.store import FileSystem

PAUSE: Final = 0.1
_WAITING: Final = 8
_FINAL: Final = (FileNotFoundError, PermissionError, FileExistsError, NotImplementedError)
"""Write errors that a retry does not change; file systems raise the last one for unsupported operations."""

Result = TypeVar("Result")


class Parts(Protocol):
    """The parts of one object, from number 1.

    sizes: of the parts that an earlier attempt has sent. in_order: whether a thread that sends a part may have to wait
    until the earlier parts are there.
    """

    @property
    def sizes(self) -> Mapping[int, int]: ...

    @property
    def in_order(self) -> bool: ...

    def put(self, number: int, data: bytes | bytearray) -> None:
        """Send a part; used by several threads. OSError when the store refuses."""

    def finish(self, count: int) -> None:
        """Make an object of the parts 1 to `count`, which all exist."""

    def abort(self) -> None:
        """Discard what was sent."""


def retried(call: Callable[[], Result]) -> Result:
    """The result of a call, which is retried after growing pauses. The last error if all attempts fail."""
    # Stores sometimes answer with transient errors (throttling, lost connections). Libraries retry only some.
    for attempt in range(ATTEMPTS - 1):
        try:
            return call()
        except _FINAL:
            raise
        except Exception:
            time.sleep(PAUSE * 2**attempt)
    return call()


class S3Parts:
    """A multipart upload. `resumed`: the upload whose parts are kept, None for a new one."""

    in_order = False

    def __init__(self, system: FileSystem, name: str, resumed: str | None = None) -> None:
        self._system = system
        bucket, key, _ = system.split_path(name)
        self._where = {"Bucket": bucket, "Key": key}
        self._upload = resumed
        self._tags: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        # The first part creates the upload; sending itself happens outside the lock.
        self._lock = threading.Lock()
        if resumed is not None:
            for part in _pages(self._call, "list_parts", "Parts", "PartNumberMarker", UploadId=resumed):
                self._tags[part["PartNumber"]] = part["ETag"]
                self.sizes[part["PartNumber"]] = part["Size"]

    def put(self, number: int, data: bytes | bytearray) -> None:
        with self._lock:
            if self._upload is None:
                self._upload = self._call("create_multipart_upload")["UploadId"]
        answer = self._call("upload_part", UploadId=self._upload, PartNumber=number, Body=data)
        with self._lock:
            self._tags[number] = answer["ETag"]

    def finish(self, count: int) -> None:
        parts = [{"PartNumber": number, "ETag": self._tags[number]} for number in range(1, count + 1)]
        try:
            self._call("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        except OSError:
            # The answer to an earlier call may have been lost: then the upload is gone because it has become an object.
            if not self._object_of(count):
                raise

    def abort(self) -> None:
        if self._upload is not None:
            with suppress(FileNotFoundError):
                self._call("abort_multipart_upload", UploadId=self._upload)

    def _object_of(self, parts: int) -> bool:
        """Whether the object exists and consists of so many parts, by its tag."""
        try:
            tag = self._call("head_object")["ETag"]
        except OSError:
            return False
        return str(tag).strip('"').endswith(f"-{parts}")

    def _call(self, method: str, **arguments: Any) -> Any:
        return retried(lambda: self._system.call_s3(method, **self._where, **arguments))


def s3_uploads(system: FileSystem, root: str) -> dict[str, list[str]]:
    """Multipart uploads to a place that are neither finished nor aborted: ids by names of objects, oldest first."""
    bucket, key, _ = system.split_path(root)

    def call(method: str, **arguments: Any) -> Any:
        return retried(lambda: system.call_s3(method, Bucket=bucket, Prefix=key, **arguments))

    by_key: dict[str, list[tuple[Any, str]]] = {}
    for upload in _pages(call, "list_multipart_uploads", "Uploads", "KeyMarker", "UploadIdMarker"):
        if upload["Key"] == key or upload["Key"].startswith(f"{key}/"):
            entry = upload.get("Initiated"), upload["UploadId"]
            by_key.setdefault(f"{bucket}/{upload['Key']}", []).append(entry)
    return {name: [upload for _, upload in sorted(entries, key=str)] for name, entries in by_key.items()}


def _pages(call: Callable[..., Any], method: str, field: str, *markers: str, **arguments: Any) -> list[Any]:
    """All entries of an answer that comes in pages."""
    entries: list[Any] = []
    while True:
        page = call(method, **arguments)
        entries += page.get(field, ())
        following = {marker: page.get(f"Next{marker}") for marker in markers}
        if not page.get("IsTruncated") or not any(following.values()):
            return entries
        arguments |= {marker: value for marker, value in following.items() if value}


class OrderedParts:
    """Parts for a store that accepts an object's bytes only in order; early parts wait.

    While many parts wait, a thread that sends any but the next part blocks: parts must be sent roughly in order.
    """

    in_order = True

    def __init__(self, system: FileSystem, name: str, part_size: int) -> None:
        self._system, self._name, self._part_size = system, name, part_size
        self.sizes: dict[int, int] = {}
        self._file: Any = None
        self._next = 1
        self._early: dict[int, bytes | bytearray] = {}
        self._failed = False
        # Parts come from several threads, but fsspec's file accepts them only in order.
        self._ready = threading.Condition()

    def put(self, number: int, data: bytes | bytearray) -> None:
        with self._ready:
            # Memory stays bounded: with 8 parts waiting, only the next part is accepted.
            while number != self._next and len(self._early) >= _WAITING and not self._failed:
                self._ready.wait()
            if self._failed:
                raise OSError(f"{self._name}: an earlier part could not be written")
            self._early[number] = data
            try:
                while self._next in self._early:
                    if self._file is None:
                        self._file = self._system.open(self._name, "wb", block_size=self._part_size)
                    self._file.write(self._early.pop(self._next))
                    self._next += 1
            except BaseException:
                self._failed = True
                raise
            finally:
                self._ready.notify_all()

    def finish(self, count: int) -> None:
        self._file.close()

    def abort(self) -> None:
        with self._ready:
            self._failed = True
            self._ready.notify_all()
        if self._file is not None:
            with suppress(Exception):
                self._file.discard()
            # Its finalizer would close it, and so make half of the object appear.
            with suppress(AttributeError):
                self._file.closed = True


class FinishedParts:
    """An object that an earlier attempt has finished."""

    in_order = False

    def __init__(self, size: int, part_size: int) -> None:
        self.sizes = dict.fromkeys(range(1, size // part_size + 1), part_size)

    def put(self, number: int, data: bytes | bytearray) -> None:
        """Does nothing: the object is there."""

    def finish(self, count: int) -> None:
        """Does nothing: the object is there."""

    def abort(self) -> None:
        """Does nothing: the folder removes it."""


MOST_SOURCES: Final = 32
"""Objects that the service composes at once."""

_CALLS: Final = 8
_BOUNDARY: Final = b"\n--==0=="


class ComposedParts:
    """Parts whose names begin with `start`; `found`: objects that an earlier attempt left, with their sizes."""

    in_order = False

    def __init__(self, system: FileSystem, name: str, start: str, sizes_there: Mapping[str, int]) -> None:
        self._system, self._name, self._start = system, name, start
        numbers = {
            part.removeprefix(start): size for part, size in sizes_there.items() if part.startswith(start)
        }
        self.sizes = {int(number): size for number, size in numbers.items() if number.isdecimal()}

    def put(self, number: int, data: bytes | bytearray) -> None:
        put_object(self._system, self._part(number), data)

    def finish(self, count: int) -> None:
        names = [self._part(number) for number in range(1, count + 1)]
        level = 0
        with ThreadPoolExecutor(_CALLS, thread_name_prefix="compose") as pool:
            while len(names) > MOST_SOURCES:
                level += 1
                groups = [names[k : k + MOST_SOURCES] for k in range(0, len(names), MOST_SOURCES)]
                names = [f"{self._start}{level}-{number:05}" for number in range(len(groups))]
                for _ in pool.map(self._compose, names, groups):
                    pass
        self._compose(self._name, names)

    def abort(self) -> None:
        """Does nothing: the folder removes all parts."""

    def _part(self, number: int) -> str:
        return f"{self._start}{number:05}"

    def _compose(self, name: str, sources: Sequence[str]) -> None:
        retried(lambda: self._system.merge(name, list(sources)))


def put_object(system: FileSystem, name: str, data: bytes | bytearray) -> None:
    """Write an object, whole or not at all. Raises the store's error if the store kept fewer bytes than were sent."""
    options: dict[str, Any] = {}
    if "gs" in system.protocol:
        # gcsfs checks the size in the store's answer.
        options["consistency"] = "size"
        if data.endswith(b"\r") or _BOUNDARY in data:
            # gcsfs sends objects smaller than `chunksize` as MIME, with lines that end in \n: a reader that expects
            # \r\n takes the last byte for a part of the line's end. Larger objects are sent without MIME.
            options["chunksize"] = len(data)
    retried(lambda: system.pipe_file(name, data, **options))


def composes(system: FileSystem, name: str) -> bool:
    """Whether the bucket of this existing object can compose: zonal buckets cannot, and only trying shows that."""
    try:
        retried(lambda: system.merge(name, [name]))
    except NotImplementedError:
        return False
    return True


def objects_from(system: FileSystem, start: str) -> dict[str, int]:
    """Sizes of all objects whose names have this prefix."""
    parent, _, beginning = start.rpartition("/")
    system.invalidate_cache()
    listed = retried(lambda: system.find(parent, prefix=beginning, detail=True))
    return {name: int(entry["size"]) for name, entry in listed.items() if name.startswith(start)}


def remove_objects(system: FileSystem, names: Iterable[str]) -> None:
    """Remove objects, several at once."""

    def remove(name: str) -> None:
        try:
            retried(lambda: system.rm_file(name))
        except FileNotFoundError:
            # The answer to an earlier call was lost.
            return

    with ThreadPoolExecutor(_CALLS, thread_name_prefix="remove") as pool:
        for _ in pool.map(remove, names):
            pass
