"""Failing together: an error on one rank becomes an error on all, instead of a hang on the others.

``agree`` exchanges the outcomes of an action. ``gather`` and ``scatter`` move small values to and from rank 0.
``require_same_unit`` compares how the ranks shard a unit, once per unit. ``require_all_ranks`` waits for ranks that
might never come, so a collective that only one rank begins ends in an error instead of a hang.

Ranks that save or load together form a process group, None for the default group: see ``group_of``. Work in the
background agrees over a separate group, ``background_group``: in a shared group its messages could mix with the
messages of a training step.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from bridge.core.formats import CheckpointError
from bridge.core.text import first_of
from torch_impl.comm import collectives
from torch_impl.comm.mesh import DataParallelMesh

T = TypeVar("T")

_HAND_OVER_SECONDS = 0.01
_ABSENT = "absent"

# The default group, and the groups made in addition to it, by ranks and by whether they are for the background.
_made: tuple[Any, dict[tuple[tuple[int, ...], bool], dist.ProcessGroup]] | None = None

# Raised unchanged, so that callers can tell wrong use from damage; every other error becomes a CheckpointError.
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
    claim: object


class Outcome(NamedTuple, Generic[T]):
    """What ``agree`` returns: this rank's own value, and the value that rank 0 shared with all ranks."""

    value: T
    shared: object


def rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank in ``group``; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def group_of(group: dist.ProcessGroup | None, mesh_ranks: Iterable[int]) -> dist.ProcessGroup | None:
    """The group whose ranks save or load together: ``group`` if given, else a group of ``mesh_ranks``.

    Returns None, the default group, if ``mesh_ranks`` are all ranks or none. Only the mesh's ranks make their group.

    Raises TypeError for anything but a process group, ValueError on a rank that is not in it.
    """
    if group is not None:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"process_group: expected a torch.distributed.ProcessGroup, got {type(group).__name__} (for a mesh: "
                "mesh.get_group())"
            )
        if dist.get_rank(group) < 0:
            raise ValueError(
                f"process_group: expected a group that contains the calling rank {dist.get_rank()}, got ranks "
                f"{dist.get_process_group_ranks(group)}"
            )
        return group
    ranks = tuple(sorted(set(mesh_ranks)))
    if not dist.is_initialized() or not ranks or len(ranks) == dist.get_world_size():
        return None
    return _group_beside(ranks, background=False)


def background_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """A gloo group of the ranks of ``group`` for one background thread; None without a process group.

    Made at the first call, which all these ranks make together; a new default group makes it again.
    """
    if not dist.is_initialized():
        return None
    return _group_beside(tuple(dist.get_process_group_ranks(group)), background=True)


def _group_beside(ranks: tuple[int, ...], *, background: bool) -> dist.ProcessGroup:
    global _made
    world = dist.group.WORLD
    if _made is None or _made[0] is not world:
        _made = world, {}
    known = _made[1]
    if (ranks, background) not in known:
        # Ranks outside the group may be in a training step, or gone.
        apart = len(ranks) < dist.get_world_size()
        known[ranks, background] = dist.new_group(
            list(ranks), backend="gloo", use_local_synchronization=apart
        )
    return known[ranks, background]


def agree(
    action: Callable[[], T],
    share: Callable[[T], object] | None = None,
    group: dist.ProcessGroup | None = None,
    claim: Mapping[str, object] | None = None,
) -> Outcome[T]:
    """Run ``action`` on every rank, then exchange outcomes once; all ranks return, or all raise.

    ``action`` must not communicate, or must fail on all ranks together. ``share(value)`` of rank 0, a small picklable
    value, reaches every rank in the same exchange. The error names each failing rank and its cause. It keeps the type
    of the first error if that type is a usual one (file exists, not found, ...), and is a CheckpointError otherwise.
    ``group``: the ranks that call this, by default the default group; "rank 0" means its first rank. ``claim``: values
    that must be equal on all ranks, by the names that errors use. A CheckpointError names two ranks and their values.
    """
    cause: Exception | None = None
    claimed = dict(claim or {})
    try:
        value = action()
        report = _Report(None, "", share(value) if share else None, claimed)
    except Exception as error:
        cause = error
        report = _Report(type(error).__name__, str(error), None, claimed)
    reports = exchange(report, group)
    if len(reports) > 1:
        # gloo's thread needs the interpreter lock to drop the exchanged tensors. If the thread asks for the lock while
        # the interpreter shuts down, torch aborts the process. Programs often end right after a save, so wait now.
        time.sleep(_HAND_OVER_SECONDS)
    require_same_claims([answer.claim for answer in reports.values()], [*reports])
    failed = {k: answer for k, answer in reports.items() if answer.error is not None}
    if failed:
        error_class = _KEPT.get(next(iter(failed.values())).error or "", CheckpointError)
        raise error_class(_describe(failed, len(reports))) from cause
    return Outcome(value, next(iter(reports.values())).shared)


def require_same_claims(claims: Sequence[Any], ranks: Sequence[int]) -> None:
    """CheckpointError with the first difference between the claims of the ranks; ``ranks[i]`` made ``claims[i]``."""
    first, differs = claims[0], next((k for k, claim in enumerate(claims) if claim != claims[0]), None)
    if differs is None:
        return
    other = claims[differs]
    key = next(key for key in (*first, *other) if first.get(key, _ABSENT) != other.get(key, _ABSENT))
    like: dict[bool, list[int]] = {True: [], False: []}
    for number, claim in zip(ranks, claims, strict=True):
        like[claim.get(key, _ABSENT) == first.get(key, _ABSENT)].append(number)
    raise CheckpointError(
        f"ranks that save or load together differ: {key} is {first.get(key, _ABSENT)} on rank {ranks[0]}, "
        f"{other.get(key, _ABSENT)} on rank {ranks[differs]} (ranks {first_of(like[True])} against "
        f"{first_of(like[False])}); pass the same value on all ranks of a process group, and use process_group= to "
        "select ranks that save separately"
    )


def _alone(group: dist.ProcessGroup | None) -> bool:
    """Whether there is no other rank to agree with. CheckpointError if the process group was destroyed."""
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


def exchange(value: T, group: dist.ProcessGroup | None = None) -> dict[int, T]:
    """Every rank's picklable value, on all ranks of the group, by rank."""
    if _alone(group):
        return {rank(): value}
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return dict(zip(dist.get_process_group_ranks(group), values, strict=True))


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's picklable value, on the first rank of the group; an empty list on the other ranks."""
    if _alone(group):
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size(group) if rank(group) == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def scatter(values: list[T], group: dist.ProcessGroup | None = None) -> T:
    """This rank's item of ``values``, the picklable values that the first rank of the group passes."""
    if _alone(group):
        return values[0]
    received: list[Any] = [None]
    dist.scatter_object_list(received, values if rank(group) == 0 else None, group=group, group_src=0)
    own: T = received[0]
    return own


def _describe(failed: dict[int, _Report], size: int) -> str:
    texts = {r.message if r.error in _KEPT else f"{r.error}: {r.message}" for r in failed.values()}
    if len(texts) == 1 and len(failed) == size:
        return texts.pop()
    world = dist.get_world_size()
    return "\n".join(f"rank {k} of {world}: {r.error}: {r.message}" for k, r in failed.items())


def require_same_unit(
    unit: str, description: Mapping[str, Any], flag: bool, mesh: DataParallelMesh, device: torch.device
) -> bool:
    """Compare ``description`` (JSON values) over the ranks of ``mesh`` by a small all-gather of its SHA-256 per axis.

    ``description["parameters"]`` is a list of ``[name, shape, dtype, requires_grad]``; all other entries are compared
    unchanged. ``flag`` may differ between ranks; returns whether it differs.

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


def require_all_ranks(what: str, mesh: DataParallelMesh, reason: str, *, since: str = "") -> None:
    """Return once all ranks of ``mesh`` have called this with the same ``what``, as they must before a collective.

    Uses the store of the process groups, since a collective could match one of the ranks that do not come. The store
    holds a few keys per rank, whatever the number of calls. ``since`` must be equal, too, but is not in the error.

    Raises RuntimeError with ``what``, the ranks with another value, and ``reason``: at once when all ranks have called,
    else when the store's timeout has passed.
    """
    others = ""
    for group in mesh.groups:
        # Ranks of the next axis, which also wait for this rank, must fail with it.
        said = _meet(group, what, "unlike" if others else since)
        others = others or said
    if others:
        raise RuntimeError(f"{what} on rank {dist.get_rank()}, but {others}: {reason}")


def _meet(group: dist.ProcessGroup, what: str, since: str) -> str:
    """Wait for the ranks of one axis. Returns what differs on other ranks, empty if all are alike."""
    # torch's stubs know no timeout.
    store: Any = group.get_group_store()
    own, names = dist.get_rank(group), dist.get_process_group_ranks(group)
    turn = store.add(f"twinshard turns {own}", 1)
    counts, all_here = (f"twinshard {turn} {since} {what}", f"twinshard {turn}"), f"twinshard all at {turn}"
    # Each rank alternates between two keys. A rank that continues after an error writes its other key, so the other
    # ranks can still read the value of this turn. A rank reaches the turn after next once all have left this one.
    at = [f"twinshard at {turn % 2} {k}" for k in range(len(names))]
    store.set(at[own], f"{turn} {what}")

    def unlike() -> dict[int, str]:
        texts = [store.get(key).decode() if store.check([key]) else "" for key in at]
        return {name: text for name, text in zip(names, texts, strict=True) if text != f"{turn} {what}"}

    _, came = (store.add(key, 1) for key in counts)
    if came == len(names):
        # Others may have come since the first count.
        store.set(all_here, "alike" if store.add(counts[0], 0) == came else "unlike")
        # A rank that reaches this turn has left the previous one.
        for key in (*counts, f"twinshard all at {turn - 1}"):
            store.delete_key(key)
    deadline, pause = time.monotonic() + store.timeout.total_seconds(), 0.0001
    # Not wait(): it would keep the store's lock from other threads.
    while not store.check([all_here]):
        if time.monotonic() > deadline:
            # As if this rank had not come: it may continue after the error, and come again with all ranks.
            for key in (f"twinshard turns {own}", *counts):
                store.add(key, -1)
            missing = [*unlike()]
            store.set(at[own], "")
            return f"not on ranks {missing} within {store.timeout.total_seconds():.0f} s"
        time.sleep(pause)
        # Frequent polling by many ranks would keep the store from answering.
        pause = min(2 * pause, 0.01)
    if store.get(all_here) == b"alike":
        return ""
    for name, text in unlike().items():
        return f"{text.partition(' ')[2]} on rank {name}"
    return "other ranks differ from each other, or differed before"


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
