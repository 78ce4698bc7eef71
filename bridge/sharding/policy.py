"""A sharding policy: mesh, precision and units of a model, from a TOML file that both runtimes read.

The file format is in the README of this package. A policy knows what it may say and which modules of a model it makes
units, by their paths alone; the ``ShardingPolicy`` of a runtime is this one with a method that shards a model by it.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from bridge.sharding.alignment import DEFAULT_ALIGN, Align, is_align
from bridge.sharding.mesh_axes import why_not_data_parallel
from bridge.sharding.recompute import RECOMPUTE_WORDS, Recompute, is_recompute
from bridge.sharding.strategy import Placements, Strategy, strategy_named

DTYPES = ("float32", "bfloat16", "float16", "float64")
MAIN_DTYPES = ("float32", "float64")
_TABLES = ("mesh", "precision", "unit")
_ALIGN = 'a number of elements >= 1, or "auto"'
# Keys of [mesh] that are no axes.
_OPTIONS = ("align", "prefetch")
_KINDS = ("parameters", "gradients", "optimizer")


class PolicyError(ValueError):
    """What is wrong with a policy: file, table and key, what was expected and what was found."""


@dataclass(frozen=True)
class UnitPolicy:
    """How the modules whose path matches are sharded, each as a unit of its own.

    match: dotted module path, each segment with the wildcards of ``fnmatch``; "" is the root.
    strategy, placements: at most one of the two; neither: "optim_grads_params".
    granularity: "row", "tensor" or "block(n)", of all parameters of the unit.
    recompute: compute the activations of the unit again in backward instead of keeping them, all (True) or all but what
        a name keeps, see ``recompute.py``.
    align: what the unit's shards are multiples of, see ``plan_layout``. None: what the policy says of all units.

    Raises PolicyError naming the field.
    """

    match: str
    strategy: str | None = None
    placements: Placements | None = None
    granularity: str = "row"
    recompute: Recompute = False
    align: Align | None = None

    def __post_init__(self) -> None:
        legal = isinstance(self.match, str) and (not self.match or all(self.match.split(".")))
        _require(
            legal and "/" not in self.match, "match", 'a dotted path as in "layers.*", or ""', self.match
        )
        if self.strategy is not None:
            _require(isinstance(self.strategy, str), "strategy", "a name", self.strategy)
            if self.placements is not None:
                raise PolicyError(
                    f"expected strategy or placements ({', '.join(_KINDS)}), got both, strategy {self.strategy!r}"
                )
        elif self.placements is not None:
            _require(
                isinstance(self.placements, Placements),
                "placements",
                "Placements of this package",
                self.placements,
            )
        try:
            _ = self.chosen
        except ValueError as error:
            raise PolicyError(str(error)) from None
        grain = isinstance(self.granularity, str) and re.fullmatch(
            r"row|tensor|block\([1-9][0-9]*\)", self.granularity
        )
        _require(grain, "granularity", "row, tensor or block(n) with n >= 1", self.granularity)
        _require(is_recompute(self.recompute), "recompute", RECOMPUTE_WORDS, self.recompute)
        _require(self.align is None or is_align(self.align), "align", _ALIGN, self.align)

    @property
    def chosen(self) -> Strategy:
        """The strategy, whichever way it was given."""
        if self.placements is not None:
            return self.placements.strategy
        return strategy_named("optim_grads_params" if self.strategy is None else self.strategy)


@dataclass(frozen=True)
class PrecisionPolicy:
    """Names of dtypes; None takes the default, which the properties give. Raises PolicyError naming the field.

    main: of the main weights, "float32" or "float64"; the model must have such, nothing is cast to it.
    compute: of forward and backward (None: that of the main weights).
    reduce: in which gradients cross the network (None: that of compute).
    grad: of the reduced gradient that the optimizer reads (None: that of the main weights).
    """

    main: str = "float32"
    compute: str | None = None
    reduce: str | None = None
    grad: str | None = None

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            known = MAIN_DTYPES if key == "main" else DTYPES
            _require(
                value in known or (value is None and key != "main"), key, f"one of {', '.join(known)}", value
            )

    @property
    def compute_dtype(self) -> str:
        return self.compute or self.main

    @property
    def reduce_dtype(self) -> str:
        return self.reduce or self.compute_dtype

    @property
    def grad_dtype(self) -> str:
        return self.grad or self.main


@dataclass(frozen=True)
class ShardingPolicy:
    """Units, mesh and precision. Raises PolicyError that begins with ``source``.

    units: at least one; of several whose pattern matches a module the first one counts. One must be the root's, "".
    mesh: one or two data-parallel axes, outer to inner: name -> size, or "all" for what the other axis leaves.
    source: what errors call the policy, such as its file.
    align: what shards of the units are multiples of that say nothing else, see ``plan_layout``; ``[mesh] align``.
    prefetch: 1 lets transfers run beside computation, for a second unit's weights and gradients in memory; 0 does not.
        None: the runtime's default; ``[mesh] prefetch``.
    axes: the items of ``mesh``; unlike a mapping they are compared in their order.
    """

    units: tuple[UnitPolicy, ...]
    mesh: Mapping[str, int | str] = field(default_factory=lambda: {"dp": "all"}, compare=False)
    precision: PrecisionPolicy = field(default_factory=PrecisionPolicy)
    source: str = field(default="policy", compare=False)
    align: Align = DEFAULT_ALIGN
    prefetch: int | None = None
    axes: tuple[tuple[str, int | str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        with _at(self.source):
            _check_mesh(self.mesh)
            _require(is_align(self.align), "[mesh] align", _ALIGN, self.align)
            legal = self.prefetch in (None, 0, 1) and not isinstance(self.prefetch, bool | float)
            _require(legal, "[mesh] prefetch", "0 or 1", self.prefetch)
            object.__setattr__(self, "axes", tuple(self.mesh.items()))
            object.__setattr__(self, "mesh", dict(self.mesh))
            _require(
                isinstance(self.precision, PrecisionPolicy), "precision", "a PrecisionPolicy", self.precision
            )
            listed = isinstance(self.units, list | tuple)
            _require(
                listed and all(isinstance(unit, UnitPolicy) for unit in self.units),
                "units",
                "UnitPolicy items",
                self.units,
            )
            object.__setattr__(self, "units", tuple(self.units))
            self._check_units()

    def _check_units(self) -> None:
        if not self.units:
            raise PolicyError("[[unit]]: expected at least one, got none")
        first: dict[str, int] = {}
        names = [name for name, _ in self.axes]
        for number, unit in enumerate(self.units, 1):
            with _at(f"[[unit]] {number}"):
                if unit.match in first:
                    raise PolicyError(
                        f"match: expected each pattern once, got {unit.match!r} as in [[unit]] {first[unit.match]}"
                    )
                first[unit.match] = number
                words = unit.placements.parameters if unit.placements else names
                if len(words) != len(names):
                    raise PolicyError(
                        f"placements: expected one word for each mesh axis ({', '.join(names)}), got {len(words)}"
                    )
                if unit.strategy in ("hsdp", "hfsdp") and len(names) != 2:
                    raise PolicyError(
                        f"strategy: expected [mesh] with two axes for {unit.strategy!r}, got {', '.join(names)}"
                    )
        if "" not in first:
            raise PolicyError(
                "[[unit]]: expected one for the root, all that no other unit owns, got none; add [[unit]] "
                'match = ""'
            )

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> Self:
        """Read a file, or an example that ships with the package by its name, such as "fsdp"."""
        shipped = {
            item.name.removesuffix(".toml"): item
            for item in (files("bridge.sharding") / "policies").iterdir()
        }
        given = os.fspath(path_or_name)
        if given in shipped:
            return cls.parse(shipped[given].read_text(encoding="utf-8"), f"{given}.toml")
        try:
            text = Path(given).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PolicyError(
                f"{given}: expected a TOML file, got other bytes than UTF-8: {error}"
            ) from error
        except OSError as error:
            names = ", ".join(sorted(shipped))
            reason = error.strerror
            raise PolicyError(f"{given}: expected a TOML file or one of {names}, got: {reason}") from error
        return cls.parse(text, given)

    @classmethod
    def parse(cls, text: str, source: str = "policy") -> Self:
        """The policy that ``text``, the content of a file, describes."""
        try:
            content = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise PolicyError(f"{source}: expected TOML, got an error at: {error}") from error
        with _at(source):
            _only(content, _TABLES)
            options: dict[str, Any] = {}
            axes = content.get("mesh")
            if isinstance(axes, dict):
                options |= {key: axes.pop(key) for key in _OPTIONS if key in axes}
            # A table with nothing but options leaves the axes to the default.
            if "mesh" in content and (axes or not options):
                options["mesh"] = axes
            if "precision" in content:
                with _at("[precision]"):
                    options["precision"] = PrecisionPolicy(**_table(content["precision"], PrecisionPolicy))
            listed = content.get("unit", [])
            _require(isinstance(listed, list), "[[unit]]", "a list of tables", listed)
            units = []
            for number, entry in enumerate(listed, 1):
                with _at(f"[[unit]] {number}"):
                    units.append(_unit(entry))
        return cls(tuple(units), source=source, **options)

    def to_toml(self) -> str:
        """The content of a file that ``parse`` reads as this policy."""
        lines = ["[mesh]", *(f"{name} = {json.dumps(size)}" for name, size in self.axes)]
        if self.align != DEFAULT_ALIGN:
            lines.append(f"align = {json.dumps(self.align)}")
        if self.prefetch is not None:
            lines.append(f"prefetch = {self.prefetch}")
        lines += ["", "[precision]"]
        lines += [
            f"{key} = {json.dumps(value)}" for key, value in vars(self.precision).items() if value is not None
        ]
        for unit in self.units:
            lines += ["", "[[unit]]", f"match = {_quoted(unit.match)}"]
            if unit.strategy is not None:
                lines.append(f"strategy = {json.dumps(unit.strategy)}")
            if unit.placements is not None:
                lines += [f"{kind} = {json.dumps(getattr(unit.placements, kind))}" for kind in _KINDS]
            lines.append(f"granularity = {json.dumps(unit.granularity)}")
            lines.append(f"recompute = {json.dumps(unit.recompute)}")
            if unit.align is not None:
                lines.append(f"align = {json.dumps(unit.align)}")
        return "\n".join(lines) + "\n"

    def align_of(self, unit: UnitPolicy) -> Align:
        """What the shards of one of the units are multiples of."""
        return self.align if unit.align is None else unit.align

    def mesh_sizes(self, devices: int) -> dict[str, int]:
        """The size of each axis, outer to inner, on ``devices`` devices, all of which the mesh must use."""
        fixed = math.prod(size for _, size in self.axes if isinstance(size, int))
        sizes = {name: devices // fixed if size == "all" else int(size) for name, size in self.axes}
        if math.prod(sizes.values()) != devices or devices < 1:
            axes = " x ".join(f"{name} = {json.dumps(size)}" for name, size in self.axes)
            raise PolicyError(f"{self.source}: [mesh]: expected axes of {devices} devices in all, got {axes}")
        return sizes

    def units_of(self, paths: Iterable[str]) -> dict[str, UnitPolicy]:
        """Which modules are units, and by which entry: path -> UnitPolicy in the order of ``paths``, the root last.

        paths: the dotted paths of all modules of a model that have a forward; "" may be among them.

        Raises PolicyError for a pattern that matches none of them, or only such as earlier patterns took.
        """
        known = [path for path in dict.fromkeys(paths) if path]
        numbers: dict[str, int] = {}
        for number, unit in enumerate(self.units, 1):
            matched = [path for path in known if _matches(unit.match, path)]
            new = [path for path in matched if path not in numbers]
            if unit.match and not new:
                with _at(f"{self.source}: [[unit]] {number}: match"):
                    raise PolicyError(self._why_no_unit(unit.match, matched, numbers, known))
            numbers.update(dict.fromkeys(new, number))
        root = next(unit for unit in self.units if not unit.match)
        return {path: self.units[numbers[path] - 1] for path in known if path in numbers} | {"": root}

    def _why_no_unit(
        self, pattern: str, matched: list[str], numbers: Mapping[str, int], known: Collection[str]
    ) -> str:
        if not matched:
            near = difflib.get_close_matches(pattern, known, n=4, cutoff=0.3) or list(known)[:4]
            return f"expected modules that {pattern!r} matches, got none; near: {', '.join(near) or 'no modules'}"
        takers = ", ".join(
            f"[[unit]] {number} ({self.units[number - 1].match!r})"
            for number in sorted({numbers[path] for path in matched})
        )
        return (
            f"expected modules for {pattern!r} that no earlier pattern matches, got {', '.join(matched[:4])}, taken by "
            f"{takers}"
        )


def _require(holds: object, key: str, expected: str, got: object) -> None:
    if not holds:
        raise PolicyError(f"{key}: expected {expected}, got {got!r}")


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Put ``place`` in front of errors."""
    try:
        yield
    except PolicyError as error:
        raise PolicyError(f"{place}: {error}") from None


def _check_mesh(mesh: object) -> None:
    if not isinstance(mesh, Mapping):
        raise PolicyError(f"[mesh]: expected a table of axes, got {mesh!r}")
    names = ", ".join(map(str, mesh))
    if len(mesh) not in (1, 2):
        raise PolicyError(f"[mesh]: expected one or two axes, got {names or 'none'}")
    for name, size in mesh.items():
        _require(name not in _OPTIONS, "[mesh]", f"axes of other names than {' and '.join(_OPTIONS)}", name)
        legal = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        _require(legal, "[mesh]", "axis names of letters, digits and _", name)
        _require(
            size == "all" or (type(size) is int and size >= 1), f"[mesh] {name}", 'a size >= 1 or "all"', size
        )
    if list(mesh.values()).count("all") > 1:
        raise PolicyError(f'[mesh]: expected "all" for one axis at most, got it for {names}')
    refusal = why_not_data_parallel(mesh)
    if refusal is not None:
        raise PolicyError(f"[mesh]: {refusal}")


def _only(table: Mapping[str, Any], keys: Collection[str]) -> None:
    for key in table:
        if key not in keys:
            raise PolicyError(f"{key}: expected no other keys than {', '.join(keys)}, got {key!r}")


def _table(value: object, cls: type[PrecisionPolicy]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PolicyError(f"expected a table, got {value!r}")
    _only(value, [one.name for one in fields(cls)])
    return value


def _unit(entry: object) -> UnitPolicy:
    if not isinstance(entry, dict):
        raise PolicyError(f"expected a table, got {entry!r}")
    _only(entry, ("match", "strategy", *_KINDS, "granularity", "recompute", "align"))
    if "match" not in entry:
        raise PolicyError('match: expected a dotted path as in "layers.*", or "", got none')
    options = {key: value for key, value in entry.items() if key not in _KINDS}
    given = [kind for kind in _KINDS if kind in entry]
    if given:
        if given != list(_KINDS):
            raise PolicyError(f"expected {', '.join(_KINDS)} together, got {', '.join(given)} only")
        for kind in _KINDS:
            words = ("partial" if kind == "gradients" else "replicate", "shard")
            legal = (
                isinstance(entry[kind], list) and entry[kind] and all(word in words for word in entry[kind])
            )
            _require(legal, kind, f"a list of {' or '.join(words)} for each mesh axis", entry[kind])
        try:
            options["placements"] = Placements(*(entry[kind] for kind in _KINDS))
        except ValueError as error:
            raise PolicyError(str(error)) from None
    return UnitPolicy(**options)


def _quoted(text: str) -> str:
    # JSON leaves a character as it is that TOML wants escaped, and TOML knows no surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _matches(pattern: str, path: str) -> bool:
    segments, parts = pattern.split("."), path.split(".")
    return len(segments) == len(parts) and all(map(fnmatch.fnmatchcase, parts, segments))
