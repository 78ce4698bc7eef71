"""A sharding policy: mesh, precision, units and model-parallel cuts, from a TOML file that both runtimes read.

``docs/reference/policy-file.md`` describes the file format. A policy validates its fields, and selects the modules of a
model that become units, only by their paths. A runtime's ``ShardingPolicy`` adds a method that shards a model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Self

from bridge.core.sharding.layout.alignment import DEFAULT_ALIGN, Align, is_align
from bridge.core.sharding.policy.mesh_axes import is_model_axis
from bridge.core.sharding.policy.parallel import ParallelPolicy, entries_of
from bridge.core.sharding.policy.policy_error import PolicyError, at, require
from bridge.core.sharding.policy.policy_file import check_mesh, parallel_lines, read_tables, unit_lines
from bridge.core.sharding.policy.precision_policy import PrecisionPolicy
from bridge.core.sharding.policy.unit_policy import ALIGN_WORDS, UnitPolicy, matches, near
from bridge.core.text_files import MAX_TOML, parse_toml, read_text


@dataclass(frozen=True)
class ShardingPolicy:
    """Units, mesh and precision. Raises PolicyError that begins with ``source``.

    units: at least one; if several patterns match a module, the first one counts. One must be the root's, "". mesh: one
    or two data-parallel axes, outer to inner, then at most two model axes: name -> size, or "all" for all remaining
    devices. The names of model axes are in ``mesh_axes``.
    source: the policy's name in errors, such as its file.
    align: the alignment of shards for units without their own, see ``plan_layout``; ``[mesh] align``.
    prefetch: 1 overlaps transfers with computation, which needs memory for a second unit's weights and gradients; 0
    does not.
        None: the runtime's default; ``[mesh] prefetch``.
    parallel: which parameters are cut over model axes.
    axes: the items of ``mesh``; unlike in a mapping, their order matters in comparisons.
    """

    units: tuple[UnitPolicy, ...]
    mesh: Mapping[str, int | str] = field(default_factory=lambda: {"dp": "all"}, compare=False)
    precision: PrecisionPolicy = field(default_factory=PrecisionPolicy)
    source: str = field(default="policy", compare=False)
    align: Align = DEFAULT_ALIGN
    prefetch: int | None = None
    parallel: tuple[ParallelPolicy, ...] = ()
    axes: tuple[tuple[str, int | str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        with at(self.source):
            check_mesh(self.mesh)
            require(is_align(self.align), "[mesh] align", ALIGN_WORDS, self.align)
            legal = self.prefetch in (None, 0, 1) and not isinstance(self.prefetch, bool | float)
            require(legal, "[mesh] prefetch", "0 or 1", self.prefetch)
            object.__setattr__(self, "axes", tuple(self.mesh.items()))
            object.__setattr__(self, "mesh", dict(self.mesh))
            require(
                isinstance(self.precision, PrecisionPolicy), "precision", "a PrecisionPolicy", self.precision
            )
            for name, item_type in (("units", UnitPolicy), ("parallel", ParallelPolicy)):
                items = getattr(self, name)
                legal = isinstance(items, list | tuple) and all(isinstance(item, item_type) for item in items)
                require(legal, name, f"{item_type.__name__} items", items)
                object.__setattr__(self, name, tuple(items))
            self._check_units()
            self._check_parallel()

    def _check_parallel(self) -> None:
        for number, entry in enumerate(self.parallel, 1):
            if entry.axis not in self.model_axes:
                known = ", ".join(self.model_axes) or "none"
                description = "a data-parallel axis" if entry.axis in self.data_axes else "no axis of [mesh]"
                raise PolicyError(
                    f"[[parallel]] {number}: axis: expected a model axis of [mesh] ({known}), got {entry.axis!r}, "
                    f"{description}"
                )

    def _check_units(self) -> None:
        if not self.units:
            raise PolicyError("[[unit]]: expected at least one, got none")
        first: dict[str, int] = {}
        names = self.data_axes
        for number, unit in enumerate(self.units, 1):
            with at(f"[[unit]] {number}"):
                if unit.match in first:
                    raise PolicyError(
                        f"match: expected each pattern once, got {unit.match!r} as in [[unit]] {first[unit.match]}"
                    )
                first[unit.match] = number
                words = unit.placements.parameters if unit.placements else names
                if len(words) != len(names):
                    raise PolicyError(
                        f"placements: expected one word for each data-parallel axis ({', '.join(names)}), got "
                        f"{len(words)}"
                    )
                if unit.strategy in ("hsdp", "hfsdp") and len(names) != 2:
                    raise PolicyError(
                        f"strategy: expected [mesh] with two data-parallel axes for {unit.strategy!r}, got "
                        f"{', '.join(names)}"
                    )
        if "" not in first:
            raise PolicyError(
                "[[unit]]: expected one for the root, which owns all that no other unit owns, got none; add [[unit]] "
                'match = ""'
            )

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> Self:
        """Read a file, or by name an example that ships with the package, such as "fsdp"."""
        shipped = {
            item.name.removesuffix(".toml"): item
            for item in (files("bridge.core.sharding") / "policies").iterdir()
        }
        path = os.fspath(path_or_name)
        if path in shipped:
            return cls.parse(shipped[path].read_text(encoding="utf-8"), f"{path}.toml")
        try:
            text = read_text(Path(path), PolicyError, most=MAX_TOML, expected="a TOML file")
        except OSError as error:
            names = ", ".join(sorted(shipped))
            reason = error.strerror
            raise PolicyError(f"{path}: expected a TOML file or one of {names}, got: {reason}") from error
        return cls.parse(text, path)

    @classmethod
    def parse(cls, text: str, source: str = "policy") -> Self:
        """The policy that ``text``, the content of a file, describes."""
        content = parse_toml(text, source, PolicyError)
        with at(source):
            options = read_tables(content)
        return cls(**options, source=source)

    def to_toml(self) -> str:
        """The content of a file that ``parse`` turns into this policy."""
        lines = ["[mesh]", *(f"{name} = {json.dumps(size)}" for name, size in self.axes)]
        if self.align != DEFAULT_ALIGN:
            lines.append(f"align = {json.dumps(self.align)}")
        if self.prefetch is not None:
            lines.append(f"prefetch = {self.prefetch}")
        lines += ["", "[precision]"]
        lines += [
            f"{key} = {json.dumps(value)}"
            for key, value in vars(self.precision).items()
            if value not in (None, False)
        ]
        for unit in self.units:
            lines += unit_lines(unit)
        for entry in self.parallel:
            lines += parallel_lines(entry)
        return "\n".join(lines) + "\n"

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The names of the data-parallel axes, outer to inner; strategies and placements refer to them."""
        return tuple(name for name, _ in self.axes if not is_model_axis(name))

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The names of the axes over which ``parallel`` or the model itself cuts parameters."""
        return tuple(name for name, _ in self.axes if is_model_axis(name))

    def align_of(self, unit: UnitPolicy) -> Align:
        """The alignment of a unit's shards."""
        return self.align if unit.align is None else unit.align

    def mesh_sizes(self, devices: int) -> dict[str, int]:
        """The size of each axis, outer to inner, on ``devices`` devices; the mesh must use all devices."""
        fixed = math.prod(size for _, size in self.axes if isinstance(size, int))
        sizes = {name: devices // fixed if size == "all" else int(size) for name, size in self.axes}
        if math.prod(sizes.values()) != devices or devices < 1:
            axes = " x ".join(f"{name} = {json.dumps(size)}" for name, size in self.axes)
            raise PolicyError(f"{self.source}: [mesh]: expected axes of {devices} devices in all, got {axes}")
        return sizes

    def data_ranks(self, devices: int) -> int:
        """How many ranks share a batch: the product of the data-parallel axes. Errors as in ``mesh_sizes``."""
        sizes = self.mesh_sizes(devices)
        return math.prod(sizes[axis] for axis in self.data_axes)

    def check_model_axes(self, cut_by_model: Collection[str] = ()) -> None:
        """PolicyError for a model axis over which neither ``parallel`` nor the model itself cuts anything.

        cut_by_model: axes over which the model's parameters are already cut, by annotations or as DTensors.
        """
        cut = {*cut_by_model, *(entry.axis for entry in self.parallel)}
        for axis in self.model_axes:
            if axis not in cut:
                raise PolicyError(
                    f"{self.source}: [mesh] {axis}: nothing is cut over {axis!r}, so that its devices would all do the "
                    "same work; expected a [[parallel]] entry with match, "
                    f'axis = "{axis}" and style = "colwise", "rowwise" or "expert", or a model that is cut over the '
                    "axis. Rename the axis (for example to 'dp') if the axis is data-parallel"
                )

    def units_of(self, paths: Iterable[str]) -> dict[str, UnitPolicy]:
        """Which modules are units, and by which entry: path -> UnitPolicy in the order of ``paths``, the root last.

        paths: the dotted paths of all modules of a model that have a forward; "" may be among them.

        Raises PolicyError for a pattern that matches none of them, or only modules that earlier patterns took.
        """
        known = [path for path in dict.fromkeys(paths) if path]
        numbers: dict[str, int] = {}
        for number, unit in enumerate(self.units, 1):
            matched = [path for path in known if matches(unit.match, path)]
            new = [path for path in matched if path not in numbers]
            if unit.match and not new:
                with at(f"{self.source}: [[unit]] {number}: match"):
                    raise PolicyError(self._why_no_unit(unit.match, matched, numbers, known))
            numbers.update(dict.fromkeys(new, number))
        root = next(unit for unit in self.units if not unit.match)
        return {path: self.units[numbers[path] - 1] for path in known if path in numbers} | {"": root}

    def parallel_of(self, paths: Iterable[str]) -> dict[str, tuple[ParallelPolicy, ...]]:
        """Which modules and parameters are cut over model axes, and by which entries, in the order of ``paths``.

        paths: the dotted paths of all modules and parameters of a model.

        Raises PolicyError for an entry without a matching pattern, and for two entries that cut one path over one axis.
        """
        return entries_of(self.parallel, paths, self.source)

    def _why_no_unit(
        self, pattern: str, matched: list[str], numbers: Mapping[str, int], known: Collection[str]
    ) -> str:
        if not matched:
            return f"expected modules that {pattern!r} matches, got none; near: {near(pattern, known)}"
        takers = ", ".join(
            f"[[unit]] {number} ({self.units[number - 1].match!r})"
            for number in sorted({numbers[path] for path in matched})
        )
        return (
            f"expected modules for {pattern!r} that no earlier pattern matches, got {', '.join(matched[:4])}, taken by "
            f"{takers}"
        )
