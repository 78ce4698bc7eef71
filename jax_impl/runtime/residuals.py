"""Which results of a traced function depend on its arguments, and which are constants.

A constant that a function saves for its backward, such as the zeros of ``jnp.where``, costs nothing as long as XLA may
make it where it is used. Behind a barrier it is an array: of all of an activation's elements, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jax_impl.modules.seal import inner_program


def with_dependence(function: Callable[..., Any], *args: Any) -> tuple[Any, list[bool]]:
    """``function(*args)``, and for each leaf of it whether it depends on ``args``."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves = jaxpr_as_fun(program)(*jax.tree.leaves(args))
    depends = _outputs(program.jaxpr, [True] * len(program.jaxpr.invars))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), depends


def _outputs(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    known = dict(zip(jaxpr.invars, inputs, strict=True))

    def depends(operand: Any) -> bool:
        # Literals have a value, and no hash.
        return not hasattr(operand, "val") and known.get(operand, False)

    for equation in jaxpr.eqns:
        given = [depends(operand) for operand in equation.invars]
        inner = inner_program(equation) if any(given) else None
        results = [any(given)] * len(equation.outvars) if inner is None else _outputs(inner, given)
        known.update(zip(equation.outvars, results, strict=True))
    return [depends(variable) for variable in jaxpr.outvars]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Saved:
    """What a function saves, constants apart. ``varying``: the leaves that depend on its arguments."""

    varying: list[Any]
    constants: list[Any]
    tree: Any = field(metadata={"static": True})
    where: tuple[bool, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any, depends: Sequence[bool]) -> Saved:
        leaves, structure = jax.tree.flatten(tree)
        varying = [leaf for leaf, one in zip(leaves, depends, strict=True) if one]
        constants = [leaf for leaf, one in zip(leaves, depends, strict=True) if not one]
        return cls(varying, constants, structure, tuple(depends))

    @property
    def whole(self) -> Any:
        """The tree that was saved."""
        varying, constants = iter(self.varying), iter(self.constants)
        return jax.tree.unflatten(self.tree, [next(varying if one else constants) for one in self.where])
