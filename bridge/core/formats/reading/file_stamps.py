"""Whether a file was changed while a checkpoint was read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bridge.core.formats.stores.listing import StorePath


class Stamp(NamedTuple):
    """What tells that a file was not changed: its bytes, and when it was last written to, in nanoseconds."""

    size: int
    written: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns)


def stamps(files: Iterable[Path]) -> Mapping[Path, Stamp]:
    """Of files of this machine that are there."""
    by_file = {}
    for file in files:
        with suppress(OSError):
            if not isinstance(file, StorePath):
                by_file[file] = Stamp.of(file.stat())
    return by_file


def changed(before: Mapping[Path, Stamp]) -> Iterator[tuple[Path, str]]:
    """Files that are not as their stamps say, and a sentence about each."""
    for file, stamp in before.items():
        try:
            now = Stamp.of(file.stat())
        except OSError as error:
            yield file, f"{file} cannot be found any more: {error.strerror}"
            continue
        if now != stamp:
            yield file, change(file, stamp, now)


def change(path: object, before: Stamp, now: Stamp) -> str:
    sizes = (
        f"it had {before.size} bytes, and has {now.size}" if before.size != now.size else "it was written to"
    )
    return f"{path} was changed while it was read: {sizes}; try again when nothing writes to the checkpoint"
