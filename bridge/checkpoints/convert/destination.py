"""Where a conversion may write: not over anything, not into its source, not without space; errors name the place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bridge.core.formats import Format
from bridge.core.formats.files.journal import abandoned
from bridge.core.formats.stores.store import local_path
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.whole.replaceable import require_replaceable


def format_by_name(dst: str | os.PathLike[str]) -> Format | None:
    """The format that a destination's name asks for: "safetensors" for one that ends so, None for others."""
    return "safetensors" if os.fspath(dst).endswith(".safetensors") else None


def require_place(source: Path | str, destination: Path, replace_it: bool) -> None:
    """Refuse a destination that exists already or overlaps with the source, before anything is written."""
    there = os.path.lexists(destination)
    if there and not replace_it:
        raise FileExistsError(
            f"{destination} exists already: remove it first, choose another name, or replace it (--replace)"
        )
    require_apart(source, destination)
    if there:
        require_replaceable(destination)


def require_untouched(sources: Sequence[Path], destination: Path) -> None:
    """Refuse a destination that is one of the source's files, or holds one: indexes and links lead anywhere."""
    if not os.path.lexists(destination):
        return
    place = Path(os.path.realpath(destination))
    for source in sources:
        file = Path(os.path.realpath(source))
        if place == file or place in file.parents:
            raise CheckpointError(
                f"{destination} is or holds {source}, a file of the source: expected a destination apart from them"
            )


def require_apart(source: Path | str, destination: Path) -> None:
    local_source = local_path(source)
    if local_source is None:
        return
    real_source, real_destination = Path(os.path.realpath(local_source)), Path(os.path.realpath(destination))
    if real_source == real_destination or real_source in real_destination.parents:
        raise CheckpointError(f"{destination} is inside the source {source}: expected a destination outside")
    if os.path.lexists(destination) and real_destination in real_source.parents:
        raise CheckpointError(
            f"{destination} holds the source {source}, and would be replaced: expected a destination that does not"
        )


@contextmanager
def naming(destination: Path) -> Iterator[None]:
    """Name the destination in errors of the system: the temporary file is gone when the user reads the message.

    Errors about files of the source keep their name.
    """
    place = os.path.abspath(destination)
    try:
        yield
    except OSError as error:
        name = error.filename
        path = os.path.abspath(os.fsdecode(name)) if isinstance(name, str | bytes) else place
        # The destination, what is in it or in its working directory, or a directory that is to hold it.
        ours = f"{path}/".startswith((f"{place}/", f"{place}.tmp-")) or place.startswith(f"{path}/")
        if error.errno is None or not ours:
            raise
        # OSError picks the subclass that belongs to the number.
        raise OSError(error.errno, error.strerror, str(destination)) from error


def require_space(destination: Path, nbytes: int) -> None:
    free = shutil.disk_usage(destination.parent).free
    if free < nbytes:
        left = [str(directory) for directory in abandoned(destination)]
        hint = f"; killed attempts left {', '.join(left)}: resume (--resume), or remove them" if left else ""
        raise CheckpointError(
            f"too little free space for {destination}: expected {nbytes} bytes, found {free}; free some, choose "
            f"another place, or convert less (--select, --weights-only){hint}"
        )
