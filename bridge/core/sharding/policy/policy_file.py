"""The tables of a policy file: from TOML to the entries of a policy, and back to lines of TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from bridge.core.sharding.policy.mesh_axes import is_model_axis, why_refused
from bridge.core.sharding.policy.parallel import ParallelPolicy
from bridge.core.sharding.policy.policy_error import PolicyError, at, require, require_only
from bridge.core.sharding.policy.precision_policy import PrecisionPolicy
from bridge.core.sharding.policy.strategy import Placements
from bridge.core.sharding.policy.unit_policy import KINDS, UnitPolicy
from bridge.core.text_files import toml_string

OPTIONS = ("align", "prefetch")
"""Keys of ``[mesh]`` that are not axes."""
_TABLES = ("mesh", "precision", "unit", "parallel")


def read_tables(content: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``ShardingPolicy`` from the tables of a file. PolicyError naming table and key."""
    require_only(content, _TABLES)
    options: dict[str, Any] = {}
    axes = content.get("mesh")
    if isinstance(axes, dict):
        options |= {key: axes.pop(key) for key in OPTIONS if key in axes}
    # A table with only options leaves the axes at the default.
    if "mesh" in content and (axes or not options):
        options["mesh"] = axes
    if "precision" in content:
        with at("[precision]"):
            table = _table(content["precision"])
            require_only(table, [field.name for field in fields(PrecisionPolicy)])
            options["precision"] = PrecisionPolicy(**table)
    for key, read in (("unit", _unit), ("parallel", _parallel)):
        listed = content.get(key, [])
        require(isinstance(listed, list), f"[[{key}]]", "a list of tables", listed)
        entries = []
        for number, entry in enumerate(listed, 1):
            with at(f"[[{key}]] {number}"):
                entries.append(read(_table(entry)))
        options["units" if key == "unit" else key] = tuple(entries)
    return options


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PolicyError(f"expected a table, got {value!r}")
    return value


def _unit(entry: Mapping[str, Any]) -> UnitPolicy:
    require_only(entry, ("match", "strategy", *KINDS, "granularity", "recompute", "align"))
    if "match" not in entry:
        raise PolicyError('match: expected a dotted path as in "layers.*", or "", got none')
    options = {key: value for key, value in entry.items() if key not in KINDS}
    named = [state for state in KINDS if state in entry]
    if named:
        if named != list(KINDS):
            raise PolicyError(f"expected {', '.join(KINDS)} together, got {', '.join(named)} only")
        for state in KINDS:
            words = ("partial" if state == "gradients" else "replicate", "shard")
            legal = (
                isinstance(entry[state], list)
                and entry[state]
                and all(word in words for word in entry[state])
            )
            require(legal, state, f"a list of {' or '.join(words)} for each mesh axis", entry[state])
        try:
            options["placements"] = Placements(*(entry[state] for state in KINDS))
        except ValueError as error:
            raise PolicyError(str(error)) from None
    return UnitPolicy(**options)


def _parallel(entry: Mapping[str, Any]) -> ParallelPolicy:
    require_only(entry, [field.name for field in fields(ParallelPolicy)])
    for key, what in (("match", "dotted paths"), ("axis", "the name of a model axis")):
        if key not in entry:
            raise PolicyError(f"{key}: expected {what}, got none")
    return ParallelPolicy(**entry)


def unit_lines(unit: UnitPolicy) -> list[str]:
    """An entry as lines of TOML."""
    lines = ["", "[[unit]]", f"match = {toml_string(unit.match)}"]
    if unit.strategy is not None:
        lines.append(f"strategy = {json.dumps(unit.strategy)}")
    if unit.placements is not None:
        lines += [f"{state} = {json.dumps(getattr(unit.placements, state))}" for state in KINDS]
    lines.append(f"granularity = {json.dumps(unit.granularity)}")
    lines.append(f"recompute = {json.dumps(unit.recompute)}")
    if unit.align is not None:
        lines.append(f"align = {json.dumps(unit.align)}")
    return lines


def parallel_lines(entry: ParallelPolicy) -> list[str]:
    """An entry as lines of TOML."""
    lines = ["", "[[parallel]]", f"match = [{', '.join(map(toml_string, entry.match))}]"]
    lines.append(f"axis = {toml_string(entry.axis)}")
    if entry.style is not None:
        lines.append(f"style = {json.dumps(entry.style)}")
    if entry.dimension is not None:
        lines.append(f"dimension = {entry.dimension}")
    if entry.fused:
        lines.append(f"fused = {json.dumps(entry.fused)}")
    return lines


def check_mesh(mesh: object) -> None:
    """PolicyError unless ``mesh`` maps the names of legal axes to sizes."""
    if not isinstance(mesh, Mapping):
        raise PolicyError(f"[mesh]: expected a table of axes, got {mesh!r}")
    for name, size in mesh.items():
        require(name not in OPTIONS, "[mesh]", f"axes of other names than {' and '.join(OPTIONS)}", name)
        legal = isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        require(legal, "[mesh]", "axis names of letters, digits and _", name)
        require(
            size == "all" or (type(size) is int and size >= 1), f"[mesh] {name}", 'a size >= 1 or "all"', size
        )
    names = ", ".join(mesh)
    refusal = why_refused(mesh)
    if refusal is not None:
        raise PolicyError(f"[mesh]: {refusal}")
    kinds = [is_model_axis(name) for name in mesh]
    if kinds.count(False) not in (1, 2) or kinds.count(True) > 2:
        raise PolicyError(
            f"[mesh]: expected one or two data-parallel axes, then at most two model axes, got {names or 'none'}"
        )
    if kinds != sorted(kinds):
        raise PolicyError(f"[mesh]: expected data-parallel axes before model axes, got {names}")
    if list(mesh.values()).count("all") > 1:
        raise PolicyError(f'[mesh]: expected "all" for one axis at most, got it for {names}')
