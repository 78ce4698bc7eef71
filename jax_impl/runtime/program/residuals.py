"""Which results of a traced function depend on its arguments, and which are constants.

A constant that a function saves for its backward, such as the zeros of ``jnp.where``, costs nothing as long as XLA may
make it where it is used. Behind a barrier it is an array: of all of an activation's elements, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jax_impl.modules.seal import inner_program
from jax_impl.runtime.program.derived import derive
from jax_impl.runtime.program.traced import inlined, operands


def with_dependence(function: Callable[..., Any], *args: Any) -> tuple[Any, list[bool]]:
    """``function(*args)``, and for each leaf of it whether it depends on ``args``."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    leaves, depends = _run(program, args)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), depends


def with_derived(function: Callable[..., Any], given: int, *args: Any) -> tuple[Any, Saved, list[bool]]:
    """Of ``function(*args)``, a result and what it saves: both, and which leaves of the result depend on ``args``.

    Backward has the first ``given`` arguments: ``derived.py``.
    """
    program, (result, saved) = jax.make_jaxpr(function, return_shape=True)(*args)
    results = len(jax.tree.leaves(result))
    derived = derive(program, results, len(jax.tree.leaves(args[:given])))
    leaves, depends = _run(derived.program, args)
    return (
        jax.tree.unflatten(jax.tree.structure(result), leaves[:results]),
        Saved.of_leaves(leaves[results:], jax.tree.structure(saved), depends[results:], derived.recipe),
        depends[:results],
    )


def constants_of(program: ClosedJaxpr) -> list[Any]:
    """Variables that depend on no input, and are operands of operations that do. JAX moves those out of loops."""
    jaxpr = inlined(program).jaxpr
    known = dict.fromkeys(jaxpr.invars, True)
    found: dict[Any, None] = {}
    for equation in jaxpr.eqns:
        given = operands(equation.invars)
        depends = any(known.get(one, False) for one in given)
        known.update(dict.fromkeys(equation.outvars, depends))
        if depends:
            found.update(dict.fromkeys(one for one in given if not known.get(one, True)))
    return list(found)


def _run(program: ClosedJaxpr, args: Any) -> tuple[list[Any], list[bool]]:
    leaves = jaxpr_as_fun(program)(*jax.tree.leaves(args))
    return leaves, _outputs(program.jaxpr, [True] * len(program.jaxpr.invars))


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
    """What a function saves, constants apart. ``varying``: the leaves that depend on its arguments.

    ``recipe``: what makes the leaves of ``tree`` of them; None where they are those.
    """

    varying: list[Any]
    constants: list[Any]
    tree: Any = field(metadata={"static": True})
    where: tuple[bool, ...] = field(metadata={"static": True})
    recipe: ClosedJaxpr | None = field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, tree: Any, depends: Sequence[bool]) -> Saved:
        leaves, structure = jax.tree.flatten(tree)
        return cls.of_leaves(leaves, structure, depends)

    @classmethod
    def of_leaves(
        cls, leaves: Sequence[Any], structure: Any, depends: Sequence[bool], recipe: ClosedJaxpr | None = None
    ) -> Saved:
        varying = [leaf for leaf, one in zip(leaves, depends, strict=True) if one]
        constants = [leaf for leaf, one in zip(leaves, depends, strict=True) if not one]
        return cls(varying, constants, structure, tuple(depends), recipe)

    def whole(self, *given: Any) -> Any:
        """The tree that was saved. ``given``: the arguments that backward has."""
        varying, constants = iter(self.varying), iter(self.constants)
        leaves = [next(varying if one else constants) for one in self.where]
        if self.recipe is not None:
            leaves = jaxpr_as_fun(self.recipe)(*leaves, *jax.tree.leaves(given))
        return jax.tree.unflatten(self.tree, leaves)
