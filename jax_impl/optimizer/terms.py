"""An optimizer's traced programs as terms, to compare programs over different trees of the same parameters.

A *term* is a number that represents an expression; in one table of terms, equal expressions have equal numbers. The
arrays of a tree are its *owners*. If a value treats each element of one owner alike, its term contains "gradient",
"weight" or a slot of the state, but no name or shape::

    {"w": [3, 4], "b": [4]}     update of w: 0.1 * gradient      update of b: 0.1 * gradient
    {"layers/0": [17]}          update of layers/0: 0.1 * gradient                              equal terms

A sum over all elements records the set of its parameters; sums of equal terms are joined. The terms of all other
operations contain names and shapes of the arrays, so they equal only the same operation on the same arrays. All
branches of ``lax.cond`` are part of the term, whenever they may run.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from jax_impl.modules.seal import inner_program, jaxpr_of
from jax_impl.runtime.program.traced import program_of

_SAME = frozenset(
    {"copy", "copy_p", "name", "optimization_barrier", "device_put", "sharding_constraint", "stop_gradient"}
)
# Each element of the result depends on one element of each operand.
_ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
    "clamp", "complex", "conj", "convert_element_type", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv",
    "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma",
    "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or",
    "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan",
    "tanh", "xor",
})  # fmt: skip
_SHAPING = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims"})
# By reduction: the operation that joins two results, its neutral literal, and the padding that changes nothing.
_REDUCTIONS = {
    "reduce_sum": ("add", 0, ("zero", "least")),
    "reduce_and": ("and", 1, ("one",)),
    "reduce_or": ("or", 0, ("zero", "least")),
    "reduce_max": ("max", None, ("least",)),
    "reduce_min": ("min", None, ()),
}
_JOINS = {join: reduction for reduction, (join, _, _) in _REDUCTIONS.items()}
# These operations map zeros to zero.
_KEEP_ZERO = frozenset({
    "add", "add_any", "asinh", "atan", "cbrt", "ceil", "clamp", "conj", "convert_element_type", "erf", "expm1",
    "floor", "imag", "log1p", "max", "min", "mul", "neg", "or", "real", "reduce_precision", "round", "select_n",
    "sign", "sin", "sinh", "sqrt", "sub", "tan", "tanh", "and",
})  # fmt: skip
_INFINITE_AT_ZERO = frozenset({"rsqrt", "log", "pow"})
# Constants of up to this many elements are compared by contents, larger ones by identity.
_MOST_READ = 1 << 20
Parts = frozenset[tuple[int, frozenset[str]]]


@dataclass(frozen=True)
class Value:
    """``owner``: the array whose elements the term treats alike; None if all arrays share the value.

    ``filled``: whether all elements hold one number. ``padding``: the content of elements that belong to no parameter
    (of all elements in a filled value): "zero", "least" (a zero, and no element is less), "one", "infinite", or None if
    unknown. ``reduced``: a reduction, with the parameters of each term of its elements. ``items``: the numbers of a
    vector, if each is known.
    """

    term: int
    owner: str | None = None
    filled: bool = False
    padding: str | None = None
    reduced: tuple[str, Parts] | None = None
    items: tuple[Value, ...] | None = None


@dataclass(frozen=True)
class Owner:
    """An array of a tree. ``key``: of its leaf. ``paths``: of its parameters. ``dtypes``: of weights and gradients.
    ``padded``: whether it has elements that belong to no parameter."""

    name: str
    key: str
    paths: frozenset[str]
    shape: tuple[int, ...]
    dtypes: tuple[np.dtype, np.dtype]
    padded: bool = False


@dataclass
class Terms:
    """The table of terms. Values of two programs are comparable if both programs use one table."""

    numbers: dict[Any, int] = field(default_factory=dict)
    # Constants that are known by identity, kept alive so that the identity stays unique.
    kept: dict[int, Any] = field(default_factory=dict)

    def number(self, *expression: Any) -> int:
        return self.numbers.setdefault(expression, len(self.numbers))

    def literal(self, value: Any) -> Value:
        """The value of a number, or of an array that is a constant of a program."""
        array: Any = None
        if not _is_key(value) and np.size(value) <= _MOST_READ:
            # A number from an enclosing program, such as a learning rate, is known only by its identity.
            with contextlib.suppress(jax.errors.TracerArrayConversionError):
                array = np.asarray(value)
        if array is None:
            self.kept[id(value)] = value
            return Value(self.number("constant", id(value)), filled=np.shape(value) == ())
        contents = array.tobytes()
        if array.size > 1:
            # Each trace creates tables of numbers again.
            contents = hashlib.sha256(contents).digest()
        term = self.number("constant", array.dtype, array.shape, contents)
        if array.shape != ():
            return Value(term)
        return Value(term, filled=True, padding={0: "zero", 1: "one"}.get(array.item()))


@dataclass(frozen=True)
class Reader:
    """Reads programs over one tree with these ``owners``, by name."""

    terms: Terms
    owners: Mapping[str, Owner]

    def outputs(self, program: Any, inputs: Sequence[Value]) -> list[Value]:
        """The values that a closed jaxpr returns."""
        jaxpr = program.jaxpr
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        known.update(zip(jaxpr.constvars, map(self.terms.literal, program.consts), strict=True))

        def get(atom: Any) -> Value:
            return self.terms.literal(atom.val) if hasattr(atom, "val") else known[atom]

        for equation in jaxpr.eqns:
            values = self._results(equation, [get(atom) for atom in equation.invars])
            known.update(zip(equation.outvars, values, strict=True))
        return [get(atom) for atom in jaxpr.outvars]

    def _results(self, equation: Any, operands: list[Value]) -> list[Value]:
        primitive = equation.primitive.name
        if primitive in _SAME and len(operands) == len(equation.outvars):
            return operands
        if primitive in _READ:
            value = _READ[primitive](self, equation, operands)
            return self._whole(equation, operands) if value is None else [value]
        if primitive == "cond":
            return self._choice(equation, operands)
        if primitive not in ("scan", "while") and inner_program(equation) is not None:
            return self.outputs(program_of(equation), operands)
        return self._whole(equation, operands)

    def _whole(self, equation: Any, operands: Sequence[Value]) -> list[Value]:
        """The results of any operation; the term contains the names and shapes of the operands."""
        made_of = [self._named(value, atom) for value, atom in zip(operands, equation.invars, strict=True)]
        term = self.terms.number(equation.primitive.name, self._parameters(equation), *made_of)
        return [
            Value(self.terms.number("result", term, number), filled=variable.aval.shape == ())
            for number, variable in enumerate(equation.outvars)
        ]

    def _named(self, value: Value, atom: Any) -> int:
        if value.owner is not None:
            return self.terms.number("of", value.owner, value.term)
        if value.filled or value.items is not None:
            return self.terms.number("filled", atom.aval.shape, value.term)
        return value.term

    def _parameters(self, equation: Any, left_out: tuple[str, ...] = ()) -> tuple[Any, ...]:
        params = sorted(equation.params.items())
        return tuple((name, self._parameter(value)) for name, value in params if name not in left_out)

    def _parameter(self, value: Any) -> Any:
        """Represent an inner program, such as a loop's, by its outputs for its inputs: each trace creates it again."""
        if isinstance(value, tuple) and any(jaxpr_of(each) is not None for each in value):
            return tuple(map(self._parameter, value))
        jaxpr = jaxpr_of(value)
        if jaxpr is None:
            return str(value)
        program = value if hasattr(value, "consts") else ClosedJaxpr(jaxpr, ())
        inputs = [
            Value(self.terms.number("input", number, str(v.aval)), filled=v.aval.shape == ())
            for number, v in enumerate(jaxpr.invars)
        ]
        outputs = self.outputs(program, inputs)
        return tuple(self._named(value, v) for value, v in zip(outputs, jaxpr.outvars, strict=True))

    def _elementwise(self, equation: Any, operands: list[Value]) -> Value | None:
        primitive = equation.primitive.name
        joined = self._converted(equation, operands[0]) or self._sum(primitive, operands)
        if joined is not None:
            return joined
        lengths = {len(value.items) for value in operands if value.items is not None}
        if lengths:
            if len(lengths) > 1 or not all(value.filled or value.items is not None for value in operands):
                return None
            columns = zip(*(value.items or (value,) * max(lengths) for value in operands), strict=True)
            items = [self._elementwise(equation, list(column)) for column in columns]
            return None if None in items else self._vector(items)
        owners = {value.owner for value in operands if value.owner is not None}
        if len(owners) > 1 or not all(value.filled or value.owner is not None for value in operands):
            return None
        parameters = self._parameters(equation, ("sharding",))
        term = self.terms.number(primitive, parameters, *(value.term for value in operands))
        owner = next(iter(owners), None)
        return Value(term, owner, filled=owner is None, padding=_padding(equation, operands))

    def _sum(self, primitive: str, operands: list[Value]) -> Value | None:
        """Join two reductions over different parameters into one; None if the operation is no such join."""
        if primitive not in _JOINS or len(operands) != 2 or all(value.reduced is None for value in operands):
            return None
        neutral = _REDUCTIONS[_JOINS[primitive]][1]
        for value, other in (operands, operands[::-1]):
            if neutral is not None and other.padding == ("zero", "one")[neutral] and other.filled:
                return value
        first, second = (value.reduced for value in operands)
        if first is None or second is None or first[0] != second[0]:
            return None
        # Arrays of different dtypes have different terms, but may be in the same sum.
        parts = dict(first[1])
        for term, paths in second[1]:
            if paths & parts.get(term, frozenset()):
                return None
            parts[term] = parts.get(term, frozenset()) | paths
        return self._reduction(first[0], frozenset(parts.items()))

    def _converted(self, equation: Any, value: Value) -> Value | None:
        """A reduction in another float dtype; a wider dtype does not change it."""
        if equation.primitive.name != "convert_element_type" or value.reduced is None:
            return None
        old, new = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
        if not all(jax.dtypes.issubdtype(dtype, np.floating) for dtype in (old, new)):
            return None
        name, parts = value.reduced
        if np.promote_types(old, new) != new:
            parts = frozenset((self.terms.number("rounded", str(new), term), paths) for term, paths in parts)
        return self._reduction(name, parts)

    def _reduction(self, name: str, parts: Parts) -> Value:
        number = self.terms.number("reduced", name, parts)
        return Value(number, filled=True, reduced=(name, parts))

    def _vector(self, items: Sequence[Any]) -> Value:
        return Value(self.terms.number("vector", *(item.term for item in items)), items=tuple(items))

    def _shaped(self, equation: Any, operands: list[Value]) -> Value | None:
        (value, *others), shape = operands, equation.outvars[0].aval.shape
        if others or not (value.filled or value.owner is not None):
            return None
        if value.owner is None:
            return value
        own, size = self.owners[value.owner].shape, (int(np.prod(equation.invars[0].aval.shape)),)
        return value if equation.primitive.name == "reshape" and shape in (own, size) else None

    def _joined(self, equation: Any, operands: list[Value]) -> Value | None:
        numbers: list[Value] = []
        for value, atom in zip(operands, equation.invars, strict=True):
            if value.items is None and not (value.filled and atom.aval.shape == (1,)):
                return None
            numbers += (value,) if value.items is None else value.items
        return self._vector(numbers)

    def _reduced(self, equation: Any, operands: list[Value]) -> Value | None:
        (value,), name = operands, equation.primitive.name
        join, _, harmless = _REDUCTIONS[name]
        if value.items is not None:
            total = value.items[0]
            for item in value.items[1:]:
                joined = self._sum(join, [total, item])
                if joined is None:
                    return None
                total = joined
            return total
        if value.owner is None or len(equation.params["axes"]) != equation.invars[0].aval.ndim:
            return None
        owner = self.owners[value.owner]
        if owner.padded and value.padding not in harmless:
            return None
        return self._reduction(name, frozenset({(value.term, owner.paths)}))

    def _product(self, equation: Any, operands: list[Value]) -> Value | None:
        """A sum of products over all elements of one array."""
        (contracted, _), _ = equation.params["dimension_numbers"]
        left, right = operands
        if left.owner is None or left.owner != right.owner or equation.outvars[0].aval.shape != ():
            return None
        owner = self.owners[left.owner]
        zeros = ("zero", "least")
        if tuple(contracted) != tuple(range(equation.invars[0].aval.ndim)) or (
            owner.padded and not (left.padding in zeros and right.padding in zeros)
        ):
            return None
        parameters = self._parameters(equation, ("dimension_numbers", "out_sharding"))
        term = self.terms.number("product", parameters, left.term, right.term)
        return self._reduction("reduce_sum", frozenset({(term, owner.paths)}))

    def _choice(self, equation: Any, operands: list[Value]) -> list[Value]:
        branches = [self.outputs(branch, operands[1:]) for branch in equation.params["branches"]]
        index = self._named(operands[0], equation.invars[0])
        choices = []
        for number, (variable, *values) in enumerate(zip(equation.outvars, *branches, strict=True)):
            owners = {value.owner for value in values if value.owner is not None}
            first = values[0]
            if all(value == first for value in values):
                choices.append(first)
            elif len(owners) < 2 and all(value.filled or value.owner is not None for value in values):
                term = self.terms.number("choice", index, *(value.term for value in values))
                owner = next(iter(owners), None)
                same = {_least_known(value.padding) for value in values}
                padding = same.pop() if len(same) == 1 else None
                choices.append(Value(term, owner, filled=owner is None, padding=padding))
            else:
                terms = (
                    self._named(value, branch.jaxpr.outvars[number])
                    for value, branch in zip(values, equation.params["branches"], strict=True)
                )
                term = self.terms.number("choice", index, *terms)
                choices.append(Value(term, filled=variable.aval.shape == ()))
        return choices


_READ: Mapping[str, Callable[[Reader, Any, list[Value]], Value | None]] = {
    **dict.fromkeys(_ELEMENTWISE, Reader._elementwise),
    **dict.fromkeys(_SHAPING, Reader._shaped),
    **dict.fromkeys(_REDUCTIONS, Reader._reduced),
    "concatenate": Reader._joined,
    "dot_general": Reader._product,
}


def _least_known(padding: str | None) -> str | None:
    return "zero" if padding == "least" else padding


def _padding(equation: Any, operands: Sequence[Value]) -> str | None:
    """The padding after an elementwise operation; zero times anything that is known to be finite is zero."""
    primitive = equation.primitive.name
    each = [_least_known(value.padding) for value in operands]
    if "infinite" in each:
        return None if primitive in ("is_finite", "select_n") else "infinite"
    zeros = [padding == "zero" for padding in each]
    if (primitive in _INFINITE_AT_ZERO and zeros[0]) or (primitive == "div" and zeros[1]):
        return "infinite"
    if primitive in ("abs", "square") and zeros[0]:
        return "least"
    if primitive == "is_finite" and zeros[0]:
        return "one"
    if primitive == "integer_pow" and zeros[0]:
        return "zero" if equation.params["y"] > 0 else "infinite"
    if primitive == "select_n":
        each, zeros = each[1:], zeros[1:]
        return each[0] if len(set(each)) == 1 else None
    if (primitive in ("mul", "and") and any(zeros)) or (primitive == "div" and zeros[0]):
        return "zero"
    return "zero" if primitive in _KEEP_ZERO and all(zeros) else None


def _is_key(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and bool(jax.dtypes.issubdtype(dtype, jax.dtypes.extended))
