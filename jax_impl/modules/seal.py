"""Ensure that only a unit's own call uses its weights.

A loss function can reach the array that a step holds for a unit's weights, by ``nnx.state(model)`` or
``jax.tree.leaves(params)``. But that array is a shard or a flat buffer, and its gradient is dropped: a penalty on all
parameters would be silently wrong. So weights are sealed at the start of a step and opened in their unit, both by names
in the traced program, and the program is checked before compilation::

    weights at rest -> hold -> seal "layers/0" -> slices, loops, ... -> open -> gather -> apply
                                                \\-> anything else: refused

A loss sees a unit's parameters as zeros, which are also sealed. Changes to the zeros would be lost, so the unit's call
takes an empty array from each as a witness, and refuses a parameter that was used in a computation, replaced, or passed
through stop_gradient without the others.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import flax
import jax
import jax.numpy as jnp
import jaxlib
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr

T = TypeVar("T")
Equations = tuple[Any, ...]


@dataclass(frozen=True)
class Seal:
    """The seal of a variable. ``path``: its unit. ``stopped``: whether the variable passed through stop_gradient.

    ``rank``: the number of a parameter's own (last) dimensions, whose elements must not move; the dimensions before
    index the layers of a stack. ``free``: whether it is a constant, which may be used; ``path`` is then its own.
    """

    path: str
    rank: int | None = None
    stopped: bool = False
    free: bool = False


_SEAL = "twinshard sealed "
_PARAMETER = "twinshard parameter "
_OPEN = "twinshard opened"
_CONSTANT = "twinshard constant "
_UNCHANGED = "twinshard unchanged "
# Operations that pass weights on unchanged, or pass on some layers of a stack.
_MOVES = frozenset({
    "broadcast_in_dim", "concatenate", "copy", "device_put", "dynamic_slice",
    "dynamic_update_slice", "gather", "name", "optimization_barrier", "reshape", "rev",
    "select_n", "sharding_constraint", "slice", "split", "squeeze", "stack", "stop_gradient",
    "tile", "transpose", "unstack",
})  # fmt: skip
_PASSES = frozenset({"copy", "device_put", "name", "sharding_constraint", "stop_gradient"})
_LIBRARIES = tuple(
    f"{Path(file or '').parent}{os.sep}"
    for file in (jax.__file__, jaxlib.__file__, flax.__file__, optax.__file__, __file__)
)


def seal(path: str, arrays: T) -> T:
    """The same arrays, for use only by unit ``path``."""
    # A checkpoint name is an operation that computes nothing, supports differentiation and batching, stays in the
    # jaxpr, and disappears in the compiled program.
    return checkpoint_name(arrays, _SEAL + path)


def mark_numbers(tree: T, name: str) -> T:
    """The same arrays, marked with ``name`` in the traced program. Random keys get no marks."""

    def mark(leaf: Any) -> Any:
        is_number = isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
        return checkpoint_name(leaf, name) if is_number else leaf

    return jax.tree.map(mark, tree)


def seal_parameter(path: str, zeros: jax.Array, rank: int) -> jax.Array:
    """Zeros in place of a parameter of unit ``path``. ``rank``: its number of dimensions without the stack's."""
    return checkpoint_name(zeros, f"{_PARAMETER}{rank} {path}")


def constant(path: str, array: Any) -> jax.Array:
    """A plain array of the model at ``path``, which no loss may change."""
    return checkpoint_name(jnp.asarray(array), _CONSTANT + path)


def witnessed_constants(output: T, arrays: Mapping[str, jax.Array]) -> T:
    """The same ``output``, in a program that shows whether ``arrays`` are still the constants."""
    witnesses = [
        checkpoint_name(witness(lax.stop_gradient(array)), _UNCHANGED + path)
        for path, array in arrays.items()
    ]
    return witnessed(output, witnesses)


def witness(zeros: jax.Array) -> jax.Array:
    """An empty slice of a sealed parameter, for ``witnessed``: it shows what happened to the parameter."""
    return _once(no_elements(zeros))


def no_elements(array: jax.Array) -> jax.Array:
    """An empty witness of an array that JAX may differentiate; it has no gradient."""
    if array.ndim == 0:
        return lax.broadcast_in_dim(array, (0,), ())
    return lax.slice(array, (0,) * array.ndim, (0,) * array.ndim)


def witnessed(arrays: T, witnesses: Sequence[jax.Array]) -> T:
    """The same arrays, in a program with ``witnesses`` of the parameters and constants from which the arrays come."""

    def shown(x: jax.Array) -> jax.Array:
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        return x if is_key else _witnessed(x, *witnesses)

    # Mark every array, since a program may not use all of them.
    return jax.tree.map(shown, arrays) if witnesses else arrays


def open_sealed(arrays: T) -> T:
    """The same arrays, free to use, but not differentiable."""
    return jax.tree.map(_once, checkpoint_name(arrays, _OPEN))


@jax.custom_jvp
def _once(arrays: T) -> T:
    return arrays


# A separate primitive, because JAX drops calls with custom derivatives from loops that it differentiates. Compiled, the
# primitive is its first operand; to a reader of programs, it is a call that returns this operand.
WITNESSED = Primitive("twinshard_witnessed")
WITNESSED.def_impl(lambda array, *_, call_jaxpr: array)
WITNESSED.def_abstract_eval(lambda array, *_, call_jaxpr: array)
mlir.register_lowering(WITNESSED, lambda _, array, *witnesses, call_jaxpr: [array])
ad.primitive_jvps[WITNESSED] = lambda primals, tangents, call_jaxpr: (_witnessed(*primals), tangents[0])
batching.primitive_batchers[WITNESSED] = lambda args, axes, call_jaxpr: (_witnessed(*args), axes[0])


def _witnessed(*operands: jax.Array) -> jax.Array:
    shapes = (jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands)
    first: jax.Array = WITNESSED.bind(*operands, call_jaxpr=jax.make_jaxpr(lambda array, *_: array)(*shapes))
    return first


@_once.defjvp
def _twice(primals: Any, tangents: Any) -> Any:
    # Gradients are collected separately, so second derivatives would miss this part.
    raise ValueError(
        "loss: expected only first derivatives of units, got a derivative of a derivative (a gradient inside the "
        "loss, such as a gradient penalty, or of the gradient of a step or an evaluation): the result would miss the "
        "part through the units' weights. Choose units that this gradient does not pass through, or derive the whole "
        "model, plan.merge(unshard(plan, weights))"
    )


def check_seals(program: Any) -> None:
    """Raise ``ValueError`` for a closed jaxpr that uses sealed weights, with the unit and the line of the use."""
    # Unused computations are harmless, and linen's setup may contain some.
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)
    for seal in _outputs(jaxpr, [None] * len(jaxpr.invars), ()):
        if seal is not None and not seal.free:
            raise ValueError(_refusal(seal.path, "them as a result"))


def _outputs(jaxpr: Any, inputs: Sequence[Seal | None], around: Equations) -> list[Seal | None]:
    """The seals of the outputs for given seals of the inputs. ``around``: the equations that contain the jaxpr."""

    def results(equation: Any, operands: Sequence[Seal | None]) -> Sequence[Seal | None]:
        label = equation.params.get("name") if len(operands) == 1 else None
        if isinstance(label, str):
            if label.startswith(_SEAL):
                return [Seal(label.removeprefix(_SEAL))]
            if label.startswith(_PARAMETER):
                rank, _, path = label.removeprefix(_PARAMETER).partition(" ")
                return [Seal(path, int(rank))]
            if label.startswith(_CONSTANT):
                return [Seal(label.removeprefix(_CONSTANT), free=True)]
            if label == _OPEN:
                return [None]
            if label.startswith(_UNCHANGED) and operands[0] is None:
                raise ValueError(
                    f"array {label.removeprefix(_UNCHANGED)!r}: expected a constant, since it is a plain array of the "
                    "model, got an array that the loss changes: make it an nnx.Variable, whose value carries over from "
                    "step to step"
                )
        return _results(equation, operands, around)

    return outputs_of(jaxpr, inputs, None, results)


def _results(equation: Any, operands: Sequence[Seal | None], around: Equations) -> Sequence[Seal | None]:
    primitive, params = equation.primitive.name, equation.params
    nothing: list[Seal | None] = [None] * len(equation.outvars)
    around = (*around, equation)
    if primitive == "scan":
        body = jaxpr_of(params["jaxpr"])
        constants, carries = scan_counts(equation, body)
        return _looped(body, operands, constants, carries, around)
    if primitive == "while":
        tests, constants = params["cond_nconsts"], params["body_nconsts"]
        own = operands[tests:]
        looped = _looped(jaxpr_of(params["body_jaxpr"]), own, constants, len(own) - constants, around)
        # The loop may end before its first iteration.
        carried = [before or after for before, after in zip(own[constants:], looped, strict=True)]
        _outputs(jaxpr_of(params["cond_jaxpr"]), [*operands[:tests], *carried], around)
        return carried
    if primitive == "cond":
        branches = [_outputs(jaxpr_of(branch), operands[1:], around) for branch in params["branches"]]
        return [next(filter(None, seals), None) for seals in zip(*branches, strict=True)]
    if primitive == WITNESSED.name:
        _check_witnesses(operands)
    inner = inner_program(equation)
    if inner is not None:
        return _outputs(inner, operands, around)
    if not any(operands):
        return nothing
    if primitive == "optimization_barrier":
        return operands
    sealed = [seal for seal in operands if seal is not None]
    seal = next((seal for seal in sealed if not seal.free), sealed[0])
    is_witness = all(variable.aval.size == 0 for variable in equation.outvars)
    if seal.free and not is_witness and primitive not in _PASSES:
        return nothing
    if primitive not in _MOVES or not (is_witness or seal.rank is None or _keeps_layers(equation, operands)):
        raise ValueError(_refusal(seal.path, f"{primitive}{line_of(*around)}"))
    return [replace(seal, stopped=seal.stopped or primitive == "stop_gradient")] * len(nothing)


def _keeps_layers(equation: Any, operands: Sequence[Seal | None]) -> bool:
    """Whether an operation passes on only sealed arrays, and keeps the positions of elements within each layer."""
    primitive, params = equation.primitive.name, equation.params
    # The operands before are the condition of a choice; the operands after are indices.
    first = 1 if primitive == "select_n" else 0
    last = {"dynamic_slice": 1, "gather": 1, "dynamic_update_slice": 2}.get(primitive)
    ranks = [None if seal is None else seal.rank or 0 for seal in operands[first:last]]
    if None in ranks:
        return False
    if primitive in _PASSES | {"select_n"}:
        return True
    result, rank = equation.outvars[0].aval, max(filter(None, ranks), default=0)
    layers = equation.invars[first].aval.ndim - rank
    if primitive in ("transpose", "broadcast_in_dim"):
        # The source or the target of a layer's dimensions.
        dimensions = params["permutation" if primitive == "transpose" else "broadcast_dimensions"]
        return tuple(dimensions[layers:]) == tuple(range(result.ndim - rank, result.ndim))
    moved = [params[name] for name in ("dimension", "axis") if name in params]
    moved += params["dimensions"] if primitive in ("rev", "squeeze") else ()
    moved += params["dimension_numbers"].start_index_map if primitive == "gather" else ()
    arrays = [variable.aval for variable in (*equation.invars[first:last], *equation.outvars)]
    shapes = {array.shape[array.ndim - rank :] for array in arrays}
    free = max(layers, result.ndim - rank if primitive == "stack" else 0)
    return max(moved, default=0) < free and len(shapes) == 1


def _check_witnesses(operands: Sequence[Seal | None]) -> None:
    """Raise ``ValueError`` unless the arrays and parameters of a call come unchanged from one unit."""
    seals = [seal for seal in operands if seal is not None and not seal.free]
    if seals and None in operands[1:]:
        raise ValueError(_refusal(seals[0].path, "replacements for some of them (such as jnp.zeros_like)"))
    if len({seal.stopped for seal in seals}) > 1:
        raise ValueError(
            f"unit {seals[0].path!r}: expected jax.lax.stop_gradient on all of its parameters or on none, got it on "
            "some, which the unit's gradients cannot follow: use fully_shard(..., frozen=[...]) to freeze parameters "
            "by path"
        )


def _looped(
    body: Any, operands: Sequence[Seal | None], constants: int, carries: int, around: Equations
) -> list[Seal | None]:
    """The seals of a loop's outputs; seals from one iteration are carried into the next."""
    inputs = list(operands)
    while True:
        outputs = _outputs(body, inputs, around)
        carried = [old or new for old, new in zip(inputs[constants:], outputs[:carries], strict=False)]
        if carried == inputs[constants : constants + carries]:
            return outputs
        inputs[constants : constants + carries] = carried


def outputs_of(
    jaxpr: Any,
    inputs: Sequence[T],
    unknown: T,
    results: Callable[[Any, list[T]], Sequence[T]],
    of_literal: Callable[[Any], T] | None = None,
) -> list[T]:
    """What is known of a program's outputs, given the same of its inputs: ``results(equation, operands)`` in order.

    ``unknown``: of the program's constants, and of literals unless ``of_literal`` tells it from their value.
    """
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def get(operand: Any) -> T:
        # Literals have a value but no hash.
        if hasattr(operand, "val"):
            return unknown if of_literal is None else of_literal(operand.val)
        return known.get(operand, unknown)

    for equation in jaxpr.eqns:
        operands = [get(operand) for operand in equation.invars]
        known.update(zip(equation.outvars, results(equation, operands), strict=True))
    return [get(variable) for variable in jaxpr.outvars]


def inner_program(equation: Any) -> Any:
    """The jaxpr that a call runs (a jitted function, or one with custom derivatives); None if this is not a call."""
    for value in map(jaxpr_of, equation.params.values()):
        if value is not None and len(value.invars) == len(equation.invars):
            return value if len(value.outvars) == len(equation.outvars) else None
    return None


def scan_counts(equation: Any, body: Any) -> tuple[int, int]:
    """The number of a scan's constant operands, and of its carried operands."""

    # Found by shapes, since JAX renames the parameters with these numbers: inside, stacked operands lose one dimension.
    def stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(a.aval.ndim != b.aval.ndim for a, b in zip(outside, inside, strict=True))

    carries = len(equation.outvars) - stacked(equation.outvars, body.outvars)
    return len(equation.invars) - carries - stacked(equation.invars, body.invars), carries


def jaxpr_of(value: Any) -> Any:
    """The jaxpr in an equation's parameter, closed or not; None for other parameters."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None


def jaxprs_of(equation: Any) -> list[Any]:
    """The programs that an equation runs, such as a loop's body or the branches of a choice."""
    values = ((v if isinstance(v, tuple | list) else (v,)) for v in equation.params.values())
    return [jaxpr_of(item) for value in values for item in value if jaxpr_of(item) is not None]


def _refusal(path: str, use: str) -> str:
    return (
        f"unit {path!r}: expected its weights in its own calls only, got {use}: outside these calls the weights are "
        "shards without a gradient. Call the unit, one of its methods or jax_impl.call_unit, or choose units that "
        "contain every use; for weight decay use the optimizer (optax.add_decayed_weights), for casts param_dtype"
    )


def line_in(error: Exception) -> str:
    """The last line of user code when ``error`` was raised."""
    names = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    package = f"{Path(__file__).parents[1]}{os.sep}"
    own = [at for at in names if not at[0].startswith((*_LIBRARIES, package))]
    return f" at {own[-1][0]}:{own[-1][1]}" if own else ""


def line_of(*around: Any) -> str:
    """The line of user code that produced the last of the equations, or an enclosing one, if JAX knows it."""
    for equation in reversed(around):
        known = equation.source_info.traceback
        for frame in known.frames if known is not None else ():
            if not frame.file_name.startswith(_LIBRARIES):
                return f" at {frame.file_name}:{frame.line_num}"
    return ""
