"""What moves of a loop's body: the first gather, and the last reduction.

Equations of a body, as ``pipeline.py`` evaluates them::

    early     slices and casts of what the loop is over    for the next pass, before its gather
    gather    the first one                                for the next pass
    middle    all but the gather and what is late          for this pass
    late      the last reduction and what is made of it    for the pass before
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_impl.runtime.program.traced import holds, is_gate, mark_of, operands

# A unit's gather waits for its own input, or, ahead, for that of the unit before; a reduction for the one before. One
# operand is True then, the gate.
GATHER, GATHER_AHEAD, REDUCE = "twinshard_gather", "twinshard_gather_ahead", "twinshard_reduce"
# In place of a gather, of weights that are there.
KEPT = "twinshard_kept"
GATHERS = (GATHER, GATHER_AHEAD, KEPT)
TRANSFERS = (*GATHERS, REDUCE)


@dataclass(frozen=True)
class Parts:
    """``gather``: None where none moves; ``late`` is empty where no reduction does.

    waiting: variables that ``late`` needs. stacked: places of late results among those that the loop stacks.
    """

    early: Sequence[Any]
    gather: Any
    middle: Sequence[Any]
    late: Sequence[Any]
    waiting: Sequence[Any]
    stacked: frozenset[int]

    @staticmethod
    def of(jaxpr: Any, constants: int, carries: int, *, reductions: bool) -> Parts:
        """Of a body whose first inputs are constants, and then what it carries. ``reductions``: whether they move."""
        equations = list(jaxpr.eqns)
        # The next pass's gather must not start before the last unit of this pass, which is in a loop of its own; and
        # random keys cannot be stacked here as scan does it.
        nested = any(e.primitive.name == "scan" and holds(e, TRANSFERS) for e in equations)
        keys = any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in jaxpr.outvars)
        if nested or keys:
            return Parts((), None, equations, (), (), frozenset())
        early, gather = _first_gather(equations, set(jaxpr.invars[constants : constants + carries]))
        late = _last_reduction(equations, jaxpr.outvars[:carries]) if reductions else []
        moved = {id(equation) for equation in (gather, *late)}
        middle = [equation for equation in equations if id(equation) not in moved]
        made = _made(late)
        stacked = (i for i, v in enumerate(jaxpr.outvars[carries:]) if not made.isdisjoint(operands([v])))
        return Parts(early, gather, middle, late, _needed(late), frozenset(stacked))


def sources_of(gather: Any) -> list[Any]:
    """What a gather gathers."""
    return operands(v for v in gather.invars if not is_gate(v))


def with_gate(transfer: Any, values: Sequence[Any], gate: Any) -> list[Any]:
    """The values of a transfer's operands, with another gate."""
    return [gate if is_gate(v) else value for v, value in zip(transfer.invars, values, strict=True)]


def _first_gather(equations: Sequence[Any], carried: set[Any]) -> tuple[list[Any], Any]:
    """The first gather and what is evaluated for its weights; None for one that depends on what is carried."""
    gather = next((e for e in equations if mark_of(e) in GATHERS), None)
    if gather is None or mark_of(gather) != GATHER:
        return [], None
    wanted, early = set(sources_of(gather)), []
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            wanted.update(operands(equation.invars))
            early.append(equation)
    # What is evaluated once more must do nothing else.
    if not wanted.isdisjoint(carried) or any(equation.effects for equation in early):
        return [], None
    return early[::-1], gather


def _last_reduction(equations: Sequence[Any], carried: Sequence[Any]) -> list[Any]:
    """The last reduction and all that needs it; nothing where the next pass does."""
    number = max((i for i, e in enumerate(equations) if mark_of(e) == REDUCE), default=None)
    if number is None:
        return []
    late = [equations[number]]
    made = _made(late)
    for equation in equations[number + 1 :]:
        if not made.isdisjoint(operands(equation.invars)):
            made.update(equation.outvars)
            late.append(equation)
    return late if made.isdisjoint(operands(carried)) else []


def _made(equations: Iterable[Any]) -> set[Any]:
    return {v for equation in equations for v in equation.outvars}


def _needed(equations: Sequence[Any]) -> list[Any]:
    made = _made(equations)
    needed = (v for equation in equations for v in operands(equation.invars))
    return list(dict.fromkeys(v for v in needed if v not in made))
