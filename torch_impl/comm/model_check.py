"""Do all ranks shard the same unit the same way? Asked once per unit, so that a difference is an error, not a hang."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from torch_impl.comm import collectives
from torch_impl.comm.mesh import DataParallelMesh


def require_same_unit(
    unit: str, description: Mapping[str, Any], mesh: DataParallelMesh, device: torch.device
) -> None:
    """Compare ``description`` (JSON values) over the ranks of ``mesh`` by a small all-gather of its SHA-256 an axis.

    ``description["parameters"]`` is a list of ``[name, shape, dtype, requires_grad]``; all other entries are compared
    as they are. Raises ValueError on every rank when some rank's differs, naming the first difference and both sides.
    """
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()
    mine = everyone = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    for size, group in zip(mesh.sizes, mesh.groups, strict=True):
        before, everyone = everyone, everyone.new_empty(size * everyone.numel())
        collectives.all_gather([everyone], [before], group)
    if torch.equal(everyone, mine.repeat(mesh.size)):
        return
    descriptions: list[Any] = [dict(description)]
    for size, group in zip(mesh.sizes, mesh.groups, strict=True):
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, descriptions, group=group)
        descriptions = list(itertools.chain.from_iterable(gathered))
    first = descriptions[0]
    rank, other = next((k, d) for k, d in enumerate(descriptions) if d != first)
    raise ValueError(f"fully_shard of {unit}: ranks differ: {_first_difference(first, rank, other)}")


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
