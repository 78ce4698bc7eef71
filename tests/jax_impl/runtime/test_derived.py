"""What elementwise operations make of what a function saves is not saved, and backward finds the same values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from jax_impl.runtime.program.residuals import Derived, derive
from jax_impl.runtime.program.traced import inline_calls, mark, mark_of

SQUARE = jax.random.normal(jax.random.key(0), (16, 16))
ROWS = jax.random.normal(jax.random.key(1), (8, 16))


def differentiated(function: Callable[..., Any], *args: Any) -> tuple[Any, Derived]:
    """The program of result and residuals of a function, of whose arguments backward has the first one."""

    def forward(*args: Any) -> Any:
        output, vjp = jax.vjp(function, *args)
        vjp.args_res[:1] = [None]
        return output, vjp

    program = jax.make_jaxpr(forward)(*args)
    return program, derive(program, 1, 1)


def saved(derived: Derived) -> list[tuple[int, ...]]:
    return sorted(v.aval.shape for v in derived.program.jaxpr.outvars[1:])


def attention(weight: jax.Array, x: jax.Array) -> jax.Array:
    scores = jnp.where(np.tril(np.ones((8, 8), bool)), (x @ weight) @ x.T, -jnp.inf)
    return jax.nn.softmax(scores) @ x


def gated(weight: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.silu(x @ weight) * (x @ weight.T) @ weight


def normed(weight: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * weight[0] @ weight


def cast(weight: jax.Array, x: jax.Array) -> jax.Array:
    return (x.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16)).astype(jnp.float32)


def added(weight: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(6):
        x = x + jnp.tanh(x) @ weight
    return x


def activated(activation: Callable[[jax.Array], jax.Array], weight: jax.Array, x: jax.Array) -> jax.Array:
    return activation(x @ weight) @ weight


ACTIVATED = [
    partial(activated, function)
    for function in (
        jnp.tanh,
        jax.nn.gelu,
        partial(jax.nn.gelu, approximate=False),
        jax.nn.celu,
        lambda x: jnp.log2(1 + x * x),
    )
]


@pytest.mark.parametrize("function", [attention, gated, normed, cast, added, *ACTIVATED])
def test_the_recipe_makes_what_was_saved(function):
    program, derived = differentiated(function, SQUARE, ROWS)
    output, *expected = jaxpr_as_fun(program)(SQUARE, ROWS)
    derived_output, *kept = jaxpr_as_fun(derived.program)(SQUARE, ROWS)
    np.testing.assert_array_equal(derived_output, output)
    remade = jaxpr_as_fun(derived.recipe)(*kept, SQUARE)
    assert len(remade) == len(expected)
    for array, other in zip(remade, expected, strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        # The mask, the exponentials and their sums, x @ weight and x; not the quotients.
        (attention, [(8,), (8, 8), (8, 8), (8, 16), (8, 16)]),
        # x and the products of gate and up.
        (gated, [(8, 16)] * 3),
        # x, each row's sum, and the scales, which are cut from the weight.
        (normed, [(1, 16), (8,), (8, 16)]),
        # x alone: backward has the weight.
        (cast, [(8, 16)]),
        # x and x @ weight, whatever operations a version of JAX makes the derivative of.
        *((function, [(8, 16)] * 2) for function in ACTIVATED),
    ],
)
def test_origins_are_saved(function, shapes):
    _, derived = differentiated(function, SQUARE, ROWS)
    assert saved(derived) == sorted(shapes)


def test_no_sum_over_layers_is_made_anew_of_all_of_them():
    _, derived = differentiated(added, SQUARE, ROWS)
    assert saved(derived) == [(8, 16)] * 6
    assert [equation.primitive.name for equation in derived.recipe.jaxpr.eqns].count("add") == 1


def test_calls_by_whose_names_transfers_are_found_stay():
    transfer = mark("transfer", lambda gate, x: jnp.where(gate, x, 0))
    program = inline_calls(jax.make_jaxpr(jax.jit(lambda x: jnp.sin(transfer(jnp.array(True), x))))(ROWS))
    assert [mark_of(equation) for equation in program.jaxpr.eqns].count("transfer") == 1
    assert [equation.primitive.name for equation in program.jaxpr.eqns][-1] == "sin"
