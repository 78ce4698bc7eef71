"""Additions of a checkpoint manager to a runtime's save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class SaveExtras:
    """``files``: contents of further files of the checkpoint, by name. With several processes, the first one's count.

    ``before``: called before the directory is made, when no save is pending. ``committed``: called when the checkpoint
    is complete and synced, by the thread that wrote it; it should not raise.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    before: Callable[[], None] = _nothing
    committed: Callable[[], None] = _nothing
