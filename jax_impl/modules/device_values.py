"""Find what differs between devices in a traced step: values of variables, and the control flow of loops and choices.

Inside ``shard_map`` each device runs the program on its own rows. A value *varies* over the mesh axes along which
devices may have different numbers: rows vary, sums over all devices do not. This has two consequences::

    rows -> any(rows > 0) -> while: a unit's gather inside      continuing devices wait for stopped ones: refused
    rows -> mean -> variable after the step                     several values must become one: needs a rule

For variables we also know whether they changed, and whether the new value is the old value plus a term that does not
depend on it. ``runtime/groups/variables.py`` contains the rules.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jax_impl.modules.seal import (
    inner_program,
    jaxpr_of,
    jaxprs_of,
    line_of,
    mark_numbers,
    outputs_of,
    scan_counts,
)

_BEFORE = "twinshard variable before "
_AFTER = "twinshard variable after "
# These give all devices along the axes the same value; the other collectives give each device its own value.
_MAKE_EQUAL = frozenset({"psum", "pmax", "pmin", "all_gather", "psum_invariant", "all_gather_invariant"})
_COLLECTIVES = _MAKE_EQUAL | {"reduce_scatter", "all_to_all", "ppermute", "pgather", "psum_scatter"}
_SAME = frozenset({"name", "copy", "copy_p", "optimization_barrier", "sharding_constraint", "stop_gradient"})
_ADD = frozenset({"add", "add_any", "sub", "scatter-add", "scatter_add"})


@dataclass(frozen=True)
class DeviceValue:
    """``axes``: mesh axes along which the value may differ. ``made_of``: paths of variables on which the value depends.

    ``base``: the path of a variable, if the value is that variable plus a term that does not depend on it. ``same``:
    whether the value is the variable itself. ``numbers``: constants and shapes from which a value without ``axes`` was
    computed; None if a collective contributed, since a collective includes all rows. If the numbers change with the
    number of rows, the value counts the rows of one device.
    """

    axes: frozenset[str] = frozenset()
    made_of: frozenset[str] = frozenset()
    base: str | None = None
    same: bool = False
    numbers: frozenset[Any] | None = frozenset()

    def __or__(self, other: DeviceValue) -> DeviceValue:
        """A value that may be either of the two."""
        base = self.base if self.base == other.base else None
        return DeviceValue(
            self.axes | other.axes,
            self.made_of | other.made_of,
            base,
            self.same and other.same and base is not None,
            _joined(self.numbers, other.numbers),
        )

    def mixed(self) -> DeviceValue:
        return DeviceValue(self.axes, self.made_of, numbers=self.numbers)


def _joined(first: frozenset[Any] | None, second: frozenset[Any] | None) -> frozenset[Any] | None:
    return None if first is None or second is None else first | second


_EQUAL = DeviceValue()


def mark_before(variables: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The same variables, marked as the values at the start of a step. Random keys get no marks."""
    return {path: mark_numbers(value, _BEFORE + path) for path, value in variables.items()}


def mark_after(variables: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The same variables, marked as the values at the end of a step, or of a device's part of the step."""
    return {path: mark_numbers(value, _AFTER + path) for path, value in variables.items()}


def variables_after(program: Any) -> tuple[dict[str, DeviceValue], set[str]]:
    """The value of each marked variable after a closed jaxpr, by path; and the variables that ``shard_map`` reads.

    Raises ``ValueError`` for a loop or a choice that contains a collective and that devices may execute differently.
    """
    reader = _Reader()
    reader.outputs(program.jaxpr, [_EQUAL] * len(program.jaxpr.invars))
    return reader.after, reader.read


@dataclass
class _Reader:
    after: dict[str, DeviceValue] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    # By the id of a jaxpr; the jaxpr is kept alive so that its id stays unique.
    sends: dict[int, tuple[Any, list[tuple[Any, frozenset[str]]]]] = field(default_factory=dict)

    def outputs(self, jaxpr: Any, inputs: Sequence[DeviceValue]) -> list[DeviceValue]:
        return outputs_of(jaxpr, inputs, _EQUAL, self._results, _number)

    def _results(self, equation: Any, operands: list[DeviceValue]) -> Sequence[DeviceValue]:
        primitive, params = equation.primitive.name, equation.params
        if primitive == "name" and str(params["name"]).startswith(_BEFORE):
            path = params["name"].removeprefix(_BEFORE)
            return [DeviceValue(operands[0].axes, frozenset([path]), path, same=True)]
        if primitive == "name" and str(params["name"]).startswith(_AFTER):
            path = params["name"].removeprefix(_AFTER)
            self.after[path] = operands[0] | self.after.get(path, operands[0])
        if primitive in _SAME:
            return operands
        if primitive == "shard_map":
            inside = [DeviceValue(frozenset(jax.tree.leaves(tuple(spec)))) for spec in params["in_specs"]]
            results = self.outputs(jaxpr_of(params["jaxpr"]), inside)
            # A variable that only passes through is not read.
            self.read |= {path for result in results if not result.same for path in result.made_of}
            # Outside the shard_map there is one value.
            return [_EQUAL] * len(results)
        if primitive == "cond":
            return self._choice(equation, operands)
        if primitive == "while":
            return self._while(equation, operands)
        if primitive == "scan":
            body = jaxpr_of(params["jaxpr"])
            constants, carries = scan_counts(equation, body)
            return self._looped(body, operands, constants, carries)
        inner = inner_program(equation)
        if inner is not None:
            return self.outputs(inner, operands)
        value = _any_of([operand.mixed() for operand in operands])
        shapes = frozenset([variable.aval.shape for variable in equation.outvars])
        value = replace(value, numbers=frozenset() if value.axes else _joined(value.numbers, shapes))
        if primitive == "axis_index" or primitive in _COLLECTIVES:
            over = _axes_of(equation)
            equal = primitive in _MAKE_EQUAL and params.get("axis_index_groups") is None
            value = replace(value, axes=value.axes - over if equal else value.axes | over, numbers=None)
        elif primitive in _ADD:
            first, others = operands[0], operands[1:]
            if primitive in ("add", "add_any") and first.base is None:
                first, others = operands[1], operands[:1]
            # A term that is equal on all devices is not one device's part of a sum.
            if not any(first.base in other.made_of for other in others) and any(x.axes for x in others):
                value = replace(value, base=first.base)
        elif primitive == "select_n":
            value = replace(
                _any_of(operands[1:]), axes=value.axes, made_of=value.made_of, numbers=value.numbers
            )
            if value.base in operands[0].made_of:
                value = value.mixed()
        return [value] * len(equation.outvars)

    def _choice(self, equation: Any, operands: list[DeviceValue]) -> list[DeviceValue]:
        branches = [jaxpr_of(branch) for branch in equation.params["branches"]]
        self._check(equation, operands[0], branches)
        results = [self.outputs(branch, operands[1:]) for branch in branches]
        return [_chosen(_any_of(values), operands[0]) for values in zip(*results, strict=True)]

    def _while(self, equation: Any, operands: list[DeviceValue]) -> list[DeviceValue]:
        params = equation.params
        tests = params["cond_nconsts"]
        test, body = jaxpr_of(params["cond_jaxpr"]), jaxpr_of(params["body_jaxpr"])
        constants, carried = params["body_nconsts"], operands[tests + params["body_nconsts"] :]
        while True:
            (goes_on,) = self.outputs(test, [*operands[:tests], *carried])
            results = self.outputs(body, [*operands[tests : tests + constants], *carried])
            joined = [_chosen(old | new, goes_on) for old, new in zip(carried, results, strict=True)]
            if joined == carried:
                break
            carried = joined
        self._check(equation, goes_on, [test, body])
        return carried

    def _looped(
        self, body: Any, operands: list[DeviceValue], constants: int, carries: int
    ) -> list[DeviceValue]:
        inputs, end = list(operands), constants + carries
        while True:
            results = self.outputs(body, inputs)
            carried = [old | new for old, new in zip(inputs[constants:end], results[:carries], strict=True)]
            if carried == inputs[constants:end]:
                return [*carried, *results[carries:]]
            inputs[constants:end] = carried

    def _check(self, equation: Any, decides: DeviceValue, programs: Sequence[Any]) -> None:
        for program in programs if decides.axes else ():
            for collective, axes in self._sent(program):
                if axes & decides.axes:
                    raise ValueError(_refusal(equation, collective, sorted(decides.axes)))

    def _sent(self, jaxpr: Any) -> list[tuple[Any, frozenset[str]]]:
        """The collectives of a program and of all inner programs, each with its axes."""
        if id(jaxpr) not in self.sends:
            collectives: list[tuple[Any, frozenset[str]]] = []
            for equation in jaxpr.eqns:
                if equation.primitive.name in _COLLECTIVES:
                    collectives.append((equation, _axes_of(equation)))
                for program in jaxprs_of(equation):
                    collectives += self._sent(program)
            self.sends[id(jaxpr)] = jaxpr, collectives
        return self.sends[id(jaxpr)][1]


def _number(literal: Any) -> DeviceValue:
    return DeviceValue(numbers=frozenset([str(literal)]))


def _any_of(values: Sequence[DeviceValue]) -> DeviceValue:
    return functools.reduce(operator.or_, values) if values else _EQUAL


def _chosen(value: DeviceValue, decides: DeviceValue) -> DeviceValue:
    """A value from a decision. If the decision depends on a variable, so does the amount added to that variable."""
    base = None if value.base in decides.made_of and not value.same else value.base
    return DeviceValue(
        value.axes | (frozenset() if value.same else decides.axes),
        value.made_of | decides.made_of,
        base,
        value.same,
        _joined(value.numbers, decides.numbers),
    )


def _axes_of(equation: Any) -> frozenset[str]:
    names = equation.params.get("axes", equation.params.get("axis_name"))
    return frozenset(
        name for name in (names if isinstance(names, tuple) else (names,)) if isinstance(name, str)
    )


def _refusal(equation: Any, collective: Any, axes: Sequence[str]) -> str:
    what = "lax.while_loop" if equation.primitive.name == "while" else "lax.cond"
    # The scope of a unit's collective is the unit's path, followed by the action.
    scopes = str(collective.source_info.name_stack).rstrip("/").split("/")
    acts = [i for i, scope in enumerate(scopes) if scope in ("gather", "reduce")]
    unit = "/".join(scopes[: acts[-1]]) if acts else ""
    inside = (
        f"unit {unit!r}, whose weights are gathered" if unit else f"{collective.primitive.name}, which waits"
    )
    over = axes[0] if len(axes) == 1 else tuple(axes)
    return (
        f"{what}{line_of(equation)}: expected a condition that is the same on all devices, since it contains {inside} "
        "from all devices, got a condition that depends on rows of the batch or on a device's random numbers: "
        "devices would wait for each other forever. Combine the conditions of all devices, for example "
        f"jax.lax.psum(jnp.sum(~done), {over!r}) > 0; or decide by an input after the batch; or choose between "
        "results with jnp.where; or use engine='pjit', where a condition sees all rows"
    )
