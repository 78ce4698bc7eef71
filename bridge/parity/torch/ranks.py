"""The ranks' results, combined on rank 0 as one process with all rows would have them."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from bridge.core.text import first_lines
from bridge.parity.recorded.distance import distance, epsilon
from bridge.parity.recorded.recording import Call, Leaves, call_model, probe_values
from bridge.parity.recorded.trace import TraceError, batch_leaves
from bridge.parity.torch.leaves import leaves_of, whole
from bridge.parity.torch.losses import Loss

T = TypeVar("T")
_LIKE = 64.0
"""Allowed relative distance of replicas' values, in epsilons: some kernels add in any order."""
_SHOWN = 8
Way = int | Literal["mean"]
"""How the ranks' leaves become one: concatenated along an axis, or their mean (for equal leaves, the leaf itself)."""


@dataclass
class Ranks:
    """The ranks of the default process group, and their rows.

    ``group``: of all ranks, for objects. ``rows``: of each batch. ``holders``: the first rank with each distinct batch.
    ``owner``: by rank, the holder with the same batch. ``notes``: differences found between replicas.
    """

    group: Any
    rank: int
    size: int
    rows: int
    holders: tuple[int, ...]
    owner: tuple[int, ...]
    unlike: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Any) -> Ranks:
        """A collective. ``ValueError`` on all ranks for batches that one process could not have as one batch."""
        if not dist.is_initialized():
            raise ValueError(
                "a sharded model: expected a process group on all ranks, found none; run with torchrun"
            )
        # Objects go through gloo: NCCL would send them through GPU memory, and the default group may have no GPU.
        group = dist.new_group(backend="gloo")
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, _describe(batch), group)
        for rank, (problem, _, _, _) in enumerate(by_rank):
            if problem:
                raise ValueError(f"batch of rank {rank}: {problem}")
        for what, part in (("arrays", 1), ("rows", 2)):
            for rank, description in enumerate(by_rank):
                if description[part] != by_rank[0][part]:
                    raise ValueError(
                        f"batch of rank {rank}: expected as many {what} as rank 0 has, {by_rank[0][part]}, got "
                        f"{description[part]}; only then is the mean of the ranks' losses the loss of all rows"
                    )
        prints = [fingerprint for _, _, _, fingerprint in by_rank]
        owner = tuple(prints.index(fingerprint) for fingerprint in prints)
        holders = tuple(sorted(set(owner)))
        counts = {holder: owner.count(holder) for holder in holders}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"batches: expected each batch on the same number of ranks, got {list(counts.values())} "
                f"ranks, the first of which are {list(holders)}; give data-parallel ranks different rows"
            )
        return cls(group, dist.get_rank(), dist.get_world_size(), by_rank[0][2], holders, owner)

    @property
    def notes(self) -> list[str]:
        return first_lines(self.unlike, _SHOWN, " of these")

    def run_on_all(self, action: Callable[[], None]) -> None:
        """Run an action without communication; if it fails on one rank, all ranks raise."""
        error: Exception | None = None
        try:
            action()
        except Exception as caught:
            error = caught
        texts = self._all_gather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise TraceError(f"rank {rank}: {text}")

    def mean(self, value: float) -> float:
        """The mean over the distinct batches; a difference between replicas is noted."""
        by_rank = self._all_gather(value)
        for rank, owner in enumerate(self.owner):
            self._compare("the loss", np.asarray(by_rank[owner]), np.asarray(by_rank[rank]), owner, rank)
        # Exact, so that the mean does not depend on the number of ranks.
        return math.fsum(by_rank[holder] for holder in self.holders) / len(self.holders)

    def note_unlike(self, what: str, array: np.ndarray) -> None:
        """Note on rank 0 if an array differs from rank 0's on another rank."""
        for rank, values in enumerate(self._gather(array)):
            self._compare(what, array, values, 0, rank)

    def whole_batch(self, batch: Any) -> dict[str, np.ndarray]:
        """All rows on rank 0; empty on the other ranks."""
        by_rank = self._gather(dict(batch_leaves(batch)))
        return {
            name: np.concatenate([by_rank[holder][name] for holder in self.holders]) if leaf.ndim else leaf
            for name, leaf in (by_rank[0].items() if by_rank else ())
        }

    def whole_calls(self, calls: Sequence[Call]) -> Iterator[tuple[Leaves, Leaves, Leaves]]:
        """Inputs, outputs and gradients of each call on rank 0; nothing on the other ranks.

        ``ValueError`` on all ranks if the ranks called different modules.
        """
        made = self._all_gather([(call.path, call.number) for call in calls])
        for rank, theirs in enumerate(made):
            if theirs != made[0]:
                pairs = enumerate(itertools.zip_longest(made[0], theirs))
                index, both = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
                names = ["none" if call is None else repr(call[0]) for call in both]
                raise ValueError(
                    f"rank {rank}: expected the calls of rank 0, got another call at index {index}: {names[0]} on rank "
                    f"0, {names[1]} on rank {rank}"
                )
        for call in calls:
            yield self._whole_call(call)

    def _whole_call(self, call: Call) -> tuple[Leaves, Leaves, Leaves]:
        by_rank = self._gather((call.inputs, call.outputs, call.gradients))
        if not by_rank:
            return {}, {}, {}
        where = f"{call.path or '(model)'}" + (f"#{call.number}" if call.number else "")
        inputs, _ = self._merge(f"an input of {where}", [inputs for inputs, _, _ in by_rank])
        outputs, ways = self._merge(f"the output of {where}", [outputs for _, outputs, _ in by_rank])
        gradients: dict[str, np.ndarray] = {}
        for name, way in ways.items():
            parts = [by_rank[holder][2][name] for holder in self.holders if name in by_rank[holder][2]]
            if len(parts) == len(self.holders):
                # The loss is the mean of the holders' losses, so a gradient is divided by their number.
                joined = _join(parts, way)
                gradients[name] = (
                    (joined / len(parts)).astype(joined.dtype) if isinstance(way, int) else joined
                )
        return inputs, outputs, gradients

    def _merge(self, where: str, leaves: Sequence[Leaves]) -> tuple[dict[str, np.ndarray], dict[str, Way]]:
        merged: dict[str, np.ndarray] = {}
        ways: dict[str, Way] = {}
        for name in leaves[0]:
            arrays = [own[name] for own in leaves if name in own]
            what = f"{where}{f', {name},' if name else ''}"
            if len(arrays) < self.size:
                self.unlike.append(f"{what} does not exist on all ranks: left out")
                continue
            for rank, owner in enumerate(self.owner):
                self._compare(what, arrays[owner], arrays[rank], owner, rank)
            parts = [arrays[holder] for holder in self.holders]
            way = _way(parts, self.rows)
            if way is None:
                self.unlike.append(f"{what} does not fit together over the ranks: left out")
            else:
                ways[name], merged[name] = way, _join(parts, way)
        return merged, ways

    def _compare(self, what: str, left: np.ndarray, right: np.ndarray, first: int, second: int) -> None:
        """Note a difference between two replicas."""
        if first != second and not _alike(left, right):
            same_rows = self.owner[first] == self.owner[second]
            self.unlike.append(
                f"{what} differs between ranks {first} and {second}"
                + (", which have the same rows" if same_rows else "")
                + ": it is only a part, or a reduction is missing"
            )

    def _all_gather(self, value: T) -> list[T]:
        by_rank: list[Any] = [None] * self.size
        dist.all_gather_object(by_rank, value, self.group)
        return by_rank

    def _gather(self, value: T) -> list[T]:
        """All ranks' values on rank 0; nothing on the other ranks."""
        by_rank: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, by_rank, 0, self.group)
        return by_rank or []


def _describe(batch: Any) -> tuple[str, Any, int, str]:
    """A problem or ""; names; rows; a fingerprint."""
    try:
        leaves = dict(batch_leaves(batch))
    except Exception as error:
        return f"{type(error).__name__}: {error}", None, 0, ""
    rows = {name: leaf.shape[0] for name, leaf in leaves.items() if leaf.ndim}
    if not rows:
        return "expected arrays with a first axis of rows, got none", None, 0, ""
    if len(set(rows.values())) > 1 or 0 in rows.values():
        return f"expected the same number of rows in all arrays, and at least one, got {rows}", None, 0, ""
    digest = hashlib.sha256()
    for name, leaf in leaves.items():
        digest.update(f"{name} {leaf.dtype} {leaf.shape} ".encode() + np.ascontiguousarray(leaf).tobytes())
    return "", sorted(leaves), next(iter(rows.values())), digest.hexdigest()


def _way(parts: Sequence[np.ndarray], rows: int) -> Way | None:
    """How the holders' leaves become one leaf; None if they do not fit."""
    first = parts[0]
    if len(parts) == 1:
        return "mean"
    shapes = {part.shape for part in parts}
    equal = len(shapes) == 1 and all(part.tobytes() == first.tobytes() for part in parts)
    # With one row, a leading axis may also belong to a table that all rows share.
    if len(shapes) == 1 and first.ndim and first.shape[0] == rows and not (equal and rows == 1):
        return 0
    if equal:
        return "mean"
    if not first.ndim:
        return "mean" if first.dtype.kind not in "iub" else None
    axes = [axis for axis, size in enumerate(first.shape) if size == rows]
    if len(shapes) == 1 and len(axes) == 1:
        return axes[0]
    return 0 if len({part.shape[1:] for part in parts}) == 1 else None


def _join(parts: Sequence[np.ndarray], way: Way) -> np.ndarray:
    first = parts[0]
    if isinstance(way, int):
        return np.concatenate(parts, way)
    if all(part.tobytes() == first.tobytes() for part in parts):
        return first
    wide = np.result_type(first.dtype, np.float64)
    return np.asarray(np.mean([part.astype(wide) for part in parts], 0)).astype(first.dtype)


def _alike(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.tobytes() == right.tobytes():
        return True
    if left.dtype.kind in "iub" or left.dtype.kind == "c":
        return False
    return distance(left, right).relative <= _LIKE * epsilon(left.dtype.name)


def probe_of_all(ranks: Ranks) -> Loss:
    """``probe_loss`` over all rows: each rank multiplies its outputs by the numbers of its own rows."""

    def probe(model: nn.Module, batch: Any) -> torch.Tensor:
        index, number = ranks.holders.index(ranks.owner[ranks.rank]), len(ranks.holders)
        terms: list[torch.Tensor] = []
        for where, output in leaves_of(call_model(model, batch)).items():
            leaf = whole(output)
            if not (leaf.is_floating_point() and leaf.numel()):
                continue
            if leaf.ndim == 0 or leaf.shape[0] != ranks.rows:
                raise ValueError(
                    f"loss: expected outputs with a first axis of {ranks.rows} rows, got {where or 'one'} of "
                    f"{list(leaf.shape)}; pass a loss"
                )
            wide = torch.promote_types(leaf.dtype, torch.float32)
            numbers = probe_values(str(len(terms)), (number * ranks.rows, *leaf.shape[1:]))
            own = numbers[index * ranks.rows : (index + 1) * ranks.rows]
            factors = torch.from_numpy(own * (number / math.sqrt(numbers.size)))
            terms.append((leaf.to(wide) * factors.to(leaf.device, wide)).sum())
        if not terms:
            raise ValueError("the model's output has no floating-point array: pass a loss")
        return torch.stack([term.to(terms[0]) for term in terms]).sum()

    return probe
