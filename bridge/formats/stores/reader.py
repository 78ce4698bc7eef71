"""A checkpoint in an object store, read by the reader of its format through ranged reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bridge.formats.base import CheckpointReader
from bridge.formats.stores.listing import Listing, StorePath
from bridge.formats.wrapping import WrappingReader


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
    def home(self) -> StorePath:
        """The checkpoint, as a path in the store."""
        return self._listing.root

    def files(self) -> Sequence[Path]:
        """None: they are in the store."""
        return ()

    def close(self) -> None:
        """Let go of what was fetched. Arrays already read stay valid."""
        super().close()
        self._listing.close()
