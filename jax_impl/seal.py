"""See to it that nothing but a unit's own call uses its weights.

What a step holds of a unit's weights is reachable from a loss function: ``nnx.state(model)`` has it, so does
``jax.tree.leaves(params)``. But it is a shard, or a flat buffer, and its gradient is dropped: a penalty on all
parameters would be wrong without a word. So weights are sealed where a step begins and opened in their unit, both by
names in the traced program, and the program is read before it is compiled::

    weights at rest -> hold -> seal "layers/0" -> slices, loops, ... -> open -> gather -> apply
                                                \\-> anything else: refused
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import flax
import jax
from jax.ad_checkpoint import checkpoint_name

T = TypeVar("T")
# Sealed variables of one jaxpr: the paths of their units.
Sealed = dict[Any, str]

_SEAL = "twinshard sealed "
_OPEN = "twinshard opened"
# What hands weights on as they are, or some layers' of a stack.
_MOVES = frozenset(
    {
        "broadcast_in_dim",
        "concatenate",
        "copy",
        "dynamic_slice",
        "gather",
        "optimization_barrier",
        "reshape",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "stack",
        "transpose",
        "unstack",
    }
)
_LIBRARIES = tuple(str(Path(file or "").parent) for file in (jax.__file__, flax.__file__, __file__))


def seal(path: str, arrays: T) -> T:
    """The same arrays, to be used by unit ``path`` only."""
    return checkpoint_name(arrays, _SEAL + path)


def open_sealed(arrays: T) -> T:
    """The same arrays, free to use."""
    return checkpoint_name(arrays, _OPEN)


def check_seals(program: Any) -> None:
    """Raises ``ValueError`` for a closed jaxpr that uses sealed weights, with the unit and the line that does."""
    _outputs(program.jaxpr, [None] * len(program.jaxpr.invars))


def _outputs(jaxpr: Any, inputs: Sequence[str | None]) -> list[str | None]:
    """Which outputs are sealed, when these inputs are."""
    sealed: Sealed = {v: path for v, path in zip(jaxpr.invars, inputs, strict=True) if path is not None}
    for equation in jaxpr.eqns:
        given = [_get(sealed, operand) for operand in equation.invars]
        label = equation.params.get("name") if len(equation.invars) == 1 else None
        if isinstance(label, str) and label.startswith(_SEAL):
            sealed[equation.outvars[0]] = label.removeprefix(_SEAL)
            continue
        if label == _OPEN:
            continue
        for variable, path in zip(equation.outvars, _results(equation, given), strict=True):
            if path is not None:
                sealed[variable] = path
    return [_get(sealed, variable) for variable in jaxpr.outvars]


def _results(equation: Any, given: Sequence[str | None]) -> Sequence[str | None]:
    primitive, params = equation.primitive.name, equation.params
    nothing: list[str | None] = [None] * len(equation.outvars)
    if primitive == "scan":
        return _looped(params["jaxpr"].jaxpr, given, params["num_consts"], params["num_carry"])
    if primitive == "while":
        tests, constants = params["cond_nconsts"], params["body_nconsts"]
        own = given[tests:]
        carried = _looped(params["body_jaxpr"].jaxpr, own, constants, len(own) - constants)
        _outputs(params["cond_jaxpr"].jaxpr, [*given[:tests], *carried])
        return carried
    if primitive == "cond":
        branches = [_outputs(branch.jaxpr, given[1:]) for branch in params["branches"]]
        return [next(filter(None, paths), None) for paths in zip(*branches, strict=True)]
    inner = [value for value in (_jaxpr(value) for value in params.values()) if value is not None]
    aligned = [value for value in inner if len(value.invars) == len(given)]
    if aligned:
        outputs = _outputs(aligned[0], given)
        return outputs if len(outputs) == len(nothing) else nothing
    if not any(given) or inner:
        return nothing
    if primitive == "optimization_barrier":
        return given
    if primitive not in _MOVES:
        _refuse(equation, next(filter(None, given)))
    return [next(filter(None, given))] * len(nothing)


def _looped(body: Any, given: Sequence[str | None], constants: int, carries: int) -> list[str | None]:
    """Outputs of a loop; what one pass seals, the next one carries."""
    inputs = list(given)
    while True:
        outputs = _outputs(body, inputs)
        carried = [old or new for old, new in zip(inputs[constants:], outputs[:carries], strict=False)]
        if carried == inputs[constants : constants + carries]:
            return outputs
        inputs[constants : constants + carries] = carried


def _jaxpr(value: Any) -> Any:
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None


def _get(sealed: Mapping[Any, str], operand: Any) -> str | None:
    # Literals have a value, and no hash.
    return None if hasattr(operand, "val") else sealed.get(operand)


def _refuse(equation: Any, path: str) -> None:
    raise ValueError(
        f"unit {path!r}: expected its weights in its own calls only, got {equation.primitive.name}{_line(equation)}: "
        "outside they are shards, and have no gradient. Compute it inside of the unit and return it, or leave it to "
        "the optimizer (weight decay, optax.add_decayed_weights)"
    )


def _line(equation: Any) -> str:
    """Where the user's code asked for it, as far as JAX knows."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return f" at {frame.file_name}:{frame.line_num}"
    return ""
