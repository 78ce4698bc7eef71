"""The parts of a sharded model (units, groups, buffers), their sizes and dtypes, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from bridge.core.sharding.layout import group_report
from bridge.core.sharding.policy.float8 import gather_bytes
from bridge.core.text import counted, table_lines
from bridge.core.views import Viewed
from torch_impl.diagnostics.tensors import named_units
from torch_impl.runtime.unit.group import ParameterGroup
from torch_impl.runtime.weights.extended_weights import ExtendedWeights

_COLUMNS = (
    *("unit", "module", "params", "elements", "padding", "shards", "shard", "align", "strategy", "dtypes"),
)
_RIGHT = frozenset({"params", "elements", "padding", "shards", "shard", "align"})


@dataclass(frozen=True)
class GroupReport(group_report.GroupReport):
    """One parameter group; ``parameters``: names below the unit's module.

    gather_dtype: "fsdp_pre_all_gather" if a tensor subclass defines it; gather_bytes: then 0 before the first gather.
    divisor: the divisor of summed gradients.
    """

    mesh: tuple[int, ...]
    divisor: float


@dataclass(frozen=True)
class UnitReport:
    """One unit; ``reshard_after_forward`` None means True, except for the root."""

    name: str
    module: str
    reshard_after_forward: bool | None
    groups: tuple[GroupReport, ...]


@dataclass(frozen=True, repr=False)
class LayoutReport(Viewed):
    """All units of a model, outermost first, and the parameters that no unit owns. ``str`` is a table."""

    units: tuple[UnitReport, ...]
    ignored: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of all sharded parameters."""
        return sum(group.numel for unit in self.units for group in unit.groups)

    @property
    def padded_numel(self) -> int:
        """Elements of all sharded parameters, with padding."""
        return sum(group.padded_numel for unit in self.units for group in unit.groups)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def summary(self) -> str:
        """One line."""
        count = sum(len(group.parameters) for unit in self.units for group in unit.groups)
        ignored = f", and {len(self.ignored)} that are not sharded" if self.ignored else ""
        return f"{counted(len(self.units), 'unit')}, {self.numel:,} elements in {counted(count, 'parameter')}{ignored}"

    def __str__(self) -> str:
        rows = [_row(unit, group) for unit in self.units for group in unit.groups or (None,)]
        padding = 100 * (self.padded_numel / self.numel - 1) if self.numel else 0.0
        count = sum(len(group.parameters) for unit in self.units for group in unit.groups)
        rows.append(("total", "", f"{count}", f"{self.numel:,}", f"{padding:.2f} %", *[""] * 5))
        lines = table_lines(_COLUMNS, rows, _RIGHT)
        if self.ignored:
            lines.append("not sharded: " + ", ".join(self.ignored))
        return "\n".join(lines)


def layout_report(model: nn.Module) -> LayoutReport:
    """Describe the current sharding of ``model``. Not collective: all ranks have the same report."""
    modules = dict(model.named_modules())
    units, owned = [], set()
    for unit, name in named_units(model).items():
        kinds = [type(modules[part]).__name__.removeprefix("FSDP") for part in name.split("+")]
        groups = tuple(map(_group_report, unit.groups))
        units.append(UnitReport(name, "+".join(kinds), unit.reshard_after_forward, groups))
        owned |= {id(p) for group in unit.groups for p in (*group.params, *group.unsharded)}
    ignored = tuple(name for name, param in model.named_parameters() if id(param) not in owned)
    return LayoutReport(tuple(units), ignored)


def _group_report(group: ParameterGroup) -> GroupReport:
    layout, dtypes = group.layout, group.dtypes
    held = (dtypes.main, dtypes.compute, dtypes.reduce, dtypes.grad)
    main, compute, reduce, grad = (str(dtype).removeprefix("torch.") for dtype in held)
    gather_dtype, gather_bytes = _gathered(group)
    return GroupReport(
        parameters=tuple(group.names),
        trainable=any(param.requires_grad for param in group.params),
        numel=layout.numel,
        padded_numel=layout.padded_size,
        num_shards=layout.num_shards,
        shard_sizes=layout.shard_sizes,
        align=layout.align,
        strategy=group.strategy.name,
        mesh=tuple(group.mesh.mesh.shape),
        divisor=group.divisor,
        fingerprint=layout.fingerprint,
        main_dtype=main,
        compute_dtype=compute,
        reduce_dtype=reduce,
        grad_dtype=grad,
        gather_dtype=gather_dtype,
        gather_bytes=gather_bytes,
    )


def _gathered(group: ParameterGroup) -> tuple[str, int]:
    """The dtype or format in which weights cross the network, and the number of bytes."""
    layout, dtypes = group.layout, group.dtypes
    if isinstance(group.weights, ExtendedWeights):
        return "fsdp_pre_all_gather", group.weights.gather_bytes
    sent = gather_bytes(layout, dtypes.gather, dtypes.compute.itemsize)
    return dtypes.gather or str(dtypes.compute).removeprefix("torch."), sent


def _row(unit: UnitReport, group: GroupReport | None) -> tuple[str, ...]:
    cells = {"params": "0", "elements": "0"} if group is None else group.cells
    cells = {"unit": unit.name or "(root)", "module": unit.module, **cells}
    return tuple(cells.get(column, "") for column in _COLUMNS)
