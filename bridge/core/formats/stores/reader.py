"""A checkpoint in an object store, read by the reader of its format through ranged reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bridge.core.formats.stores.listing import Listing, StorePath
from bridge.core.formats.tensors.base import CheckpointReader
from bridge.core.formats.tensors.wrapping import WrappingReader


class StoredReader(WrappingReader):
    """The checkpoint at `url`; see `CheckpointReader`. `open_path` opens it. OSError when the store fails."""

    def __init__(self, url: str, open_path: Callable[[StorePath], CheckpointReader]) -> None:
        self._listing = Listing(url)
        try:
            super().__init__(open_path(self._listing.root))
        except BaseException:
            self._listing.close()
            raise
        self.path: str = self._listing.url

    @property
    def fingerprint(self) -> str:
        """A digest of the files' names, sizes and versions in the store."""
        return self._listing.fingerprint

    @property
    def opened(self) -> CheckpointReader:
        """The reader of its format, whose path is one in the store; of one item or folder, where that is."""
        return self._reader

    def files(self) -> Sequence[Path]:
        """None: they are in the store."""
        return ()

    def close(self) -> None:
        """Let go of what was fetched. Arrays already read stay valid."""
        super().close()
        self._listing.close()


def home_of(reader: CheckpointReader) -> Path:
    """Where a checkpoint that was opened is, here or in a store; of one item or folder, where that is."""
    place = reader.opened.path if isinstance(reader, StoredReader) else reader.path
    return place if isinstance(place, StorePath) else Path(place)
