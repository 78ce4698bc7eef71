"""Opening a checkpoint of which parts are damaged: everyone stops at the first, `verify` goes on with the others.

with damage_noted() as damage:            in `verify`
    reader = open_checkpoint(path)        has what could be opened; `damage` says what could not

with one_part("model-00002.safetensors"):     in a reader, around what concerns that part alone
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from bridge.formats.base import CheckpointError

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


@contextmanager
def one_part(name: str) -> Iterator[None]:
    """What concerns one file, array or member of a checkpoint, whose CheckpointError may leave the others whole."""
    try:
        yield
    except CheckpointError as error:
        damage = _DAMAGE.get()
        if damage is None:
            raise
        damage[name] = error
