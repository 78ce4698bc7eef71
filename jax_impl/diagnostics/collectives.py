"""Count the collectives of a program: as written, from its jaxpr, and as compiled, from XLA's text.

The jaxpr has what was asked for: no compiler has merged or widened it. The text has what XLA kept, merged, doubled or
added. It has one computation after another, and a loop names its body and how often it runs::

    %body (...) { ... %g = f32[96]{0} all-gather(...), replica_groups={{0,1},{2,3}}, ... }
    ENTRY %main (...) { ... while(...), body=%body, ... "known_trip_count":{"n":"8"} ... }
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax


class Collective(NamedTuple):
    """``kind``: JAX's primitive name, such as ``all_gather``, ``reduce_scatter``, ``psum``; ``size``: full elements."""

    kind: str
    dtype: str
    size: int


_KINDS = {
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_to_all": "all_to_all",
    "pmax": "pmax",
    "pmin": "pmin",
    "ppermute": "ppermute",
    "psum": "psum",
    "psum_invariant": "psum",
    "reduce_scatter": "reduce_scatter",
}
_COMPILED_KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "psum",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (.+?) ({'|'.join(_COMPILED_KINDS)})(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:to_apply|calls|body|condition|true_computation|false_computation)=%([^\s,)}]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")
# From jax 0.11 on: replica_groups=mesh['dp_outer'=2,'dp'=4] {'dp'}
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS_SIZE = re.compile(r"'([^']*)'=(\d+)")
_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "s32": "int32",
    "pred": "bool",
}


def count_collectives(function: Any, *args: Any) -> Counter[Collective]:
    """How often each collective runs in one call of ``function``; loops with a fixed length are multiplied out.

    ``args`` may be ``jax.ShapeDtypeStruct``s. Code that XLA later removes as unused is counted. Raises ``ValueError``
    for a collective in a loop of unknown length, and for branches of a ``cond`` whose collectives differ.
    """
    return _counted(jax.make_jaxpr(function)(*args).jaxpr)


def _counted(jaxpr: Any) -> Counter[Collective]:
    found: Counter[Collective] = Counter()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _KINDS:
            for operand, result in zip(equation.invars, equation.outvars, strict=True):
                size = max(operand.aval.size, result.aval.size)
                found[Collective(_KINDS[name], result.aval.dtype.name, size)] += 1
        inside = [_counted(inner) for inner in _inner_jaxprs(equation.params)]
        if name == "while" and any(inside):
            raise ValueError(
                "expected collectives outside while loops, whose length is unknown before they run"
            )
        if name == "cond":
            if any(branch != inside[0] for branch in inside):
                raise ValueError(
                    "expected the same collectives in every branch of a cond, which of them runs being unknown, got "
                    f"{[dict(branch) for branch in inside]}"
                )
            inside = inside[:1]
        times = equation.params["length"] if name == "scan" else 1
        for counts in inside:
            found.update({collective: times * count for collective, count in counts.items()})
    return found


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    for value in jax.tree.leaves(list(params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value


def count_compiled_collectives(compiled: Any) -> Counter[Collective]:
    """How often each collective runs in one call of ``compiled``, a ``jax.stages.Compiled`` or its text.

    Sizes are full elements, as in ``count_collectives``; the arrays of a merged collective count one by one. The CPU
    compiler carries bfloat16 in float32. Raises ``ValueError`` for a collective in a loop of unknown length or a
    branch.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[2]
            lines[name] = []
            entry = name if start[1] else entry
        elif name:
            lines[name].append(line)
    if not entry:
        raise ValueError("expected the text of a compiled program, got none with an ENTRY computation")
    known: dict[str, Counter[Collective]] = {}
    return _counted_compiled(entry, lines, known)


def _counted_compiled(
    name: str, lines: dict[str, list[str]], known: dict[str, Counter[Collective]]
) -> Counter[Collective]:
    if name not in known:
        found: Counter[Collective] = Counter()
        for line in lines.get(name, ()):
            if collective := _COLLECTIVE.search(line):
                found.update(_collectives(line, *collective.groups()))
            inside: Counter[Collective] = Counter()
            for called in _CALLED.findall(line):
                inside.update(_counted_compiled(called, lines, known))
            branches = [_counted_compiled(one.strip(" %"), lines, known) for one in _listed(line)]
            times = 1
            if " while(" in line and inside:
                trips = _TRIPS.search(line)
                if trips is None:
                    raise ValueError(
                        "expected loops of known length around collectives, got one without a trip count"
                    )
                times = int(trips[1])
            if any(branches):
                raise ValueError(f"expected no collective in a branch, got {[dict(one) for one in branches]}")
            found.update({collective: times * count for collective, count in inside.items()})
        known[name] = found
    return known[name]


def _listed(line: str) -> list[str]:
    branches = _BRANCHES.search(line)
    return branches[1].split(",") if branches else []


def _collectives(line: str, result: str, kind: str) -> Counter[Collective]:
    members = _members(line)
    found: Counter[Collective] = Counter()
    for dtype, dimensions in _ARRAY.findall(result):
        size = math.prod(int(n) for n in dimensions.split(",")) if dimensions else 1
        full = size * members if kind == "reduce-scatter" else size
        found[Collective(_COMPILED_KINDS[kind], _DTYPES.get(dtype, dtype), full)] += 1
    return found


def _members(line: str) -> int:
    """How many devices take part in each group of a collective."""
    if mesh := _MESH_GROUPS.search(line):
        sizes = dict(_AXIS_SIZE.findall(mesh[1]))
        axes = [axis.strip(" '") for axis in mesh[2].split(",")]
        if not sizes.keys() >= set(axes):
            raise ValueError(f"expected a collective over whole axes of its mesh, got {mesh[0]}")
        return math.prod(int(sizes[axis]) for axis in axes)
    group = _GROUPS.search(line)
    return 1 if group is None else len(group[1].split(",")) if group[1] else int(group[2] or 1)
