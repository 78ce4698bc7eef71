"""Ensure that a loss which is a mean over parts of a batch weights every part correctly.

A step averages the losses of its parts (the rows of each device in each microbatch) with equal weights. ``sum(loss *
mask) / sum(mask)`` is a mean over the masked tokens of one part, so tokens of a part with few tokens would silently
count more, and a part without tokens would give NaN. A loss that returns ``(sum, weight)`` is right
(``runtime/step/losses.py``). A loss that divides is visible in the traced program: it is a quotient whose denominator
is a sum over the batch alone::

    rows -> mask -> sum -> max(., 1) --------.
        \\-> model -> losses * mask -> sum -> div -> * constant, + penalty, ... -> loss        refused
        \\-> model -> losses -> sum --------> div by the number of rows                        a mean like every other
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from enum import Flag, auto
from functools import partial, reduce
from typing import Any

from jax_impl.modules.seal import inner_program, jaxpr_of, outputs_of, scan_counts

# By mark: the origin that a marked value must not have, and the error for it.
Refused = Mapping[str, tuple["_Comes", str]]

# Names for ``mark_numbers``: the batch, the loss, and the weight of a ``(sum, weight)``.
ROWS = "twinshard rows"
LOSS = "twinshard loss"
WEIGHT = "twinshard weight"


class _Comes(Flag):
    """The origin of a value in the program."""

    NOTHING = 0
    ROWS = auto()
    # Weights and other variables.
    MODEL = auto()
    # One number, a sum over nothing but rows.
    COUNT = auto()
    # A quotient with such a sum as denominator, or linear in such a quotient.
    QUOTIENT = auto()


# With constants as the other operands, these keep a sum a sum, and a quotient a quotient.
_KEEPS = frozenset({
    "add", "sub", "mul", "neg", "max", "min", "clamp", "select_n", "convert_element_type", "broadcast_in_dim",
    "reshape", "squeeze", "expand_dims", "copy", "copy_p", "name", "reduce_precision", "stop_gradient",
})  # fmt: skip
_POWERS = frozenset({"integer_pow", "pow"})
_SUMS = frozenset({"reduce_sum", "dot_general", "scan", "while"})


def check_means(program: Any, *, equal_parts: bool) -> None:
    """Raise ``ValueError`` for a closed jaxpr whose loss is divided by a sum over the batch, unless ``equal_parts``.

    Also for a weight that depends on the model: ``(loss, accuracy)`` is not a pair of sum and weight.
    """
    refused: dict[str, tuple[_Comes, str]] = {WEIGHT: (_Comes.MODEL, _NO_WEIGHT)}
    if not equal_parts:
        refused[LOSS] = _Comes.QUOTIENT, _REFUSAL
    _outputs(program.jaxpr, [_Comes.MODEL] * len(program.jaxpr.invars), refused)


def _outputs(jaxpr: Any, inputs: Sequence[_Comes], refused: Refused) -> list[_Comes]:
    return outputs_of(jaxpr, inputs, _Comes.NOTHING, partial(_results, refused))


def _results(refused: Refused, equation: Any, operands: list[_Comes]) -> list[_Comes]:
    primitive, label = equation.primitive.name, equation.params.get("name")
    everything = _union(operands)
    source = everything & _SOURCES
    if primitive == "name" and label == ROWS:
        return [_Comes.ROWS]
    if primitive == "name" and label in refused and refused[label][0] in everything:
        raise ValueError(refused[label][1])
    if primitive == "optimization_barrier":
        return operands
    if primitive in ("scan", "while", "cond"):
        sources = _of_a_loop(equation, operands, refused)
    else:
        inner = inner_program(equation)
        if inner is not None:
            return _outputs(inner, operands, refused)
        sources = [source] * len(equation.outvars)
    return [
        origin | _form(equation, primitive, origin, operands, variable)
        for origin, variable in zip(sources, equation.outvars, strict=True)
    ]


def _of_a_loop(equation: Any, operands: list[_Comes], refused: Refused) -> list[_Comes]:
    """The origin of the results of a loop or a choice. A quotient in an iteration belongs only to that iteration."""
    params = equation.params
    if equation.primitive.name == "cond":
        branches = [_outputs(jaxpr_of(branch), operands[1:], refused) for branch in params["branches"]]
        return [_union(each) | (operands[0] & _SOURCES) for each in zip(*branches, strict=True)]
    if equation.primitive.name == "scan":
        body = jaxpr_of(params["jaxpr"])
        constants, carries = scan_counts(equation, body)
    else:
        operands = operands[params["cond_nconsts"] :]
        body, constants = jaxpr_of(params["body_jaxpr"]), params["body_nconsts"]
        carries = len(operands) - constants
    inputs = [each & _SOURCES for each in operands]
    while True:
        outputs = [each & _SOURCES for each in _outputs(body, inputs, refused)]
        carried = [a | b for a, b in zip(inputs[constants : constants + carries], outputs, strict=False)]
        if carried == inputs[constants : constants + carries]:
            return outputs
        inputs[constants : constants + carries] = carried


def _form(equation: Any, primitive: str, source: _Comes, operands: list[_Comes], variable: Any) -> _Comes:
    """Whether the result is a count or a quotient."""
    if primitive == "div":
        if _Comes.COUNT in operands[1]:
            return _Comes.QUOTIENT
        # A mean of a mask is its sum divided by a constant, and counts like the sum.
        return operands[0] & (_Comes.QUOTIENT if operands[1] & _SOURCES else _Comes.QUOTIENT | _Comes.COUNT)
    if primitive in _POWERS and _Comes.COUNT in operands[0]:
        exponent = equation.params.get("y", getattr(equation.invars[-1], "val", -1))
        return _Comes.QUOTIENT if exponent < 0 else _Comes.COUNT
    if primitive in _SUMS and source == _Comes.ROWS and variable.aval.shape == ():
        return _Comes.COUNT
    # The condition of a choice does not matter: where(n > 0, n, 1).
    values = operands[1:] if primitive == "select_n" else operands
    form = _Comes.NOTHING
    if primitive in _KEEPS or primitive == "reduce_sum":
        form = _union(values) & _Comes.QUOTIENT
    if primitive in _KEEPS and all(_Comes.COUNT in each or not each & _SOURCES for each in values):
        form |= _union(values) & _Comes.COUNT
    return form


def _union(values: Sequence[_Comes]) -> _Comes:
    return reduce(operator.or_, values, _Comes.NOTHING)


_SOURCES = _Comes.ROWS | _Comes.MODEL
_REFUSAL = (
    "loss: expected a mean over rows with equal weights, got a quotient by a sum over the batch, such as sum(loss * "
    "mask) / sum(mask): this sum differs between devices and microbatches, but the step averages the quotients with "
    "equal weights. Return (sum(loss * mask), sum(mask)), which the step divides for the whole batch; or divide by a "
    "constant (rows x length), or compute a mean per row; or pass equal_parts=True if every device has the same sum "
    "in every microbatch"
)
_NO_WEIGHT = (
    "loss: expected (sum, weight) with a weight from the batch alone, such as its number of tokens, got a weight "
    "that depends on the model: to return statistics with the loss, pass has_aux=True and return (loss, statistics)"
)
