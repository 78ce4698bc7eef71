"""Check that all ranks begin the collectives of units in the same order.

A backend matches collectives of ranks by their order alone. If ranks called different units of equal sizes, the backend
would mix the weights of these units, and their gradients, without an error::

    rank 0    gather a    gather b    reduce b    reduce a
    rank 1    gather b    gather a    reduce a    reduce b

So ranks compare what they begin, before the collective, over the store of their process groups: whenever one collective
follows another for the first time, because a program that treats ranks differently mostly does so in its first steps,
and once per ``_EVERY`` collectives. Both comparisons include the history. Other steps exchange nothing.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torch_impl.comm.agreement import require_all_ranks
from torch_impl.comm.mesh import DataParallelMesh

_EVERY = 1000
# In a fake group one process plays all ranks; MPI groups have no store.
_WITHOUT_STORE = ("fake", "mpi")
_REASON = (
    "call the same units in the same order on all ranks, if need be on inputs without rows, with the same "
    "set_requires_gradient_sync(), set_requires_all_reduce() and set_is_last_backward()"
)


@dataclass
class _History:
    """The collectives begun on the axes of a mesh. It does not hold the mesh, so that its process groups can end."""

    # The number of groups of parameters made until now.
    groups: int = 0
    last: str = ""
    count: int = 0
    checksum: int = 0
    agreed: set[tuple[str, str]] = field(default_factory=set)


# Weakly by process group: a history must not keep a destroyed group alive.
_histories: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, ...], _History]] = WeakKeyDictionary()


def collective_order(mesh: DataParallelMesh) -> CollectiveOrder | None:
    """The order of a new group of parameters; None if there are no ranks to compare, or if they have no store."""
    backends = [dist.get_backend(group) for group in mesh.groups]
    if mesh.size == 1 or any(backend in _WITHOUT_STORE for backend in backends):
        return None
    return CollectiveOrder(mesh)


class CollectiveOrder:
    """The order of all collectives of units over the axes of ``mesh``; equal meshes share one history.

    Each group of parameters has one. All ranks make their groups in the same order, so a group has the same number on
    all ranks. Names would not be enough: units of two models may have the same name.
    """

    def __init__(self, mesh: DataParallelMesh) -> None:
        self._mesh = mesh
        names = tuple(group.group_name for group in mesh.groups)
        self._history = _histories.setdefault(mesh.groups[0], {}).setdefault(names, _History())
        self._number = self._history.groups
        self._history.groups += 1

    def begin(self, what: str) -> None:
        """To be called before a collective. ``what``: a text that identifies the collective, equal on all ranks.

        Raises RuntimeError, which names ranks and collectives, if ranks differ.
        """
        its, mine = self._history, f"{self._number} {what}"
        count, checksum, pair = its.count + 1, zlib.crc32(mine.encode(), its.checksum), (its.last, mine)
        # Pairs, not single collectives: two ranks that swap two units have begun the same set.
        if pair not in its.agreed or count % _EVERY == 0:
            require_all_ranks(what, self._mesh, _REASON, since=f"{count} {checksum:08x}")
            its.agreed.add(pair)
        its.last, its.count, its.checksum = mine, count, checksum
