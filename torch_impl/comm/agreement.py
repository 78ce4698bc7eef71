"""Failing together: an error on one rank becomes an error on all, instead of a hang on the others.

``agree`` exchanges the outcomes of an action; ``gather`` and ``scatter`` move small values to rank 0 and from there.
``require_same_unit`` compares how the ranks shard a unit, once per unit. ``require_all_ranks`` waits for ranks that
might never come, so that a collective which one rank alone has reason to begin ends in an error instead of a hang.

Work in the background agrees over a process group of its own, ``background_group``: over the default one its messages
could meet those of a training step.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from bridge.formats import CheckpointError
from torch_impl.comm import collectives
from torch_impl.comm.mesh import DataParallelMesh

T = TypeVar("T")

_HAND_OVER_SECONDS = 0.01

# The default group, and the background group that was made beside it.
_background: tuple[Any, Any] | None = None

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


def background_group() -> dist.ProcessGroup | None:
    """A gloo group of all ranks for one background thread; None without a process group.

    Made at the first call, which all ranks make together, and anew for another default group.
    """
    global _background
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if _background is None or _background[0] is not world:
        _background = (world, dist.new_group(backend="gloo"))
    return _background[1]


def agree(
    action: Callable[[], T],
    share: Callable[[T], object] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Outcome[T]:
    """Run ``action`` on every rank, then exchange outcomes once; all ranks return, or all raise.

    ``action`` must not communicate, or must fail on all ranks together. ``share(value)`` of rank 0, a small picklable
    value, reaches every rank in the same exchange. The error names each failing rank and its cause, keeps the type
    of the first where that is a usual one (file exists, not found, ...), and is a CheckpointError otherwise. ``group``:
    of all ranks, by default the default one.
    """
    cause: Exception | None = None
    try:
        value = action()
        report = _Report(None, "", share(value) if share else None)
    except Exception as error:
        cause = error
        report = _Report(type(error).__name__, str(error), None)
    reports = [report]
    if not _alone(group):
        reports *= dist.get_world_size()
        dist.all_gather_object(reports, report, group=group)
        # gloo's thread needs the interpreter lock to drop the exchanged tensors; torch aborts the process when it asks
        # while the interpreter shuts down. Programs often end right after a save, so let the thread have it now.
        time.sleep(_HAND_OVER_SECONDS)
    failed = {k: r for k, r in enumerate(reports) if r.error is not None}
    if failed:
        kind = _KEPT.get(next(iter(failed.values())).error or "", CheckpointError)
        raise kind(_describe(failed, len(reports))) from cause
    return Outcome(value, reports[0].shared)


def _alone(group: dist.ProcessGroup | None) -> bool:
    """Whether there is nobody to agree with. CheckpointError where the group's process group is gone."""
    if group is None:
        return not dist.is_initialized()
    if group.size() == 1:
        return True
    if not dist.is_initialized():
        raise CheckpointError(
            "expected the process group to live until the save is complete, found it destroyed: call wait() of the "
            "save, or close() of the manager, before torch.distributed.destroy_process_group()"
        )
    return False


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's picklable value, on rank 0; an empty list on the others."""
    if _alone(group):
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if rank() == 0 else None
    dist.gather_object(value, values, group=group)
    return values or []


def scatter(values: list[T], group: dist.ProcessGroup | None = None) -> T:
    """Each rank's own of the picklable values that rank 0 gives."""
    if _alone(group):
        return values[0]
    received: list[Any] = [None]
    dist.scatter_object_list(received, values if rank() == 0 else None, group=group)
    own: T = received[0]
    return own


def _describe(failed: dict[int, _Report], world: int) -> str:
    texts = {r.message if r.error in _KEPT else f"{r.error}: {r.message}" for r in failed.values()}
    if len(texts) == 1 and len(failed) == world:
        return texts.pop()
    return "\n".join(f"rank {k} of {world}: {r.error}: {r.message}" for k, r in failed.items())


def require_same_unit(
    unit: str, description: Mapping[str, Any], flag: bool, mesh: DataParallelMesh, device: torch.device
) -> bool:
    """Compare ``description`` (JSON values) over the ranks of ``mesh`` by a small all-gather of its SHA-256 an axis.

    ``description["parameters"]`` is a list of ``[name, shape, dtype, requires_grad]``; all other entries are compared
    as they are. ``flag`` may differ between ranks: returns whether it does.

    Raises ValueError on every rank when some rank's description differs, naming the first difference and both sides.
    """
    # Digests first: descriptions of large units are long, and nearly always equal.
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()
    mine = everyone = torch.tensor([*digest, flag], dtype=torch.uint8, device=device)
    for size, group in zip(mesh.sizes, mesh.groups, strict=True):
        before, everyone = everyone, everyone.new_empty(size * everyone.numel())
        collectives.all_gather([everyone], [before], group)
    differs = everyone.view(mesh.size, len(mine)) != mine
    if not differs[:, :-1].any():
        return bool(differs[:, -1].any())
    descriptions: list[Any] = [dict(description)]
    for size, group in zip(mesh.sizes, mesh.groups, strict=True):
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, descriptions, group=group)
        descriptions = list(itertools.chain.from_iterable(gathered))
    first = descriptions[0]
    rank, other = next((k, d) for k, d in enumerate(descriptions) if d != first)
    raise ValueError(f"fully_shard of {unit}: ranks differ: {_first_difference(first, rank, other)}")


def require_all_ranks(what: str, mesh: DataParallelMesh, reason: str) -> None:
    """Return once all ranks of ``mesh`` have come here with the same ``what``, as they must before a collective.

    Over the store of the process groups: a collective would meet those of ranks that do not come. A store holds three
    keys a rank, whatever the number of calls.

    Raises RuntimeError when the store's timeout has passed: ``what``, the ranks that did not come, and ``reason``.
    """
    for size, group in zip(mesh.sizes, mesh.groups, strict=True):
        store, own = group.get_group_store(), dist.get_rank(group)
        turn = store.add(f"twinshard turns {own}", 1)
        here, all_here = f"twinshard {turn} {what}", f"twinshard all at {turn}"
        store.set(f"twinshard at {own}", here)
        if store.add(here, 1) == size:
            store.set(all_here, "")
            # Whoever comes to this turn has left the one before.
            store.delete_key(here)
            store.delete_key(f"twinshard all at {turn - 1}")
            continue
        deadline = time.monotonic() + store.timeout.total_seconds()
        # Not wait(): it would keep the store's lock from other threads.
        while not store.check([all_here]):
            if time.monotonic() > deadline:
                keys = [f"twinshard at {k}" for k in range(size)]
                came = [store.check([key]) and store.get(key).decode() == here for key in keys]
                names = dist.get_process_group_ranks(group)
                missing = [name for name, there in zip(names, came, strict=True) if not there]
                raise RuntimeError(
                    f"{what} on rank {names[own]}, but not on ranks {missing} within "
                    f"{store.timeout.total_seconds():.0f} s: {reason}"
                )
            time.sleep(0.001)


def _first_difference(first: Mapping[str, Any], rank: int, other: Mapping[str, Any]) -> str:
    ours, theirs = first["parameters"], other["parameters"]
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return f"rank 0 has {_parameter(a)}, rank {rank} has {_parameter(b)}"
    if len(ours) != len(theirs):
        longer, holder, lacking = (ours, 0, rank) if len(ours) > len(theirs) else (theirs, rank, 0)
        return f"rank {holder} has {_parameter(longer[min(len(ours), len(theirs))])}, rank {lacking} lacks it"
    key = next(k for k in first if first[k] != other.get(k))
    return f"{key}: rank 0 has {first[key]!r}, rank {rank} has {other.get(key)!r}"


def _parameter(entry: list[Any]) -> str:
    name, shape, dtype, requires_grad = entry
    return f"{name} {tuple(shape)} {dtype}{'' if requires_grad else ' frozen'}"
