"""The units, groups and shards of a sharded model, with sizes and dtypes, as data and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from jax.sharding import Mesh, NamedSharding

from bridge.core.sharding.layout import group_report
from bridge.core.sharding.policy import float8
from bridge.core.sharding.policy.recompute import Recompute
from bridge.core.text import first_of, table_lines
from bridge.core.views import Viewed
from jax_impl.runtime.groups.cut_group import CutGroup
from jax_impl.runtime.groups.flat_group import FlatGroup

_RIGHT = frozenset({"layers", "params", "elements", "padding", "shards", "shard", "align", "bytes/device"})


class ReportedPlan(Protocol):
    """The plan to describe, a ``ShardingPlan``, which prints itself by this report."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def engine(self) -> str: ...
    @property
    def units(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class GroupReport(group_report.GroupReport):
    """One parameter group; ``parameters``: paths in the model. For a stack, numbers cover all layers.

    whole: parameters that the strategy shards but that every device holds whole (pjit engine).
    over: model axes that cut parameters of the group: all parameters in the shard_map engine, some in the pjit engine.
    nbytes: bytes of the main weights at rest on each device.

    padded_numel: counts each element once, however many devices hold it. num_shards: over all axes. shard_sizes: for
    one layer. In the pjit engine, align is 1, there is one shard size, which includes whole parameters, and the
    fingerprint is "". strategy: the unit's strategy, or "no_shard" for ``replicated`` parameters.
    """

    whole: tuple[str, ...]
    over: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class UnitReport:
    """One unit; ``layers``: number of layers of the stack that it represents, or None."""

    name: str
    layers: int | None
    strategy: str
    recompute: Recompute
    groups: tuple[GroupReport, ...]


@dataclass(frozen=True, repr=False)
class LayoutReport(Viewed):
    """All units of a plan, in the order of the model, the root last. ``str`` is a table."""

    engine: str
    mesh: Mapping[str, int]
    units: tuple[UnitReport, ...]

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(group.numel for group in self._groups())

    @property
    def padded_numel(self) -> int:
        """The same number with padding."""
        return sum(group.padded_numel for group in self._groups())

    @property
    def nbytes(self) -> int:
        """Bytes of the main weights at rest on each device."""
        return sum(group.nbytes for group in self._groups())

    @property
    def whole(self) -> tuple[str, ...]:
        """Parameters that a strategy shards but that every device holds whole (pjit engine)."""
        return tuple(path for group in self._groups() for path in group.whole)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(replace(self, mesh=dict(self.mesh)))

    def summary(self) -> str:
        """One line."""
        count = sum(len(group.parameters) for group in self._groups())
        return (
            f"{self.engine} engine, {math.prod(self.mesh.values())} devices {dict(self.mesh)}, {len(self.units)} "
            f"units, {count} parameters, {self.numel:,} elements"
        )

    def render(self, *, merge: bool = False) -> str:
        """The table; ``merge``: consecutive units that differ only in their names share a line."""
        rows = [tuple(row.values()) for row in self._merged(merge)]
        lines = table_lines(tuple(_row(None, None)), rows, _RIGHT)
        if self.whole:
            lines.append(f"whole on every device: {first_of(self.whole, 8)}")
        return "\n".join([self.summary(), *lines])

    def __str__(self) -> str:
        return self.render()

    def _groups(self) -> Iterator[GroupReport]:
        return (group for unit in self.units for group in unit.groups)

    def _merged(self, merge: bool) -> Iterator[dict[str, str]]:
        alike: list[tuple[str, list[dict[str, str]]]] = []
        for unit in self.units:
            rows = [_row(unit, group) for group in unit.groups or (None,)]
            nameless = [row | {"unit": ""} for row in rows]
            if merge and alike and [row | {"unit": ""} for row in alike[-1][1]] == nameless:
                alike[-1] = (unit.name, alike[-1][1])
                continue
            alike.append((unit.name, rows))
        for last, rows in alike:
            for row in rows:
                same = row["unit"] in (last, "(root)")
                yield row if same else row | {"unit": f"{row['unit']} .. {last}, each"}
        yield _row(None, None) | dict.fromkeys(_row(None, None), "") | self._total()

    def _total(self) -> dict[str, str]:
        padding = 100 * (self.padded_numel / self.numel - 1) if self.numel else 0.0
        count = sum(len(group.parameters) for group in self._groups())
        return {
            "unit": "total",
            "params": f"{count}",
            "elements": f"{self.numel:,}",
            "padding": f"{padding:.2f} %",
            "bytes/device": f"{self.nbytes:,}",
        }


def layout_report(plan: ReportedPlan) -> LayoutReport:
    """Describe a ``ShardingPlan``: strategy, shards, elements and padding of each unit, and whole parameters.

    All processes get the same report. ``print(plan)`` shows the same table, with equal units in one line.
    """
    units = tuple(
        UnitReport(
            name,
            unit.module.layers,
            unit.strategy.name,
            unit.recompute,
            tuple(_group_report(group) for group in unit.groups),
        )
        for name, unit in plan.units.items()
    )
    return LayoutReport(plan.engine, dict(plan.mesh.shape), units)


def _group_report(group: Any) -> GroupReport:
    wire, layers = group.wire, group.layers or 1
    num_shards = wire.axes.shards(group.strategy.optimizer)
    whole: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    fingerprint, align = "", 1
    if isinstance(group, FlatGroup):
        layout, rows = group.layout, 1
        if isinstance(group, CutGroup):
            over, rows = group.axes, group.rows
        numel, padded = layers * rows * layout.numel, layers * rows * layout.padded_size
        sent = layers * rows * float8.gather_bytes(layout, wire.float8, wire.compute.itemsize)
        sizes, num_shards = layout.shard_sizes, num_shards * rows
        fingerprint, align = layout.fingerprint, layout.align
    else:
        shapes = [NamedSharding(group.mesh, array.spec).shard_shape(array.shape) for array in group.arrays]
        if num_shards > 1:
            whole = tuple(array.path for array in group.arrays if array.dimension is None)
        numel = padded = sum(math.prod(array.shape) for array in group.arrays)
        scales = sum(map(_blocks, group.arrays)) if wire.float8 == "mxfp8" else 0
        sent = padded + scales if wire.float8 else padded * wire.compute.itemsize
        sizes = (sum(map(math.prod, shapes)) // layers,)
        over = tuple(dict.fromkeys(cut.axis for array in group.arrays for cut in array.cuts))
    return GroupReport(
        parameters=tuple(group.paths),
        whole=whole,
        trainable=group.trainable,
        over=over,
        numel=numel,
        padded_numel=padded,
        num_shards=num_shards,
        shard_sizes=sizes,
        align=align,
        strategy=group.strategy.name,
        nbytes=layers * sum(sizes) * wire.main.itemsize,
        fingerprint=fingerprint,
        main_dtype=wire.main.name,
        compute_dtype=wire.compute.name,
        reduce_dtype=wire.reduce.name,
        grad_dtype=wire.grad.name,
        gather_dtype=wire.float8 or wire.compute.name,
        gather_bytes=sent,
    )


def _blocks(array: Any) -> int:
    *rows, size = array.shape
    return math.prod(rows) * float8.blocks_of(size)


def _row(unit: UnitReport | None, group: GroupReport | None) -> dict[str, str]:
    row = {
        "unit": (unit.name or "(root)") if unit else "",
        "layers": str(unit.layers or "") if unit else "",
        "strategy": unit.strategy if unit else "",
        "params": "0",
        "elements": "0",
        "padding": "",
        "shards": "",
        "shard": "",
        "align": "",
        "bytes/device": "0",
        "dtypes": "",
    }
    if unit is None or group is None:
        return row
    cells = group.cells
    over = f" over {', '.join(group.over)}" if group.over else ""
    return row | cells | {"params": cells["params"] + over, "bytes/device": f"{group.nbytes:,}"}
