"""Constants that a unit saves for its backward stay constants: behind a barrier they would be whole arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_impl import data_parallel_mesh, make_gradients, plan_sharding
from jax_impl.runtime.program.residuals import with_dependence
from tests.support.jax_impl.dependence import flattened
from tests.support.jax_impl.zoo import Chain


def test_constants_are_told_from_what_depends_on_arguments():
    @jax.jit
    def inside(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(x), jnp.broadcast_to(jnp.float32(3), (4,))

    def function(x: jax.Array, y: jax.Array) -> Any:
        sine, three = inside(x)
        return {"a": sine, "b": three, "c": three * 2, "d": three + y, "e": (x, 5.0)}

    outputs, depends = with_dependence(function, jnp.ones(4), jnp.ones(4))
    assert depends == [True, False, False, True, True, False]
    np.testing.assert_allclose(outputs["a"], np.sin(np.ones(4)), rtol=1e-6)
    np.testing.assert_array_equal(outputs["d"], np.full(4, 4.0))


class Masked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.where(jnp.arange(8) < 5, x @ self.w[...], -jnp.inf).max(1, keepdims=True) * x


def test_no_constant_of_a_unit_is_held_by_a_barrier():
    plan = plan_sharding(
        nnx.eval_shape(lambda: Chain([Masked(nnx.Rngs(k)) for k in range(2)])), data_parallel_mesh(4)
    )
    weights = {key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in plan.arrays.items()}
    function = make_gradients(plan, lambda model, rows: jnp.mean(model(rows) ** 2))
    traced = jax.make_jaxpr(function)(weights, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    made = {}
    held = []
    for equation, inputs, results, _ in flattened(traced.jaxpr):
        if equation.primitive.name == "optimization_barrier":
            held += [(name, variable.aval) for name, variable in zip(inputs, equation.invars, strict=True)]
        made.update((name, inputs) for name in results)
    constant = [aval for name, aval in held if aval.ndim and name in made and not _depends(name, made)]
    assert held
    assert not constant, constant


def _depends(name: Any, made: dict[Any, list[Any]]) -> bool:
    """Whether a value comes from any input of the program."""
    if name is None:
        return False
    return name not in made or any(_depends(source, made) for source in made[name])
