"""A checkpoint in an object store, read through its mirror by the reader of its format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bridge.formats.base import Box, CheckpointError, CheckpointReader, Loan
from bridge.formats.stores.mirror import Mirror
from bridge.formats.wrapping import ReadWhenAsked, WrappingReader


class StoredReader(WrappingReader):
    """The checkpoint at `url`; see `CheckpointReader`. `open_local` opens its mirror. Errors name its files there."""

    def __init__(self, url: str, open_local: Callable[[Mirror], CheckpointReader]) -> None:
        self._mirror = Mirror(url)
        try:
            with self._named():
                super().__init__(open_local(self._mirror))
        except BaseException:
            self._mirror.close()
            raise
        self.path: str = self._mirror.url
        self.objects = ReadWhenAsked(self.object_paths, self._read_object)

    @property
    def fingerprint(self) -> str:
        """A digest of the files' names, sizes and versions in the store."""
        return self._mirror.fingerprint

    def files(self) -> Sequence[Path]:
        """None: they are in the store."""
        return ()

    @property
    def home(self) -> Path:
        """Where the mirror is."""
        return self._mirror.path

    def fetch(self, path: Path, start: int, stop: int) -> None:
        """Make bytes [start, stop) of a file of the mirror present."""
        self._mirror.fetch(path, start, stop)

    @property
    def key_types(self) -> Mapping[str, str]:
        """Implementations of typed PRNG keys, by name; see `OrbaxReader`."""
        found: Mapping[str, str] = getattr(self._reader, "key_types", {})
        return found

    @property
    def unreadable(self) -> Mapping[str, str]:
        """Tensors that are listed, but cannot be read, by name; see `SafetensorsReader`."""
        found: Mapping[str, str] = getattr(self._reader, "unreadable", {})
        return found

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`. OSError when the store fails."""
        with self._named():
            return super().read(name, box)

    def lend(self, name: str, box: Box) -> Loan | None:
        """A block where it lies in the mirror; see `CheckpointReader.lend`. OSError when the store fails."""
        with self._named():
            return super().lend(name, box)

    def close(self) -> None:
        """Release the files and remove the mirror. Arrays already read stay valid."""
        super().close()
        self._mirror.close()

    def _read_object(self, name: str) -> object:
        with self._named():
            return self._reader.objects[name]

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(self._mirror.renamed(str(error))) from error
