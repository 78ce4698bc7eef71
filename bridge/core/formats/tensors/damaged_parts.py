"""Opening a checkpoint of which parts are damaged: everyone stops at the first, `verify` goes on with the others.

with damage_noted() as damage:            in `verify`
    reader = open_checkpoint(path)        has what could be opened; `damage` says what could not

with one_part("model-00002.safetensors"):     in a reader, around what concerns that part alone
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType

from bridge.core.formats.tensors.base import CheckpointError

_DAMAGE: ContextVar[dict[str, CheckpointError] | None] = ContextVar("damage", default=None)


@contextmanager
def damage_noted() -> Iterator[dict[str, CheckpointError]]:
    """Checkpoints that this thread opens inside leave damaged parts out; what is wrong, by the parts' names."""
    damage: dict[str, CheckpointError] = {}
    token = _DAMAGE.set(damage)
    try:
        yield damage
    finally:
        _DAMAGE.reset(token)


class one_part:  # named as a function is, as those of contextlib are
    """What concerns one file, array or member of a checkpoint, whose CheckpointError may leave the others whole.

    A class, since readers enter it for each array: a generator costs twice the calls.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool:
        if not isinstance(error, CheckpointError) or (damage := _DAMAGE.get()) is None:
            return False
        damage[self.name] = error
        return True
