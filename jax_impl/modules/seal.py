"""See to it that nothing but a unit's own call uses its weights.

What a step holds of a unit's weights is reachable from a loss function: ``nnx.state(model)`` has it, so does
``jax.tree.leaves(params)``. But it is a shard, or a flat buffer, and its gradient is dropped: a penalty on all
parameters would be wrong without a word. So weights are sealed where a step begins and opened in their unit, both by
names in the traced program, and the program is read before it is compiled::

    weights at rest -> hold -> seal "layers/0" -> slices, loops, ... -> open -> gather -> apply
                                                \\-> anything else: refused

A parameter that a loss sees of a unit is zeros, sealed as well. What becomes of them would be lost, so the unit's call
takes a witness of each, without elements: one that was computed with, replaced, or stopped alone is refused.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
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
    """Of a variable: the path of its unit. ``stopped``: it has passed stop_gradient.

    ``rank``: of a parameter how many of its last dimensions are its own, whose elements stay where they are; those
    before number the layers of a stack. ``free``: it is a constant, which may be used; the path is its own.
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
# What hands weights on as they are, or some layers' of a stack.
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
    """The same arrays, to be used by unit ``path`` only."""
    # A name of jax.checkpoint's: an operation that computes nothing, has derivatives and batching, stays in
    # the jaxpr, and is gone in the compiled program.
    return checkpoint_name(arrays, _SEAL + path)


def mark_numbers(tree: T, name: str) -> T:
    """The same arrays, by ``name`` in the traced program. Random keys have no marks."""

    def mark(leaf: Any) -> Any:
        is_number = isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
        return checkpoint_name(leaf, name) if is_number else leaf

    return jax.tree.map(mark, tree)


def seal_parameter(path: str, zeros: jax.Array, rank: int) -> jax.Array:
    """Zeros in place of a parameter of unit ``path``. ``rank``: its dimensions without those of a stack."""
    return checkpoint_name(zeros, f"{_PARAMETER}{rank} {path}")


def constant(path: str, array: Any) -> jax.Array:
    """A plain array of the model at ``path``, which no loss changes."""
    return checkpoint_name(jnp.asarray(array), _CONSTANT + path)


def witnessed_constants(output: T, arrays: Mapping[str, jax.Array]) -> T:
    """The same ``output``, in a program that shows whether ``arrays`` are the constants still."""
    witnesses = [
        checkpoint_name(witness(lax.stop_gradient(array)), _UNCHANGED + path)
        for path, array in arrays.items()
    ]
    return witnessed(output, witnesses)


def witness(zeros: jax.Array) -> jax.Array:
    """No elements of a sealed parameter, for ``witnessed``: a program shows by it what became of the parameter."""
    return _once(no_elements(zeros))


def no_elements(array: jax.Array) -> jax.Array:
    """A witness of arrays that JAX may differentiate by, which have no gradient."""
    if array.ndim == 0:
        return lax.broadcast_in_dim(array, (0,), ())
    return lax.slice(array, (0,) * array.ndim, (0,) * array.ndim)


def witnessed(arrays: T, witnesses: Sequence[jax.Array]) -> T:
    """The same arrays, in a program that has ``witnesses`` of the parameters and constants that they come from."""

    def shown(x: jax.Array) -> jax.Array:
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        return x if is_key else _witnessed(x, *witnesses)

    # Every array, since a program need not use them all.
    return jax.tree.map(shown, arrays) if witnesses else arrays


def open_sealed(arrays: T) -> T:
    """The same arrays, free to use, but not to be differentiated."""
    return jax.tree.map(_once, checkpoint_name(arrays, _OPEN))


@jax.custom_jvp
def _once(arrays: T) -> T:
    return arrays


# A primitive of its own, since of calls that have derivatives of their own JAX keeps no trace in loops that it
# differentiates. Compiled, it is its first operand; to what reads programs, a call that returns it.
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
    # Gradients are collected by another way, so this one would be left out of derivatives of derivatives.
    raise ValueError(
        "loss: expected first derivatives of units only, got a derivative of one (a gradient inside of the loss, such "
        "as a gradient penalty): it would miss what goes through units' weights. Choose no units that it goes through"
    )


def check_seals(program: Any) -> None:
    """Raises ``ValueError`` for a closed jaxpr that uses sealed weights, with the unit and the line that does."""
    # What is computed and never used does no harm, and linen's setup may do so.
    jaxpr, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars), instantiate=True)
    for seal in _outputs(jaxpr, [None] * len(jaxpr.invars), ()):
        if seal is not None and not seal.free:
            raise ValueError(_refusal(seal.path, "them as a result"))


def _outputs(jaxpr: Any, inputs: Sequence[Seal | None], around: Equations) -> list[Seal | None]:
    """Which outputs are sealed, when these inputs are. ``around``: the equations that the jaxpr is inside of."""
    sealed: dict[Any, Seal] = {
        v: seal for v, seal in zip(jaxpr.invars, inputs, strict=True) if seal is not None
    }
    for equation in jaxpr.eqns:
        operands = [_get(sealed, operand) for operand in equation.invars]
        label = equation.params.get("name") if len(equation.invars) == 1 else None
        if isinstance(label, str) and label.startswith(_SEAL):
            sealed[equation.outvars[0]] = Seal(label.removeprefix(_SEAL))
            continue
        if isinstance(label, str) and label.startswith(_PARAMETER):
            rank, _, path = label.removeprefix(_PARAMETER).partition(" ")
            sealed[equation.outvars[0]] = Seal(path, int(rank))
            continue
        if isinstance(label, str) and label.startswith(_CONSTANT):
            sealed[equation.outvars[0]] = Seal(label.removeprefix(_CONSTANT), free=True)
            continue
        if isinstance(label, str) and label.startswith(_UNCHANGED) and operands[0] is None:
            raise ValueError(
                f"array {label.removeprefix(_UNCHANGED)!r}: expected a constant, since it is a plain array of the "
                "model, got one that the loss changes: make it an nnx.Variable, whose values go from step to step"
            )
        if label == _OPEN:
            continue
        for variable, seal in zip(equation.outvars, _results(equation, operands, around), strict=True):
            if seal is not None:
                sealed[variable] = seal
    return [_get(sealed, variable) for variable in jaxpr.outvars]


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
        # It may end before its first pass.
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
    """Whether a move hands on sealed arrays alone, and each layer's elements stay where they are in the layer."""
    primitive, params = equation.primitive.name, equation.params
    # What comes before is what a choice is made by, and behind are indices.
    first = 1 if primitive == "select_n" else 0
    last = {"dynamic_slice": 1, "gather": 1, "dynamic_update_slice": 2}.get(primitive)
    ranks = [None if seal is None else seal.rank or 0 for seal in operands[first:last]]
    if None in ranks:
        return False
    if primitive in _PASSES | {"select_n"}:
        return True
    operand, result, rank = (
        equation.invars[first].aval,
        equation.outvars[0].aval,
        max(filter(None, ranks), default=0),
    )
    layers = operand.ndim - rank
    if primitive in ("transpose", "broadcast_in_dim"):
        # Where the dimensions of a layer come from, or go.
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
    """Raises ``ValueError`` unless the arrays of a call, and its parameters, have come from one unit unchanged."""
    seals = [seal for seal in operands if seal is not None and not seal.free]
    if seals and None in operands[1:]:
        raise ValueError(_refusal(seals[0].path, "others in place of some (jnp.zeros_like of them)"))
    if len({seal.stopped for seal in seals}) > 1:
        raise ValueError(
            f"unit {seals[0].path!r}: expected jax.lax.stop_gradient of all of its parameters or of none, got it of "
            "some, which its gradients cannot follow: fully_shard(..., frozen=[...]) freezes parameters by their "
            "paths"
        )


def _looped(
    body: Any, operands: Sequence[Seal | None], constants: int, carries: int, around: Equations
) -> list[Seal | None]:
    """Outputs of a loop; what one pass seals, the next one carries."""
    inputs = list(operands)
    while True:
        outputs = _outputs(body, inputs, around)
        carried = [old or new for old, new in zip(inputs[constants:], outputs[:carries], strict=False)]
        if carried == inputs[constants : constants + carries]:
            return outputs
        inputs[constants : constants + carries] = carried


def inner_program(equation: Any) -> Any:
    """The jaxpr that a call runs (a jitted function, one with derivatives of its own); None for what is no call."""
    for value in map(jaxpr_of, equation.params.values()):
        if value is not None and len(value.invars) == len(equation.invars):
            return value if len(value.outvars) == len(equation.outvars) else None
    return None


def scan_counts(equation: Any, body: Any) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried."""

    # By shapes, because JAX renames the parameters that say so: a pass has one dimension less of what is stacked.
    def stacked(outside: Sequence[Any], inside: Sequence[Any]) -> int:
        return sum(a.aval.ndim != b.aval.ndim for a, b in zip(outside, inside, strict=True))

    carries = len(equation.outvars) - stacked(equation.outvars, body.outvars)
    return len(equation.invars) - carries - stacked(equation.invars, body.invars), carries


def jaxpr_of(value: Any) -> Any:
    """The jaxpr of an equation's parameter, closed or not; None for a parameter that is none."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None


def _get(sealed: Mapping[Any, Seal], operand: Any) -> Seal | None:
    # Literals have a value, and no hash.
    return None if hasattr(operand, "val") else sealed.get(operand)


def _refusal(path: str, use: str) -> str:
    return (
        f"unit {path!r}: expected its weights in its own calls only, got {use}: outside they are shards, and have no "
        "gradient. Call the unit, a method of it or jax_impl.call_unit, or choose units that contain what uses them; "
        "weight decay is the optimizer's (optax.add_decayed_weights), casts are param_dtype's"
    )


def line_in(error: Exception) -> str:
    """Where the user's code last was when ``error`` was raised."""
    names = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    package = f"{Path(__file__).parents[1]}{os.sep}"
    own = [at for at in names if not at[0].startswith((*_LIBRARIES, package))]
    return f" at {own[-1][0]}:{own[-1][1]}" if own else ""


def line_of(*around: Any) -> str:
    """Where the user's code asked for the last of some equations, or for those around it, as far as JAX knows."""
    for equation in reversed(around):
        known = equation.source_info.traceback
        for frame in known.frames if known is not None else ():
            if not frame.file_name.startswith(_LIBRARIES):
                return f" at {frame.file_name}:{frame.line_num}"
    return ""
