"""One object of Google's storage, sent in parts that are objects until it is composed of them.

    step_40/twinshard.uploading.__0_0.distcp.00001      parts 1, 2, ...: in any order, several at once; can be listed
    step_40/twinshard.uploading.__0_0.distcp.1-00000    32 parts as one, where there are more than 32, and so on
    step_40/__0_0.distcp                                appears composed of the last of these, whole

The service composes without moving bytes. Parts stay until the folder removes them, so composing can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from bridge.core.formats.stores.numbered_parts import retried
from bridge.core.formats.stores.store import FileSystem

MOST_SOURCES: Final = 32
"""Objects that the service composes at once."""

_CALLS: Final = 8
_BOUNDARY: Final = b"\n--==0=="


class ComposedParts:
    """Parts whose names begin with `start`; `found` are objects that an earlier attempt has left, with their sizes."""

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
        """Nothing: the folder removes all parts."""

    def _part(self, number: int) -> str:
        return f"{self._start}{number:05}"

    def _compose(self, name: str, sources: Sequence[str]) -> None:
        retried(lambda: self._system.merge(name, list(sources)))


def put_object(system: FileSystem, name: str, data: bytes | bytearray) -> None:
    """Write an object, whole or not at all. Raises the store's error when the store kept fewer bytes than were sent."""
    options: dict[str, Any] = {}
    if "gs" in system.protocol:
        # gcsfs compares the size that the store answers with.
        options["consistency"] = "size"
        if data.endswith(b"\r") or _BOUNDARY in data:
            # gcsfs sends objects of less than `chunksize` as MIME, whose lines it ends with \n: a reader of \r\n takes
            # the last byte for a part of the line's end. Larger objects travel without MIME.
            options["chunksize"] = len(data)
    retried(lambda: system.pipe_file(name, data, **options))


def composes(system: FileSystem, name: str) -> bool:
    """Whether the bucket of this object, which is there, composes: zonal ones do not, as only trying shows."""
    try:
        retried(lambda: system.merge(name, [name]))
    except NotImplementedError:
        return False
    return True


def objects_from(system: FileSystem, start: str) -> dict[str, int]:
    """Sizes of all objects whose names begin so."""
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
