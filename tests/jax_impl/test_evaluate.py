"""Steps that only go forward: losses, rows, sampling, against the plain model; batches that do not divide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_impl import (
    abstract_state,
    count_collectives,
    data_parallel_mesh,
    fully_shard,
    init_state,
    make_eval_step,
    make_train_step,
    pad_batch,
    unshard,
    variable_leaves,
)
from tests.jax_impl.test_losses import (
    assert_close,
    batch,
    pair,
    parameters,
    quotient,
    sharded,
    token_losses,
    with_statistics,
)

VOCABULARY, WIDTH = 11, 8
ENGINES = pytest.mark.parametrize("engine", ["shard_map", "pjit"])


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # Of the tokens so far, so that what is sampled depends on all of them.
        seen = jnp.cumsum(self.norm(x), axis=1)
        return x + self.dropout(jnp.tanh(self.up(seen)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model() -> Model:
    made = Model(nnx.Rngs(0))
    # Statistics unlike those of a new model.
    for layer in made.layers:
        layer.norm.mean[...] = jnp.linspace(-0.1, 0.1, WIDTH)
    return made


def prompts(rows: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (rows, 3))


def state_of(engine: str, devices: int = 4) -> Any:
    made = model()
    plan, weights = fully_shard(made, data_parallel_mesh(devices), engine=engine)
    return plan, init_state(plan, weights, optax.sgd(0.1), variable_leaves(made))


def greedy(model: Any, tokens: jax.Array, steps: int = 4) -> jax.Array:
    model.eval()
    start = tokens.shape[1]
    filled = jnp.pad(tokens, ((0, 0), (0, steps)))

    def add(position: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = jax.lax.dynamic_index_in_dim(model(tokens), position - 1, axis=1, keepdims=False)
        return tokens.at[:, position].set(logits.argmax(-1))

    return jax.lax.fori_loop(start, start + steps, add, filled)


@pytest.mark.each_value
@ENGINES
@pytest.mark.parametrize("devices", [1, 4])
def test_losses_of_training_are_those_of_evaluation(engine: str, devices: int) -> None:
    plan, weights = sharded(engine, devices)
    metrics = make_eval_step(plan, pair)(weights, batch())
    np.testing.assert_allclose(metrics["loss"], quotient(parameters(), batch()), rtol=2e-6)
    assert metrics["weight"] == batch()["mask"].sum()
    state = init_state(plan, weights, optax.sgd(0.1))
    metrics = make_eval_step(plan, with_statistics, has_aux=True)(state, batch())
    loss, aux = with_statistics(parameters(), batch())
    np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-6)
    assert metrics["aux"]["hits"] == aux["hits"]
    # The state is as it was.
    make_train_step(plan, pair, optax.sgd(0.1))(state, batch())


@pytest.mark.each_value
@ENGINES
@pytest.mark.parametrize("rows", [8, 6, 1])
def test_rows_come_back_in_order_whatever_their_number(engine: str, rows: int) -> None:
    plan, state = state_of(engine)

    def logits(model: Any, tokens: jax.Array) -> Any:
        model.eval()
        return {"logits": model(tokens), "length": jnp.full(len(tokens), tokens.shape[1])}

    outputs = make_eval_step(plan, logits)(state, prompts(rows))
    expected = logits(model(), prompts(rows))
    assert outputs["length"].tolist() == [3] * rows
    np.testing.assert_allclose(outputs["logits"], expected["logits"], rtol=2e-6, atol=1e-6)


@pytest.mark.fast_cases("shard_map")
@ENGINES
def test_sampling_in_a_loop_inside_and_around_of_a_step(engine: str) -> None:
    plan, state = state_of(engine)
    expected = greedy(model(), prompts())
    np.testing.assert_array_equal(make_eval_step(plan, greedy)(state, prompts()), expected)

    def last(model: Any, tokens: jax.Array, at: jax.Array) -> jax.Array:
        model.eval()
        return jax.lax.dynamic_index_in_dim(model(tokens), at, axis=1, keepdims=False)

    step = make_eval_step(plan, last)
    tokens = np.pad(prompts(), ((0, 0), (0, 4)))
    for position in range(3, 7):
        tokens[:, position] = np.asarray(step(state, tokens, position - 1)).argmax(-1)
    np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float64])
def test_a_loader_may_fill_its_buffer_anew(dtype: Any) -> None:
    plan, weights = sharded("shard_map", 4)
    double = make_eval_step(plan, lambda tree, rows: 2 * rows)
    buffer = np.zeros((8, 3), dtype)
    for number in range(4):
        buffer[...] = number
        np.testing.assert_array_equal(double(weights, buffer), 2 * buffer)


@pytest.mark.fast_cases("shard_map")
@ENGINES
def test_evaluation_changes_no_statistics_and_is_a_part_of_other_programs(engine: str) -> None:
    plan, state = state_of(engine)

    def loss(model: Any, tokens: jax.Array) -> jax.Array:
        return jnp.mean(model(tokens) ** 2)

    evaluate = make_eval_step(plan, loss, mutable=False)
    before = jax.tree.map(np.asarray, jax.random.key_data(state.variables["layers/0/dropout/rngs/key"]))
    first = evaluate(state, prompts())
    again = jax.jit(evaluate)(state, prompts())
    np.testing.assert_allclose(first["loss"], again["loss"], rtol=1e-6)
    np.testing.assert_array_equal(before, jax.random.key_data(state.variables["layers/0/dropout/rngs/key"]))
    np.testing.assert_allclose(
        state.variables["layers/0/norm/mean"], np.linspace(-0.1, 0.1, WIDTH), rtol=1e-6
    )
    shapes = jax.ShapeDtypeStruct((8, 3), jnp.int32)
    compiled = evaluate.lower(abstract_state(plan, optax.sgd(0.1)), shapes).compile()
    assert compiled.memory_analysis() is not None


def test_units_are_gathered_and_nothing_else_is_sent() -> None:
    plan, state = state_of("shard_map")
    evaluate = make_eval_step(plan, lambda model, tokens: model(tokens), mutable=False)
    counted = count_collectives(lambda state: evaluate(state, prompts()), state)
    assert {collective.kind for collective in counted} == {"all_gather"}
    assert sum(counted.values()) == len(plan.units)


@pytest.mark.each_value
@ENGINES
@pytest.mark.parametrize("rows", [None, 16])
def test_a_last_batch_is_filled_with_rows_that_do_not_count(engine: str, rows: int | None) -> None:
    plan, weights = sharded(engine, 4)
    short = jax.tree.map(lambda x: x[:6], batch())
    filled, counted = pad_batch(plan, short, microbatches=2, rows=rows)
    assert counted.tolist() == [1.0] * 6 + [0.0] * ((rows or 8) - 6)

    def loss(tree: Any, padded: Any) -> Any:
        rows, counted = padded
        weight = rows["mask"] * counted[:, None]
        return jnp.sum(token_losses(tree, rows) * weight), jnp.sum(weight)

    step = make_train_step(plan, loss, optax.sgd(1.0), microbatches=2)
    sharded_loss, gradients = step.gradients(weights, (filled, counted))
    expected, reference = jax.value_and_grad(quotient)(parameters(), short)
    np.testing.assert_allclose(sharded_loss, expected, rtol=2e-6)
    assert_close(unshard(plan, gradients), reference)


@ENGINES
def test_a_loss_of_rows_that_do_not_divide_is_refused_before_it_runs(engine: str) -> None:
    plan, weights = sharded(engine, 4)
    ran: list[float] = []

    def loss(tree: Any, rows: Any) -> jax.Array:
        value = jnp.mean(token_losses(tree, rows))
        jax.debug.callback(lambda x: ran.append(float(x)), value)
        return value

    evaluate = make_eval_step(plan, loss)
    for _ in range(2):
        with pytest.raises(ValueError, match="batch: expected a multiple of 4 rows for a loss, got 15"):
            evaluate(weights, {key: value[:15] for key, value in batch().items()})
        jax.effects_barrier()
        assert not ran
    evaluate(weights, batch())
    jax.effects_barrier()
    assert ran


@pytest.mark.fast_cases("2-pjit", "1-shard_map")
@ENGINES
@pytest.mark.parametrize("microbatches", [1, 2])
def test_inputs_that_are_no_rows_are_the_same_for_all_devices_and_parts(
    engine: str, microbatches: int
) -> None:
    teacher = jax.tree.map(lambda x: x + 0.1, parameters())
    key = jax.random.key(3)

    def loss(tree: Any, rows: Any, key: jax.Array, number: Any, teacher: Any) -> jax.Array:
        target = (jnp.tanh(rows["x"] @ teacher["layers"][0]["w"]) @ teacher["head"])[..., 0]
        noise = jax.random.normal(key, (rows["x"].shape[1],)) * number
        own = jax.vmap(jax.random.normal)(rows["keys"])
        return jnp.mean(token_losses(tree, {**rows, "y": target + noise + own[:, None]}))

    plan, weights = sharded(engine, 4)
    rows = {**batch(), "keys": jax.random.split(jax.random.key(4), 16)}
    optimizer = optax.sgd(0.1)
    step = make_train_step(plan, loss, optimizer, microbatches=microbatches)
    expected_loss, expected = jax.value_and_grad(loss)(parameters(), rows, key, 2, teacher)
    sharded_loss, reduced = step.gradients(weights, rows, shared=(key, 2, teacher))
    np.testing.assert_allclose(sharded_loss, expected_loss, rtol=2e-6)
    assert_close(unshard(plan, reduced), expected)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (rows, key, jnp.int32(2), teacher)
    )
    step.lower(abstract_state(plan, optimizer), *shapes)
    state, metrics = step(init_state(plan, weights, optimizer), rows, key, 2, teacher)
    np.testing.assert_allclose(metrics["loss"], expected_loss, rtol=2e-6)
    other = make_eval_step(plan, loss)(state, rows, key, np.float32(2), teacher)
    after = jax.tree.map(lambda w, g: w - 0.1 * g, parameters(), expected)
    np.testing.assert_allclose(other["loss"], loss(after, rows, key, 2, teacher), rtol=1e-5)


@ENGINES
def test_a_table_that_happens_to_have_as_many_rows_as_the_batch_is_refused(engine: str) -> None:
    plan, state = state_of(engine)
    # What each call of fn sees: 8 rows, and 8 features.
    tokens = prompts(WIDTH * (4 if engine == "shard_map" else 1))

    def features(model: Any, tokens: jax.Array) -> Any:
        return {"logits": model(tokens), "mean": jnp.mean(model.embed(tokens), (0, 1))}

    message = r"first dimension is the rows \(any number of them\) .* got shapes {\"\['mean'\]\": \(8,\)}: .*has_aux"
    with pytest.raises(ValueError, match=message):
        make_eval_step(plan, features, mutable=False)(state, tokens)

    def for_so_many(model: Any, tokens: jax.Array) -> jax.Array:
        if len(tokens) != WIDTH:
            raise ValueError("expected 8 rows")
        return model(tokens)

    made = make_eval_step(plan, for_so_many, mutable=False)(state, tokens)
    assert made.shape == (len(tokens), 3, VOCABULARY)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda plan, w: make_eval_step(plan, lambda t, r: t["head"])(w, batch()), r"4 rows .* shapes {'': \(8, 1\)}"),
        (lambda plan, w: make_eval_step(plan, lambda t, r: token_losses(t, r).sum(1))("w", batch()), "TrainState"),
        (lambda plan, w: make_eval_step(plan, pair)(w, jax.tree.map(lambda x: x[:6], batch())), "pad_batch"),
        (lambda plan, w: make_eval_step(plan, quotient)(w, batch()), "got a quotient by a sum"),
        (lambda plan, w: make_eval_step(plan, lambda t, r: t["layers"][0]["w"])(w, batch()), "a parameter of a unit"),
        (lambda plan, w: make_eval_step(plan, pair)(w, {"x": np.ones((4, 2)), "y": 1}), "first dimension"),
        (lambda plan, w: make_eval_step(plan, pair)(w, batch(), "train"), "after the batch: .* got str"),
        (lambda plan, w: pad_batch(plan, batch(), rows=18), "rows: expected a multiple of 4"),
        (lambda plan, w: pad_batch(plan, batch(), rows=8), "at least the batch's 16"),
        (lambda plan, w: pad_batch(plan, {"a": np.ones(3), "b": np.ones(4)}), "one first dimension"),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused_in_words(act: Any, message: str) -> None:
    plan, weights = sharded("shard_map", 4)
    with pytest.raises((ValueError, TypeError), match=message):
        act(plan, weights)


@pytest.mark.fast_cases("copies-shard_map", "prefetch-pjit")
@ENGINES
@pytest.mark.parametrize("options", [{"strategy": "no_shard"}, {"prefetch": 1}], ids=["copies", "prefetch"])
def test_weights_have_the_derivative_of_training(engine: str, options: dict[str, Any]) -> None:
    options = {"units": ["layers/*"], "frozen": ["layers/0/bias"], "engine": engine, **options}
    net = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)), nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(1)))
    plan, weights = fully_shard(net, data_parallel_mesh(4), **options)
    rows = np.random.default_rng(0).standard_normal((8, WIDTH)).astype(np.float32)

    def loss(model: Any, x: jax.Array, scale: Any) -> jax.Array:
        return jnp.mean((scale * model(x)) ** 2)

    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    state = init_state(plan, weights, optimizer)
    step, evaluate = make_train_step(plan, loss, optimizer, donate=False), make_eval_step(plan, loss)
    _, expected = step.gradients(weights, rows, {}, (0.7,))
    derivative = jax.grad(lambda weights: evaluate(weights, rows, 0.7)["loss"])(weights)
    shown = make_eval_step(plan, lambda *of: (jnp.float32(0), loss(*of)), has_aux=True)
    of_aux = jax.grad(lambda weights: shown(weights, rows, 0.7)["aux"])(weights)
    for key, array in derivative.items():
        np.testing.assert_allclose(array, expected.get(key, 0), rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(of_aux[key], array, rtol=1e-5, atol=1e-8)

    @jax.jit
    def later(rate: Any) -> jax.Array:
        injected = state.opt_state._replace(
            hyperparams={**state.opt_state.hyperparams, "learning_rate": rate}
        )
        after, _ = step(replace(state, opt_state=injected), rows, 0.7)
        return evaluate(after, rows, 2.0)["loss"]

    # The loss is nearly quadratic in the rate.
    difference = (later(0.11) - later(0.09)) / 0.02
    np.testing.assert_allclose(jax.grad(later)(0.1), difference, rtol=1e-3)


MESHES = [
    ({"dp": 4}, ["no_shard", "optim", "optim_grads", "optim_grads_params"]),
    ({"dp": 2, "tp": 2}, ["no_shard", "optim", "optim_grads", "optim_grads_params"]),
    ({"outer": 2, "dp": 2}, ["no_shard", "optim", "optim_grads", "optim_grads_params", "hsdp", "hfsdp"]),
]


@pytest.mark.slow
@ENGINES
@pytest.mark.parametrize(("sizes", "strategy"), [(sizes, s) for sizes, names in MESHES for s in names])
def test_weights_have_the_derivative_of_training_on_every_mesh(
    engine: str, sizes: dict[str, int], strategy: str
) -> None:
    """Of a loss with weights, and of the values of each row, in float64."""
    with jax.enable_x64(True):
        options: dict[str, Any] = {"param_dtype": jnp.float64, "dtype": jnp.float64}
        net = nnx.Sequential(
            nnx.Linear(6, 10, rngs=nnx.Rngs(0), **options), nnx.Linear(10, 6, rngs=nnx.Rngs(1), **options)
        )
        parallel: Any = {"layers/0": "colwise", "layers/1": "rowwise"} if "tp" in sizes else None
        plan, weights = fully_shard(
            net,
            data_parallel_mesh(sizes),
            units=["layers/*"],
            strategy=strategy,
            engine=engine,
            parallel=parallel,
        )
        random = np.random.default_rng(0)
        rows = {"x": random.standard_normal((8, 6)), "weight": random.random(8)}

        def total(by_row: Any) -> Any:
            return (((by_row - rows["x"]) ** 2).sum(-1) * rows["weight"]).sum() / rows["weight"].sum()

        def loss(model: Any, rows: Any) -> Any:
            errors = ((model(rows["x"]) - rows["x"]) ** 2).sum(-1)
            return (errors * rows["weight"]).sum(), rows["weight"].sum()

        def with_aux(model: Any, rows: Any) -> Any:
            value, weight = loss(model, rows)
            return (0 * value, weight), {"error": value / weight}

        _, expected = make_train_step(plan, loss, optax.sgd(0.1)).gradients(weights, rows)
        evaluate, values = (
            make_eval_step(plan, loss),
            make_eval_step(plan, lambda model, rows: model(rows["x"])),
        )
        of_loss = jax.grad(lambda weights: evaluate(weights, rows)["loss"])(weights)
        of_rows = jax.jit(jax.grad(lambda weights: total(values(weights, rows))))(weights)
        shown = make_eval_step(plan, with_aux, has_aux=True)
        of_aux = jax.grad(lambda weights: shown(weights, rows)["aux"]["error"])(weights)
        for key, gradient in expected.items():
            for derivative in (of_loss, of_rows, of_aux):
                np.testing.assert_allclose(derivative[key], gradient, rtol=0, atol=1e-12)
