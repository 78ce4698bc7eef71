"""A checkpoint in an object store, read through its mirror by the reader of its format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bridge.formats.base import Box, CheckpointError, CheckpointReader, Loan, TensorInfo, TreePath
from bridge.formats.stores.mirror import Mirror


class StoredReader:
    """The checkpoint at `url`; see `CheckpointReader`. `open_local` opens its mirror. Errors name its files there."""

    def __init__(self, url: str, open_local: Callable[[Mirror], CheckpointReader]) -> None:
        self._mirror = Mirror(url)
        try:
            with self._named():
                self._reader = open_local(self._mirror)
        except BaseException:
            self._mirror.close()
            raise

    @property
    def format(self) -> str:
        """The format's name."""
        return self._reader.format

    @property
    def path(self) -> str:
        """The URL."""
        return self._mirror.url

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
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every stored tensor by name."""
        return self._reader.tensors

    @property
    def objects(self) -> Mapping[str, object]:
        """Values that are not tensors, by name."""
        return _Named(self._reader.objects, self._named)

    @property
    def object_paths(self) -> Mapping[str, TreePath]:
        """The tree path of every object, by name."""
        return self._reader.object_paths

    @property
    def key_types(self) -> Mapping[str, str]:
        """Implementations of typed PRNG keys, by name; see `OrbaxReader`."""
        found: Mapping[str, str] = getattr(self._reader, "key_types", {})
        return found

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """One block of a tensor; see `CheckpointReader.read`. OSError when the store fails."""
        with self._named():
            return self._reader.read(name, box)

    def lend(self, name: str, box: Box) -> Loan | None:
        """A block where it lies in the mirror; see `CheckpointReader.lend`. OSError when the store fails."""
        with self._named():
            return self._reader.lend(name, box)

    def close(self) -> None:
        """Release the files and remove the mirror. Arrays already read stay valid."""
        self._reader.close()
        self._mirror.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(self._mirror.renamed(str(error))) from error


class _Named(Mapping[str, object]):
    """Values whose errors name files in the store."""

    def __init__(
        self, values: Mapping[str, object], named: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._values, self._named = values, named

    def __getitem__(self, name: str) -> object:
        with self._named():
            return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
