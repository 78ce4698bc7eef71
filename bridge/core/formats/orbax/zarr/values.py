"""Where the values of an item's store are in its files, so that raw chunks can be read from there.

    OCDBT    manifest.ocdbt -> B-tree nodes in d/* -> value at (ocdbt.process_0/d/3f2a..., offset, length), or inline
    files    the value of key "params.w/c/0/0" is the file of that name

tensorstore gives the places (`ts.ocdbt.dump`): it decodes manifest and nodes and verifies their checksums. Every place
is checked against the files before anything is read there.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import tensorstore as ts

from bridge.core.formats.orbax.zarr.ocdbt import MANIFEST, NodeBudget, require_bounded_manifest
from bridge.core.formats.reading.regular_files import is_kept_by_content
from bridge.core.formats.reading.source_files import FileView, SourceFiles
from bridge.core.formats.stores.listing import StorePath
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.tensors.wrapping import one_part

_MAX_DEPTH = 16
_MAX_DECODED_MANIFEST = 16 << 20  # 16 versions, of some 100 bytes each, in stores of Orbax


class Place(NamedTuple):
    """Bytes [start, start + size) of a file of the item, by its path from there."""

    file: str
    start: int
    size: int


class StoredValues:
    """The values that are in separate files or inside OCDBT's files. Reading is thread-safe."""

    def __init__(self, item: Path, places: Mapping[str, Place]) -> None:
        self._item = item
        self._places = places
        self.files = SourceFiles(item)
        sizes: dict[str, int] = {}
        home = item.resolve()
        for key, value in places.items():
            if value.file not in sizes:
                with one_part(value.file):
                    sizes[value.file] = _size_of(item, home, value.file, key)
            end = value.start + value.size
            if end > sizes.setdefault(value.file, end):
                with one_part(value.file):
                    raise CheckpointError(
                        f"{item / value.file} is truncated: expected at least {end} bytes (for {key!r}), got "
                        f"{sizes[value.file]}"
                    )

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def place(self, key: str) -> Place:
        """Where a value is."""
        return self._places[key]

    def find(self, key: str) -> Place | None:
        """Where a value is; None if it is in no file."""
        return self._places.get(key)

    def view(self, key: str, start: int, stop: int) -> FileView:
        """The file that holds a value, for bytes [start, stop) of the file."""
        return self.files.view(self._places[key].file, (start, stop))

    def read(self, key: str) -> bytes:
        """A whole value."""
        value = self._places[key]
        return self.files.read(value.file, value.start, value.start + value.size)

    def close(self) -> None:
        """Release the files."""
        self.files.close()


def places_in_files(item: Path, keys: Iterable[str]) -> dict[str, Place]:
    """The places of keys that are files. OSError if a file cannot be accessed."""
    return {key: Place(key, 0, (item / key).stat().st_size) for key in keys}


def stored_sizes(
    item: Path, keys: Iterable[str], places: Mapping[str, Place] | None
) -> Iterator[tuple[str, int]]:
    """Bytes of values that are not inline: at these places of an OCDBT store, or in files named by their keys if None.

    CheckpointError unless each file is a regular file inside the item: tensorstore follows any link.
    """
    home = item.resolve()
    for key in keys:
        if places is None:
            yield key, _size_of(item, home, key, key)
        elif key in places:
            yield key, places[key].size


def values_in_ocdbt(item: Path, what: str) -> tuple[dict[str, Place], dict[str, bytes]]:
    """The place of every value, and the inline values, which have no place.

    CheckpointError for a reference that leads out of the item, for a node with two parents (then few nodes can claim
    any number of keys, and tensorstore would list them all), and for nodes that claim more than their bytes allow.
    """
    # One node at a time: tensorstore would access the files itself, and they may be in another store.
    memory = ts.KvStore.open({"driver": "memory"}, context=ts.Context()).result()
    stored = (item / MANIFEST).read_bytes()
    require_bounded_manifest(stored, _MAX_DECODED_MANIFEST, what)
    memory.write(MANIFEST, stored).result()
    manifest = ts.ocdbt.dump(memory).result()
    places: dict[str, Place] = {}
    inline: dict[str, bytes] = {}
    seen: set[tuple[int, int, int]] = set()
    budget, home = NodeBudget(what), item.resolve()

    def node_at(location: str, prefix: bytes) -> Mapping[str, Any]:
        span = _parse(location, what, "btreenode")
        length = _size_of(item, home, span.file, "the index")
        if span.start + span.size > length:
            raise CheckpointError(
                f"{item / span.file} is truncated: expected at least {span.start + span.size} bytes (for a node of "
                f"the index), got {length}"
            )
        # The file itself: it may have several names.
        status = (item / span.file).stat()
        identity = status.st_dev, status.st_ino, span.start
        if identity in seen:
            raise CheckpointError(
                f"{what}: expected a B-tree, found two paths to its node {location[:200]!r}"
            )
        seen.add(identity)
        data = _read(item / span.file, span)
        budget.take(data, len(prefix))
        # References in the node are relative to its folder.
        folder = location.split(":")[1]
        memory.write(f"{unquote(folder)}node", data).result()
        node: Mapping[str, Any] = ts.ocdbt.dump(memory, f"btreenode:{folder}:node:0:{len(data)}").result()
        return node

    versions = manifest["versions"]
    if versions and "location" in versions[-1]["root"]:
        _walk(node_at, versions[-1]["root"]["location"], b"", places, inline, what, 0)
    return places, inline


def unmerged_processes(item: Path, places: Mapping[str, Place], inline: Collection[str]) -> dict[str, str]:
    """The folders of processes with keys that the joint index lacks, with the reason.

    places, inline: the result of `values_in_ocdbt` for the joint index.
    """
    used = {value.file.partition("/")[0] for value in places.values()}
    reasons = {}
    for folder in sorted(item.glob("ocdbt.process_*")):
        if folder.name in used or not (folder / MANIFEST).is_file():
            continue
        try:
            keys = itertools.chain.from_iterable(values_in_ocdbt(folder, str(folder)))
            lost = next((key for key in keys if key not in places and key not in inline), None)
        except (CheckpointError, ValueError, OSError):
            lost = "what its damaged index names"
        if lost is not None:
            reasons[f"{folder.name}/"] = (
                f"never merged into the index of all processes, which lacks {lost:.200}"
            )
    return reasons


def _read(file: Path, span: Place) -> bytes:
    if isinstance(file, StorePath):
        return file.read_range(span.start, span.start + span.size)
    with open(file, "rb") as opened:
        return os.pread(opened.fileno(), span.size, span.start)


def _walk(
    node_at: Callable[[str, bytes], Mapping[str, Any]],
    location: str,
    prefix: bytes,
    places: dict[str, Place],
    inline: dict[str, bytes],
    what: str,
    depth: int,
) -> None:
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{what}: expected a B-tree of at most {_MAX_DEPTH} levels, got more")
    files: dict[str, str] = {}
    for entry in node_at(location, prefix)["entries"]:
        if "location" in entry:
            below = prefix + entry["subtree_common_prefix"]
            _walk(node_at, entry["location"], below, places, inline, what, depth + 1)
            continue
        key = (prefix + entry["key"]).decode("utf-8", "surrogateescape")
        if "inline_value" in entry:
            inline[key] = bytes(entry["inline_value"])
        elif "indirect_value" in entry:
            reference = entry["indirect_value"]
            head, _, size = reference.rpartition(":")
            head, _, start = head.rpartition(":")
            # All values of a node are in few files. Checking each file name once halves the time per reference.
            file = files.get(head)
            if file is None or not (start.isdecimal() and size.isdecimal()):
                places[key] = _parse(reference, what, "value")
                files[head] = places[key].file
            else:
                places[key] = Place(file, int(start), int(size))


def _parse(reference: str, what: str, role: str) -> Place:
    """A reference `<kind>:<folder>:<file>:<offset>:<length>`, its names percent-encoded."""
    parts = reference.split(":")
    if len(parts) != 5 or parts[0] != role or not (parts[3].isdecimal() and parts[4].isdecimal()):
        raise CheckpointError(f"{what}: expected a reference to a {role}, got {reference[:80]!r}")
    file = unquote(parts[1]) + unquote(parts[2])
    if file.startswith("/") or ".." in file.split("/"):
        raise CheckpointError(
            f"{what}: expected values in files of the checkpoint, got one in {file[:200]!r}"
        )
    return Place(file, int(parts[3]), int(parts[4]))


def _size_of(item: Path, home: Path, file: str, key: str) -> int:
    path = item / file
    try:
        target = path.resolve(strict=True)
        size = target.stat().st_size
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{key!r} is stored in {path}, which cannot be read: {error}") from error
    if not target.is_file() or not (target.is_relative_to(home) or is_kept_by_content(target)):
        raise CheckpointError(
            f"{key!r} is stored in {path}: expected a regular file of the checkpoint, got a link to {target}"
        )
    return size
