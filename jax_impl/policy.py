"""Sharding policies: TOML files that ``torch_impl`` reads as well, with mesh, precision and units of a model.

::

    [mesh]                            # optional; outer to inner, one or two axes. Absent: dp = "all"
    dp_outer = 2                      # a size, or "all": what the other axis leaves
    dp = 4
    [precision]                       # optional, as every key of it
    main = "float32"                  # or float64
    compute = "bfloat16"              # or float32, float16, float64. Absent: main
    reduce = "float32"                # Absent: compute
    grad = "float32"                  # Absent: main
    [[unit]]                          # first match wins
    match = "layers.*"                # dotted module path, fnmatch wildcards within segments
    strategy = "optim_grads_params"   # or parameters, gradients and optimizer: lists of words, one for each axis
    granularity = "row"               # or tensor, block(n)
    recompute = true
    [[unit]]
    match = ""                        # the root, which must be there

Nothing here touches JAX, so that a policy can be read and checked where no device is.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from bridge.sharding.mesh_axes import why_not_data_parallel
from jax_impl.granularity import is_int
from jax_impl.strategy import Placements, Strategy, strategy_named

T = TypeVar("T")

DTYPES = {"main": ("float32", "float64")} | dict.fromkeys(
    ("compute", "reduce", "grad"), ("float32", "bfloat16", "float16", "float64")
)
_WORDS = {
    "parameters": ("replicate", "shard"),
    "gradients": ("partial", "shard"),
    "optimizer": ("replicate", "shard"),
}
_UNIT_KEYS = ("match", "strategy", *_WORDS, "granularity", "recompute")
_PATH = 'a dotted path as in "layers.*", or ""'


class PolicyError(ValueError):
    """Says at which key of which policy something else was expected."""


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise PolicyError(message)


def _inside(place: str, build: Callable[[], T]) -> T:
    """``build()``; its errors begin with ``place``."""
    try:
        return build()
    except PolicyError as error:
        raise PolicyError(f"{place}: {error}") from None


@dataclass(frozen=True)
class UnitPolicy:
    """One ``[[unit]]`` entry: modules whose path matches, and how each is sharded as a unit of its own.

    ``match``: a pattern such as ``layers.*``, or ``""`` for the root. ``strategy`` is a name that ``placements`` may
    spell out instead; without both it is ``optim_grads_params``. ``granularity``: ``row``, ``tensor`` or ``block(n)``.
    ``recompute``: activations are computed again in backward. Raises ``PolicyError`` for anything else.
    """

    match: str
    strategy: str | None = None
    placements: Placements | None = None
    granularity: str = "row"
    recompute: bool = False

    def __post_init__(self) -> None:
        match, strategy, placements = self.match, self.strategy, self.placements
        dotted = isinstance(match, str) and "/" not in match and (match == "" or "" not in match.split("."))
        _expect(dotted, f"match: expected {_PATH}, got {match!r}")
        _expect(strategy is None or isinstance(strategy, str), f"strategy: expected a name, got {strategy!r}")
        _expect(
            strategy is None or placements is None,
            f"expected strategy or placements ({', '.join(_WORDS)}), got both, strategy {strategy!r}",
        )
        _expect(
            placements is None or isinstance(placements, Placements),
            f"placements: expected Placements of this package, got {placements!r}",
        )
        _legal(lambda: self.chosen)
        grain = isinstance(self.granularity, str) and re.fullmatch(
            r"row|tensor|block\([1-9][0-9]*\)", self.granularity
        )
        _expect(
            bool(grain),
            f"granularity: expected row, tensor or block(n) with n >= 1, got {self.granularity!r}",
        )
        _expect(
            isinstance(self.recompute, bool), f"recompute: expected true or false, got {self.recompute!r}"
        )

    @property
    def chosen(self) -> Strategy:
        """What ``strategy`` or ``placements`` stand for."""
        if self.placements is None:
            return strategy_named("optim_grads_params" if self.strategy is None else self.strategy)
        return self.placements.strategy


@dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes by name, ``None`` where left out; the properties fill in the defaults.

    ``main`` says which main weights the model must have (nothing is cast to it), ``compute`` is the dtype of forward
    and backward, ``reduce`` that of gradients on the wire, ``grad`` that of the gradients the optimizer reads. Raises
    ``PolicyError`` for other names.
    """

    main: str = "float32"
    compute: str | None = None
    reduce: str | None = None
    grad: str | None = None

    def __post_init__(self) -> None:
        for key, names in DTYPES.items():
            value = getattr(self, key)
            left_out = value is None and key != "main"
            _expect(left_out or value in names, f"{key}: expected one of {', '.join(names)}, got {value!r}")

    @property
    def compute_dtype(self) -> str:
        return self.main if self.compute is None else self.compute

    @property
    def reduce_dtype(self) -> str:
        return self.compute_dtype if self.reduce is None else self.reduce

    @property
    def grad_dtype(self) -> str:
        return self.main if self.grad is None else self.grad


@dataclass(frozen=True)
class ShardingPolicy:
    """What a policy file says. Raises ``PolicyError``, which begins with ``source``, for what does not fit together.

    ``units``: in the order in which they are tried; one must be for the root. ``mesh``: names of one or two
    data-parallel axes, outer to inner, with a size or ``"all"``. ``axes`` are its items, and what is compared: two
    meshes whose axes come in another order are not the same.
    """

    units: tuple[UnitPolicy, ...]
    mesh: Mapping[str, int | str] = field(default_factory=lambda: {"dp": "all"}, compare=False)
    precision: PrecisionPolicy = field(default_factory=PrecisionPolicy)
    source: str = field(default="policy", compare=False)
    axes: tuple[tuple[str, int | str], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        axes = _inside(self.source, lambda: _checked_axes(self.mesh))
        units = _inside(self.source, lambda: _checked_units(self.units, [name for name, _ in axes]))
        _expect(
            isinstance(self.precision, PrecisionPolicy),
            f"{self.source}: precision: expected a PrecisionPolicy, got {self.precision!r}",
        )
        for name, value in (("mesh", dict(axes)), ("axes", axes), ("units", units)):
            object.__setattr__(self, name, value)

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> ShardingPolicy:
        """From a file, or one of the examples that come with the package, by name: ``load("fsdp")``."""
        given = os.fspath(path_or_name)
        examples = {Path(each.name).stem: each for each in (files("bridge.sharding") / "policies").iterdir()}
        if given in examples:
            return cls.parse(examples[given].read_text(encoding="utf-8"), f"{given}.toml")
        try:
            text = Path(given).read_text(encoding="utf-8")
        except OSError as error:
            raise PolicyError(
                f"{given}: expected a TOML file or one of {', '.join(sorted(examples))}, got: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise PolicyError(
                f"{given}: expected a TOML file, got other bytes than UTF-8: {error}"
            ) from error
        return cls.parse(text, given)

    @classmethod
    def parse(cls, text: str, source: str = "policy") -> ShardingPolicy:
        """From the text of a file."""
        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, arrays too deep
            raise PolicyError(f"{source}: expected TOML, got an error at: {error}") from error
        return cls(source=source, **_inside(source, lambda: _arguments(table)))

    def to_toml(self) -> str:
        """The text of a file that says the same; ``parse`` gives an equal policy."""
        precision = {key: getattr(self.precision, key) for key in DTYPES}
        tables = [("[mesh]", dict(self.axes)), ("[precision]", precision)]
        for unit in self.units:
            entry: dict[str, Any] = {"match": unit.match, "strategy": unit.strategy}
            entry |= {kind: getattr(unit.placements, kind, None) for kind in _WORDS}
            tables.append(
                ("[[unit]]", entry | {"granularity": unit.granularity, "recompute": unit.recompute})
            )
        return "\n".join(
            "\n".join(
                [
                    header,
                    *(f"{key} = {_literal(value)}" for key, value in table.items() if value is not None),
                    "",
                ]
            )
            for header, table in tables
        )

    def mesh_sizes(self, devices: int) -> dict[str, int]:
        """``{axis: size}``, outer to inner; raises ``PolicyError`` unless the mesh has exactly ``devices`` devices."""
        given = math.prod(size for _, size in self.axes if isinstance(size, int))
        sizes = {name: size if isinstance(size, int) else devices // given for name, size in self.axes}
        axes = " x ".join(f"{name} = {_literal(size)}" for name, size in self.axes)
        _expect(
            devices >= 1 and math.prod(sizes.values()) == devices,
            f"{self.source}: [mesh]: expected axes of {devices} devices in all, got {axes}",
        )
        return sizes

    def units_of(self, paths: Iterable[str]) -> dict[str, UnitPolicy]:
        """Units of a model whose modules have these dotted paths, in their order, the root last.

        The lists that hold modules are no modules here: they cannot be called. Whether ``""`` is among ``paths`` makes
        no difference. Raises ``PolicyError`` for a pattern that no module matches, or none that is left for it.
        """
        modules = [path for path in dict.fromkeys(paths) if path != ""]
        taken: dict[str, int] = {}
        for number, unit in enumerate(self.units):
            if unit.match == "":
                continue
            matched = [path for path in modules if _fits(path, unit.match)]
            left = [path for path in matched if path not in taken]
            if not left:
                problem = self._taken(unit, matched, taken) if matched else _absent(unit, modules)
                raise PolicyError(f"{self.source}: [[unit]] {number + 1}: match: {problem}")
            taken |= dict.fromkeys(left, number)
        (root,) = (unit for unit in self.units if unit.match == "")
        return {**{path: self.units[taken[path]] for path in modules if path in taken}, "": root}

    def apply(self, model: Any, *, mesh: Any = None, **options: Any) -> tuple[Any, Any]:
        """``fully_shard(model, mesh, self, **options)``: the sharding plan, and the main weights in it.

        model: a flax nnx module; it is not changed. mesh: a ``jax.sharding.Mesh`` of this policy's axes; None: all
        devices of JAX. options: ``engine``, ``stacked``, ``frozen``, see ``jax_impl.options.ShardingOptions``.
        """
        from jax_impl.api import fully_shard

        return fully_shard(model, mesh, self, **options)

    def _taken(self, unit: UnitPolicy, matched: Sequence[str], taken: Mapping[str, int]) -> str:
        by = sorted({taken[path] for path in matched})
        return (
            f"expected modules for {unit.match!r} that no earlier pattern matches, got {', '.join(matched[:4])}, taken "
            f"by {', '.join(f'[[unit]] {number + 1} ({self.units[number].match!r})' for number in by)}"
        )


def _absent(unit: UnitPolicy, modules: Sequence[str]) -> str:
    near = get_close_matches(unit.match, modules, n=4, cutoff=0.3) or modules[:4]
    return f"expected modules that {unit.match!r} matches, got none; near: {', '.join(near) if near else 'no modules'}"


def _fits(path: str, pattern: str) -> bool:
    """Segment by segment."""
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(fnmatchcase(*pair) for pair in zip(parts, wanted, strict=True))


def _checked_axes(mesh: Any) -> tuple[tuple[str, int | str], ...]:
    _expect(isinstance(mesh, Mapping), f"[mesh]: expected a table of axes, got {mesh!r}")
    names = ", ".join(map(str, mesh)) or "none"
    _expect(1 <= len(mesh) <= 2, f"[mesh]: expected one or two axes, got {names}")
    for name, size in mesh.items():
        plain = isinstance(name, str) and bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name))
        _expect(plain, f"[mesh]: expected axis names of letters, digits and _, got {name!r}")
        legal = size >= 1 if is_int(size) else size == "all"
        _expect(legal, f'[mesh] {name}: expected a size >= 1 or "all", got {size!r}')
    once = list(mesh.values()).count("all") <= 1
    _expect(once, f'[mesh]: expected "all" for one axis at most, got it for {names}')
    refusal = why_not_data_parallel(mesh)
    _expect(refusal is None, f"[mesh]: {refusal}")
    return tuple(mesh.items())


def _checked_units(units: Any, axes: Sequence[str]) -> tuple[UnitPolicy, ...]:
    listed = isinstance(units, (list, tuple)) and all(isinstance(unit, UnitPolicy) for unit in units)
    _expect(listed, f"units: expected UnitPolicy items, got {units!r}")
    _expect(len(units) > 0, "[[unit]]: expected at least one, got none")
    numbers: dict[str, int] = {}
    for number, unit in enumerate(units, 1):
        place = f"[[unit]] {number}"
        first = numbers.setdefault(unit.match, number)
        _expect(
            first == number,
            f"{place}: match: expected each pattern once, got {unit.match!r} as in [[unit]] {first}",
        )
        words = len(axes) if unit.placements is None else len(unit.placements.parameters)
        _expect(
            words == len(axes),
            f"{place}: placements: expected one word for each mesh axis ({', '.join(axes)}), got {words}",
        )
        _expect(
            unit.strategy not in ("hsdp", "hfsdp") or len(axes) == 2,
            f"{place}: strategy: expected [mesh] with two axes for {unit.strategy!r}, got {', '.join(axes)}",
        )
    _expect(
        "" in numbers,
        '[[unit]]: expected one for the root, all that no other unit owns, got none; add [[unit]] match = ""',
    )
    return tuple(units)


def _arguments(table: Mapping[str, Any]) -> dict[str, Any]:
    """Of ``ShardingPolicy``, from a parsed file."""
    _known_keys(table, ("mesh", "precision", "unit"))
    found: dict[str, Any] = {"mesh": table["mesh"]} if "mesh" in table else {}
    if "precision" in table:
        found["precision"] = _inside("[precision]", lambda: _precision(table["precision"]))
    units = table.get("unit", [])
    _expect(isinstance(units, list), f"[[unit]]: expected a list of tables, got {units!r}")
    found["units"] = tuple(
        _inside(f"[[unit]] {number}", partial(_unit, entry)) for number, entry in enumerate(units, 1)
    )
    return found


def _precision(table: Any) -> PrecisionPolicy:
    _known_keys(table, tuple(DTYPES))
    return PrecisionPolicy(**table)


def _unit(table: Any) -> UnitPolicy:
    _known_keys(table, _UNIT_KEYS)
    _expect("match" in table, f"match: expected {_PATH}, got none")
    given = [kind for kind in _WORDS if kind in table]
    placements = None
    if given:
        placements = _placements(table, given)
    return UnitPolicy(
        **{key: value for key, value in table.items() if key not in _WORDS}, placements=placements
    )


def _placements(table: Mapping[str, Any], given: Sequence[str]) -> Placements:
    _expect(len(given) == len(_WORDS), f"expected {', '.join(_WORDS)} together, got {', '.join(given)} only")
    for kind, words in _WORDS.items():
        listed = isinstance(table[kind], list) and len(table[kind]) > 0
        _expect(
            listed and all(word in words for word in table[kind]),
            f"{kind}: expected a list of {' or '.join(words)} for each mesh axis, got {table[kind]!r}",
        )
    return _legal(lambda: Placements(*(table[kind] for kind in _WORDS)))


def _legal(build: Callable[[], T]) -> T:
    """``build()``; what it refuses makes the policy wrong."""
    try:
        return build()
    except ValueError as error:
        raise PolicyError(str(error)) from None


def _known_keys(table: Any, known: Sequence[str]) -> None:
    _expect(isinstance(table, dict), f"expected a table, got {table!r}")
    for key in table:
        _expect(key in known, f"{key}: expected no other keys than {', '.join(known)}, got {key!r}")


def _literal(value: Any) -> str:
    """As TOML, which for these values is JSON, but for one character that must be escaped and pairs that may not."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
