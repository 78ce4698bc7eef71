"""The common part of readers: they close at the end of a `with` block, read values on demand, and wrap each other.

    SelectedReader -> CheckedReader -> reader of a format <- StoredReader, which users open and close

A reader stops at the first damaged part of a checkpoint. `verify` continues with the other parts:

    with damage_noted() as damage:                `verify`: the reader has the opened parts, `damage` the rest
        reader = open_checkpoint(path)
    with one_part("model-00002.safetensors"):     a reader, around code for this part only
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Self

import numpy as np

from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    CheckpointReader,
    Checksums,
    Loan,
    TensorInfo,
    TreePath,
    Wanted,
    unreadable,
)


class ClosedAtEnd(ABC):
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Release the files. Arrays already read stay valid."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        self.close()


class ComputedReader(ClosedAtEnd):
    """A reader whose elements are in no file as it returns them: it lends nothing; see `CheckpointReader`."""

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        return None

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        return [None] * len(wanted)

    def files(self) -> Sequence[Path]:
        return ()

    def close(self) -> None:
        """Nothing to release."""


class ReadWhenAsked(Mapping[str, object]):
    """The values of these names. `read` is called at each look-up: a damaged value must not hide other values."""

    def __init__(self, names: Collection[str], read: Callable[[str], object]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> object:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    # Mapping's own method would look the value up, and so read it.
    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def value_of(reader: CheckpointReader, name: str) -> object:
    """The value of an object; None if it cannot be read."""
    try:
        return reader.objects[name]
    except CheckpointError:
        return None


class WrappingReader(ClosedAtEnd):
    """A reader that delegates to another reader, unless a subclass overrides it; see `CheckpointReader`.

    Closing it closes the other reader.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self.format: str = reader.format
        self.path: Path | str = reader.path
        self.tensors: Mapping[str, TensorInfo] = reader.tensors
        self.objects: Mapping[str, object] = reader.objects
        self.object_paths: Mapping[str, TreePath] = reader.object_paths
        # For formats that record the kind with each leaf.
        self.kinds: Mapping[str, str] | None = getattr(reader, "kinds", None)
        self.unreadable: Mapping[str, str] = unreadable(reader)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`."""
        return self._reader.read(name, box)

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        """One block lent from the file; see `CheckpointReader.lend`."""
        return self._reader.lend(name, box, offset)

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        """Read each of these small tensors whole into memory; see `CheckpointReader.read_into`."""
        return self._reader.read_into(wanted)

    def files(self) -> Sequence[Path]:
        """The files of the whole checkpoint."""
        return self._reader.files()

    def close(self) -> None:
        self._reader.close()


class AlteredReader(WrappingReader):
    """A reader with some tensors under other names, or computed from the wrapped reader's tensors."""

    @abstractmethod
    def _own(self, name: str) -> str | None:
        """The wrapped reader's name for a tensor; None for one that `_made` computes, with elements in no file."""

    def _made(self, name: str, box: Box | None) -> np.ndarray:
        raise KeyError(name)

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        own = self._own(name)
        return self._made(name, box) if own is None else self._reader.read(own, box)

    def lend(self, name: str, box: Box, offset: int = 0) -> Loan | None:
        own = self._own(name)
        return None if own is None else self._reader.lend(own, box, offset)

    def read_into(self, wanted: Sequence[Wanted]) -> Sequence[Checksums | None]:
        owns = [self._own(name) for name, _ in wanted]
        checksums = iter(
            self._reader.read_into(
                [(own, target) for own, (_, target) in zip(owns, wanted, strict=True) if own is not None]
            )
        )
        return [None if own is None else next(checksums) for own in owns]


_DAMAGE: ContextVar[dict[str, CheckpointError] | None] = ContextVar("damage", default=None)


@contextmanager
def damage_noted() -> Iterator[dict[str, CheckpointError]]:
    """Checkpoints that this thread opens inside leave out damaged parts; yields what is wrong, by the parts' names."""
    damage: dict[str, CheckpointError] = {}
    token = _DAMAGE.set(damage)
    try:
        yield damage
    finally:
        _DAMAGE.reset(token)


class one_part:  # named like a function, as contextlib's classes are
    """Wraps code for one file, array or member of a checkpoint, whose CheckpointError may leave other parts intact.

    A class, since readers enter it for each array: a generator costs twice as many calls.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, CheckpointError) or (damage := _DAMAGE.get()) is None:
            return False
        damage[self.name] = error
        return True


def home_of(reader: CheckpointReader) -> Path:
    """The place of an opened checkpoint, here or in a store; for one item or folder, the place of that."""
    # A store's reader wraps a reader of the format, whose path is in the store's listing.
    opened: CheckpointReader = getattr(reader, "opened", reader)
    return Path(opened.path) if isinstance(opened.path, str) else opened.path
