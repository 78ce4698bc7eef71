"""Failing together: an error on one rank becomes an error on all, instead of a hang on the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch.distributed as dist

from bridge.formats import CheckpointError

T = TypeVar("T")

_HAND_OVER_SECONDS = 0.01

# Raised as they are, so that callers can tell wrong use from damage; all else becomes a CheckpointError.
_KEPT: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        FileExistsError,
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
        TypeError,
    )
}


class _Report(NamedTuple):
    error: str | None
    message: str
    shared: object


class Outcome(NamedTuple, Generic[T]):
    """What ``agree`` returns: this rank's own value, and what rank 0 wanted all ranks to know."""

    value: T
    shared: object


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def agree(action: Callable[[], T], share: Callable[[T], object] | None = None) -> Outcome[T]:
    """Run ``action`` on every rank, then exchange outcomes once; all ranks return, or all raise.

    ``action`` must not communicate, or must fail on all ranks together. ``share(value)`` of rank 0, a small picklable
    value, reaches every rank in the same exchange. The error names each failing rank and its cause, keeps the type
    of the first where that is a usual one (file exists, not found, ...) and is a CheckpointError else.
    """
    cause: Exception | None = None
    try:
        value = action()
        report = _Report(None, "", share(value) if share else None)
    except Exception as error:
        cause = error
        report = _Report(type(error).__name__, str(error), None)
    reports = [report]
    if dist.is_initialized():
        reports *= dist.get_world_size()
        dist.all_gather_object(reports, report)
        # gloo's thread needs the interpreter lock to drop the exchanged tensors; torch aborts the process when it asks
        # while the interpreter shuts down. Programs often end right after a save, so let the thread have it now.
        time.sleep(_HAND_OVER_SECONDS)
    failed = {k: r for k, r in enumerate(reports) if r.error is not None}
    if failed:
        kind = _KEPT.get(next(iter(failed.values())).error or "", CheckpointError)
        raise kind(_describe(failed, len(reports))) from cause
    return Outcome(value, reports[0].shared)


def _describe(failed: dict[int, _Report], world: int) -> str:
    texts = {r.message if r.error in _KEPT else f"{r.error}: {r.message}" for r in failed.values()}
    if len(texts) == 1 and len(failed) == world:
        return texts.pop()
    return "\n".join(f"rank {k} of {world}: {r.error}: {r.message}" for k, r in failed.items())
