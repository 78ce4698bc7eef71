"""What a sharded model consists of: units, groups, buffers, their sizes and dtypes, as data and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from bridge.core.sharding.policy.float8 import gather_bytes
from torch_impl.diagnostics.tensors import named_units
from torch_impl.runtime.unit.group import ParameterGroup
from torch_impl.runtime.unit.unit import Unit
from torch_impl.runtime.weights.extended_weights import ExtendedWeights

_HEADER = (
    "unit",
    "module",
    "params",
    "elements",
    "padding",
    "shards",
    "shard",
    "align",
    "strategy",
    "dtypes",
)
_RIGHT = frozenset({"params", "elements", "padding", "shards", "shard", "align"})


@dataclass(frozen=True)
class GroupReport:
    """One parameter group: parameters of a unit that share flat buffers.

    parameters: names below the unit's module.
    numel: their elements; padded_numel: with padding, of the whole buffers.
    shard_sizes: elements of one shard, by buffer, multiples of align; num_shards: how many each buffer is cut into.
    main_dtype, compute_dtype, reduce_dtype, grad_dtype: as text, see ``MixedPrecisionPolicy``.
    gather_dtype: in which weights cross the network, compute_dtype, a float8 format, or "fsdp_pre_all_gather" where a
        class says it. gather_bytes: of the whole group then, padding and scales included; of such a class 0 before the
        first gather.
    divisor: of summed gradients.
    fingerprint: of the layout.
    """

    parameters: tuple[str, ...]
    trainable: bool
    numel: int
    padded_numel: int
    num_shards: int
    shard_sizes: tuple[int, ...]
    align: int
    strategy: str
    mesh: tuple[int, ...]
    divisor: float
    fingerprint: str
    main_dtype: str
    compute_dtype: str
    reduce_dtype: str
    grad_dtype: str
    gather_dtype: str
    gather_bytes: int

    @property
    def padding(self) -> float:
        """Padding as a fraction of the real elements."""
        return self.padded_numel / self.numel - 1 if self.numel else 0.0


@dataclass(frozen=True)
class UnitReport:
    """One unit; ``reshard_after_forward`` None stands for yes, except for the root."""

    name: str
    module: str
    reshard_after_forward: bool | None
    groups: tuple[GroupReport, ...]


@dataclass(frozen=True)
class LayoutReport:
    """All units of a model, outermost first, and the parameters that no unit owns. ``str`` is a table."""

    units: tuple[UnitReport, ...]
    ignored: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of all sharded parameters."""
        return sum(group.numel for unit in self.units for group in unit.groups)

    @property
    def padded_numel(self) -> int:
        """The same with padding."""
        return sum(group.padded_numel for unit in self.units for group in unit.groups)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [_HEADER]
        for unit in self.units:
            for group in unit.groups or (None,):
                rows.append(_row(unit, group))
        padding = 100 * (self.padded_numel / self.numel - 1) if self.numel else 0.0
        count = sum(len(group.parameters) for unit in self.units for group in unit.groups)
        rows.append(("total", "", f"{count}", f"{self.numel:,}", f"{padding:.2f} %", *[""] * 5))
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        lines = [
            "  ".join(
                cell.rjust(width) if title in _RIGHT else cell.ljust(width)
                for cell, width, title in zip(row, widths, _HEADER, strict=True)
            ).rstrip()
            for row in rows
        ]
        if self.ignored:
            lines.append("not sharded: " + ", ".join(self.ignored))
        return "\n".join(lines)


def layout_report(model: nn.Module) -> LayoutReport:
    """Describe ``model`` as it is sharded now. Not collective: all ranks have the same report."""
    modules = dict(model.named_modules())
    units, owned = [], set()
    for unit, name in named_units(model).items():
        kinds = [type(modules[part]).__name__.removeprefix("FSDP") for part in name.split("+")]
        units.append(_unit_report(unit, name, "+".join(kinds)))
        owned |= {id(p) for group in unit.groups for p in (*group.params, *group.unsharded)}
    ignored = tuple(name for name, param in model.named_parameters() if id(param) not in owned)
    return LayoutReport(tuple(units), ignored)


def _unit_report(unit: Unit, name: str, module: str) -> UnitReport:
    groups = tuple(_group_report(group) for group in unit.groups)
    return UnitReport(name, module, unit.reshard_after_forward, groups)


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
    """In which dtype or format weights cross the network, and how many bytes."""
    layout, dtypes = group.layout, group.dtypes
    if isinstance(group.weights, ExtendedWeights):
        return "fsdp_pre_all_gather", group.weights.gather_bytes
    sent = gather_bytes(layout, dtypes.gather, dtypes.compute.itemsize)
    return dtypes.gather or str(dtypes.compute).removeprefix("torch."), sent


def _row(unit: UnitReport, group: GroupReport | None) -> tuple[str, ...]:
    if group is None:
        return (unit.name or "(root)", unit.module, "0", "0", *[""] * 6)
    sizes = " + ".join(f"{size:,}" for size in group.shard_sizes) or "0"
    dtypes = [group.main_dtype, group.compute_dtype, group.reduce_dtype, group.grad_dtype]
    same = len(set(dtypes)) == 1
    return (
        unit.name or "(root)",
        unit.module,
        f"{len(group.parameters)}{'' if group.trainable else ' frozen'}",
        f"{group.numel:,}",
        f"{100 * group.padding:.2f} %",
        str(group.num_shards),
        sizes,
        str(group.align),
        group.strategy,
        ("/".join(dtypes[:1] if same else dtypes))
        + ("" if group.gather_dtype == group.compute_dtype else f" gathered as {group.gather_dtype}"),
    )
