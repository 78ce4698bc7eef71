"""Losses over unequally many tokens: refused where parts of a batch would count as if they had equally many."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jax_impl
from jax_impl import data_parallel_mesh, fully_shard, make_gradients, make_train_step, shard_batch

B, T, D = 8, 5, 3


def parameters() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"layers": [{"w": jnp.asarray(rng.standard_normal((D, D)), jnp.float32)}], "b": jnp.ones(())}


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    # Another number of tokens in each row.
    mask = (np.arange(T)[None] < 1 + np.arange(B)[:, None] % T).astype(np.float32)
    return {"x": rng.standard_normal((B, T, D)).astype(np.float32), "mask": mask, "length": mask.sum(1)}


def losses(tree: Any, rows: Any) -> jax.Array:
    """``[B, T]``."""
    hidden = jax_impl.call_unit(lambda unit, x: jnp.tanh(x @ unit["w"]), tree["layers"][0], rows["x"])
    return -jax.nn.log_softmax(hidden)[..., 0] * tree["b"]


def quotient(tree: Any, rows: Any) -> jax.Array:
    return jnp.sum(losses(tree, rows) * rows["mask"]) / jnp.sum(rows["mask"])


def at_least_one(tree: Any, rows: Any) -> jax.Array:
    count = jnp.maximum((rows["mask"] > 0).sum(), 1)
    return 2 * jnp.sum(losses(tree, rows) * rows["mask"]) / count + 0.1 * tree["b"] ** 2


def where_mean(tree: Any, rows: Any) -> jax.Array:
    return jnp.mean(losses(tree, rows), where=rows["mask"] > 0)


def average(tree: Any, rows: Any) -> jax.Array:
    return jnp.average(losses(tree, rows), weights=rows["mask"])


def inverse(tree: Any, rows: Any) -> jax.Array:
    return jnp.vdot(losses(tree, rows), rows["mask"]) * (1.0 / (jnp.sum(rows["mask"]) + 1e-8))


def weights_first(tree: Any, rows: Any) -> jax.Array:
    weights = rows["mask"] / rows["mask"].sum()
    return jnp.sum(weights * losses(tree, rows))


def guarded(tree: Any, rows: Any) -> jax.Array:
    total, count = jnp.sum(losses(tree, rows) * rows["mask"]), rows["length"].sum()
    return jnp.where(count > 0, total / jnp.where(count == 0, 1, count), 0.0)


def branched(tree: Any, rows: Any) -> jax.Array:
    total, count = jnp.sum(losses(tree, rows) * rows["mask"]), rows["length"].sum()
    return lax.cond(count > 0, lambda: total / count, lambda: 0.0 * total)


def chunked(tree: Any, rows: Any) -> jax.Array:
    """As those who save memory sum over chunks."""

    def add(carried: Any, chunk: Any) -> Any:
        values, mask = chunk
        return (carried[0] + jnp.sum(values * mask), carried[1] + jnp.sum(mask)), None

    parts = losses(tree, rows).T, rows["mask"].T
    (total, count), _ = lax.scan(add, (jnp.zeros(()), jnp.zeros(())), parts)
    return total / count


def stopped(tree: Any, rows: Any) -> jax.Array:
    return jnp.sum(losses(tree, rows) * rows["mask"]) / lax.stop_gradient(jnp.sum(rows["mask"]))


def mean_by_mean(tree: Any, rows: Any) -> jax.Array:
    return jnp.mean(losses(tree, rows) * rows["mask"]) / jnp.mean(rows["mask"])


def to_the_power(tree: Any, rows: Any) -> jax.Array:
    return jnp.sum(losses(tree, rows) * rows["mask"]) * jnp.sum(rows["mask"]) ** -1


QUOTIENTS = [
    quotient, at_least_one, where_mean, average, inverse, weights_first, guarded, branched, chunked, jax.jit(quotient),
    stopped, mean_by_mean, to_the_power,
]  # fmt: skip


def plain_mean(tree: Any, rows: Any) -> jax.Array:
    return losses(tree, rows).mean()


def by_a_constant(tree: Any, rows: Any) -> jax.Array:
    return jnp.sum(losses(tree, rows) * rows["mask"]) / rows["mask"].size


def mean_of_rows(tree: Any, rows: Any) -> jax.Array:
    return jnp.mean(jnp.sum(losses(tree, rows) * rows["mask"], 1) / jnp.sum(rows["mask"], 1))


def row_after_row(tree: Any, rows: Any) -> jax.Array:
    def of_one(row: Any) -> jax.Array:
        values, mask = row
        return jnp.sum(values * mask) / jnp.sum(mask)

    return lax.map(of_one, (losses(tree, rows), rows["mask"])).mean()


def row_beside_row(tree: Any, rows: Any) -> jax.Array:
    return jax.vmap(lambda x, m: jnp.sum(x * m) / m.sum())(losses(tree, rows), rows["mask"]).mean()


def normalized_inputs(tree: Any, rows: Any) -> jax.Array:
    x = (rows["x"] - rows["x"].mean()) / (rows["x"].std() + 1e-5)
    return losses(tree, {**rows, "x": x / jnp.abs(x).sum()}).mean()


def balanced(tree: Any, rows: Any) -> jax.Array:
    """A router's balance loss, whose denominators depend on weights."""
    gates = jax.nn.softmax(rows["x"] @ tree["layers"][0]["w"])
    chosen = jax.nn.one_hot(gates.argmax(-1), D).sum((0, 1))
    return plain_mean(tree, rows) + jnp.sum(gates.mean((0, 1)) * chosen / chosen.sum())


def contrastive(tree: Any, rows: Any) -> jax.Array:
    pooled = losses(tree, rows)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(pooled @ pooled.T))) / (1 + jnp.linalg.norm(pooled))


def given_count(tree: Any, rows: Any) -> jax.Array:
    """The count of the whole batch, brought in by every row."""
    return jnp.sum(losses(tree, rows) * rows["mask"]) / rows["length"][0]


MEANS = [
    plain_mean, by_a_constant, mean_of_rows, row_after_row, row_beside_row, normalized_inputs, contrastive, given_count,
]  # fmt: skip


def sharded(devices: int, engine: str = "shard_map", units: tuple[str, ...] = ("layers/*",)) -> Any:
    return fully_shard(parameters(), data_parallel_mesh(devices), units=units, engine=engine)


def traced(plan: Any, weights: Any, loss_fn: Any, microbatches: int = 1, **options: Any) -> Any:
    gradients = make_gradients(plan, loss_fn, microbatches, **options)
    return jax.make_jaxpr(gradients)(weights, shard_batch(plan, batch(), microbatches))


@pytest.mark.parametrize("loss_fn", QUOTIENTS, ids=lambda f: getattr(f, "__name__", "jitted"))
def test_a_quotient_by_a_sum_over_the_batch_is_refused(loss_fn: Any) -> None:
    plan, weights = sharded(2)
    for microbatches in (1, 2):
        with pytest.raises(
            ValueError,
            match=r"quotient by a sum over the batch.*Return \(sum\(.*\), sum\(mask\)\).*equal_parts",
        ):
            traced(plan, weights, loss_fn, microbatches)


@pytest.mark.parametrize("loss_fn", MEANS, ids=lambda f: f.__name__)
def test_losses_that_weight_rows_equally_are_not(loss_fn: Any) -> None:
    plan, weights = sharded(2)
    for microbatches in (1, 2):
        traced(plan, weights, loss_fn, microbatches)


def test_denominators_that_depend_on_weights_are_not_counts() -> None:
    plan, weights = fully_shard(parameters(), data_parallel_mesh(2), units=[])
    traced(plan, weights, balanced, 2)


def test_a_denominator_summed_over_all_devices_is_right_and_accepted() -> None:
    def global_mean(tree: Any, rows: Any) -> jax.Array:
        return 2 * jnp.sum(losses(tree, rows) * rows["mask"]) / lax.psum(rows["mask"].sum(), "dp")

    plan, weights = sharded(2)
    sharded_loss = make_train_step(plan, global_mean, optax.sgd(0.1)).gradients(weights, batch())[0]
    np.testing.assert_allclose(sharded_loss, quotient(parameters(), batch()), rtol=1e-6)


@pytest.mark.parametrize(("engine", "devices"), [("shard_map", 1), ("pjit", 4)])
def test_one_part_has_one_quotient(engine: str, devices: int) -> None:
    plan, weights = sharded(devices, engine)
    expected, slopes = jax.value_and_grad(quotient)(parameters(), batch())
    step = make_train_step(plan, quotient, optax.sgd(0.1))
    loss, gradients = step.gradients(weights, batch())
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    gradient = jax_impl.unshard(plan, gradients)["layers/0/w"]
    np.testing.assert_allclose(gradient, slopes["layers"][0]["w"], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="quotient by a sum over the batch"):
        make_train_step(plan, quotient, optax.sgd(0.1), microbatches=2).gradients(weights, batch())


def test_parts_that_are_said_to_be_equal_are_believed() -> None:
    plan, weights = sharded(2)
    rows = batch()
    rows["mask"] = np.tile(np.arange(T) < 3, (B, 1)).astype(np.float32)
    step = make_train_step(plan, quotient, optax.sgd(0.1), microbatches=2, equal_parts=True)
    np.testing.assert_allclose(step.gradients(weights, rows)[0], quotient(parameters(), rows), rtol=1e-6)
    traced(plan, weights, quotient, 2, equal_parts=True)
