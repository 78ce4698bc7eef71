"""The collectives of a compiled program: what is transferred, and between which devices.

The GPU compiler writes a start and a done as operations. The TPU compiler writes start, done, and everything that runs
between them as fusions that each repeat the collective; custom calls in them, ``AsyncCollectiveStart`` and
``AsyncCollectiveDone``, distinguish them::

    %f1 (...) { %g = f32[128] all-gather(...), channel_id=7 ... custom-call(%g), ...="AsyncCollectiveStart" }
    %f2 (...) { %g = f32[128] all-gather(...), channel_id=7 ... %c = f32[8,8] convolution(...) }
    %f3 (...) { %g = f32[128] all-gather(...), channel_id=7 ... custom-call(%g), ...="AsyncCollectiveDone" }
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from bridge.core.hlo.text import Array, Module, Operation, arrays_of, elements

KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "psum",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
COPY = "copy"
"""The kind for a copy inside a device, between a TPU's main memory and its VMEM."""

_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_PAIR = re.compile(r"source_target_pairs=\{(.*?)\}\}")
_PARTITIONS = re.compile(r"^HloModule .*\bnum_partitions=(\d+)")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_CHAIN = re.compile(r'channel_id=(\d+)|chain_id="(\d+)"')
START, DONE = (f'custom_call_target="AsyncCollective{half}"' for half in ("Start", "Done"))


@dataclass(frozen=True)
class Transfer:
    """``kind``: JAX's name of a collective, or ``COPY``. ``bytes``: of the full arrays; for a copy, read and written.

    ``groups``: numbers of the devices that communicate, one group of several similar ones; for ``ppermute`` the pairs.
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def members(self) -> int:
        return len(self.groups[0]) if self.groups else 1


def is_collective(operation: Operation) -> bool:
    return operation.op.removesuffix("-start") in KINDS


def transfer(module: Module, wrapped: list[Operation], outer: Operation, partitions: int) -> Transfer:
    """``wrapped``: collectives that run as one, inside or in place of the operation ``outer``; see ``kind_of``."""
    collective = kind_of(module, wrapped, outer)
    size = sum(array.bytes for inner in wrapped for array in full_arrays(inner, partitions))
    return Transfer(collective, size, groups_of(wrapped[0], partitions))


def kind_of(module: Module, wrapped: list[Operation], outer: Operation) -> str:
    """JAX's name. Raises ``ValueError`` for collectives of several kinds."""
    kinds = {inner.op.removesuffix("-start") for inner in wrapped}
    if len(kinds) > 1:
        raise ValueError(f"expected one kind of collective in {outer.name}, got {sorted(kinds)}")
    (collective,) = kinds
    # A fusion that reduces and keeps a shard. An all-reduce that is sliced elsewhere still sends all of its bytes.
    keeps_a_shard = outer.op == "fusion" and any(
        inner.op == "dynamic-slice" for _, inner in module.within(outer)
    )
    return KINDS["reduce-scatter" if collective == "all-reduce" and keeps_a_shard else collective]


def collectives_of(module: Module, operation: Operation) -> list[Operation]:
    """The collectives that an operation is, or that it contains."""
    if is_collective(operation):
        return [operation]
    if operation.op not in ("async-start", "fusion"):
        return []
    return [inner for _, inner in module.within(operation) if is_collective(inner)]


def partitions_of(text: str) -> int:
    written = _PARTITIONS.match(text)
    return int(written[1]) if written else 1


def chain_of(operation: Operation) -> str:
    """An identifier that all pieces of one asynchronous collective of the TPU compiler share."""
    return str(_CHAIN.findall(operation.attributes))


def marked(module: Module, operation: Operation, marker: str) -> set[str]:
    """The chains that a fusion of the TPU compiler begins (``START``), or ends (``DONE``)."""
    if operation.op != "fusion":
        return set()
    inner = [called for _, called in module.within(operation)]
    names = {name for called in inner if marker in called.attributes for name in called.operands}
    return {chain_of(called) for called in inner if is_collective(called) and called.name in names}


def full_arrays(operation: Operation, partitions: int) -> tuple[Array, ...]:
    """The whole arrays that a collective gathers or reduces; several if XLA has merged collectives."""
    collective = operation.op.removesuffix("-start")
    if operation.op == collective or collective == "all-reduce":
        if collective != "reduce-scatter":
            return operation.arrays
        members = len(groups_of(operation, partitions)[0])
        return tuple(replace(array, shape=(members, *array.shape)) for array in operation.arrays)
    # (operands, results, and platform-specific additions)
    parts = elements(operation.result)
    return arrays_of(parts[0] if collective == "reduce-scatter" else parts[1])


def groups_of(operation: Operation, partitions: int) -> tuple[tuple[int, ...], ...]:
    """See ``Transfer.groups``. ``partitions``: devices of the program, which all take part if none are named."""
    text = operation.attributes
    if operation.op.startswith("collective-permute"):
        pairs = _PAIR.search(text)
        numbers = [int(number) for number in re.findall(r"\d+", pairs[1])] if pairs else []
        return tuple(zip(numbers[::2], numbers[1::2], strict=True))
    if listed := _LISTED.search(text):
        return (tuple(int(number) for number in listed[1].split(",") if number),)
    if iota := _IOTA.search(text):
        sizes = [int(number) for number in iota[3].split(",")]
        order = [int(number) for number in iota[4].split(",")] if iota[4] else list(range(len(sizes)))
        return (_transposed(sizes, order, int(iota[2])),)
    if mesh := _MESH.search(text):
        axes = {name: int(size) for name, size in _AXIS.findall(mesh[1])}
        chosen = [number.strip(" '") for number in mesh[2].split(",")]
        if not axes.keys() >= set(chosen):
            raise ValueError(
                f"{operation.name}: expected a collective over whole axes of its mesh, got {mesh[0]}"
            )
        order = [list(axes).index(name) for name in [*(set(axes) - set(chosen)), *chosen]]
        members = math.prod(axes[name] for name in chosen)
        return (_transposed(list(axes.values()), order, members),)
    return (tuple(range(partitions)),)


def _transposed(sizes: list[int], order: list[int], count: int) -> tuple[int, ...]:
    """The first ``count`` numbers of devices on a mesh whose axes are reordered."""
    devices = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
    return tuple(devices.ravel()[:count].tolist())
