"""Variables that a model changes: one value from several devices', and state that an evaluation gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import jax_impl
from jax_impl import data_parallel_mesh, fully_shard, init_state, make_eval_step, make_train_step, unshard

ENGINES = ("shard_map", "pjit")
WIDTH = 4


class Largest(nnx.Variable[jax.Array]):
    """A type of a user's own."""


class Codebook(nnx.Module):
    """A model with variables of its own, of which ``change`` changes some."""

    def __init__(self, rngs: nnx.Rngs, change: Any) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.counts = nnx.Variable(jnp.ones(3))
        self.largest = Largest(jnp.zeros(WIDTH))
        self.average = nnx.Variable(jnp.zeros(WIDTH))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))
        self.flags = nnx.Variable(jnp.array([True, False]))
        self.change = change

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        self.change(self, x, jnp.argmax(x[:, :3], axis=-1))
        return x


def counted(model: Codebook, _: jax.Array, codes: jax.Array) -> None:
    model.counts[...] = model.counts[...] + jax.nn.one_hot(codes, 3).sum(0)
    model.calls[...] += 1


def counted_by_shape(model: Codebook, x: jax.Array, _: jax.Array) -> None:
    model.calls[...] += x.shape[0]


def counted_by_size(model: Codebook, x: jax.Array, _: jax.Array) -> None:
    model.calls[...] = model.calls[...] + jnp.ones(x.shape, jnp.int32).sum()


def counted_by_choice_of_a_shape(model: Codebook, x: jax.Array, _: jax.Array) -> None:
    calls = model.calls[...]
    model.calls[...] = lax.cond(model.flags[0], lambda: calls + len(x), lambda: calls)


def counted_on_all_devices(model: Codebook, x: jax.Array, _: jax.Array) -> None:
    model.calls[...] += lax.psum(jnp.sum(jnp.ones_like(x[:, 0], jnp.int32)), "dp")
    model.average[...] = lax.psum(x.sum(0), "dp") / lax.psum(x.shape[0], "dp")


def scattered(model: Codebook, _: jax.Array, codes: jax.Array) -> None:
    model.counts[...] = model.counts[...].at[codes].add(1.0)


def decayed(model: Codebook, _: jax.Array, codes: jax.Array) -> None:
    model.counts[...] = 0.9 * model.counts[...] + 0.1 * jax.nn.one_hot(codes, 3).sum(0)


def decayed_everywhere(model: Codebook, _: jax.Array, codes: jax.Array) -> None:
    added = lax.psum(jax.nn.one_hot(codes, 3).sum(0), "dp")
    model.counts[...] = 0.9 * model.counts[...] + 0.1 * added


def counted_with_a_constant(model: Codebook, _: jax.Array, codes: jax.Array) -> None:
    model.counts[...] = model.counts[...] + jax.nn.one_hot(codes, 3).sum(0) + 1.0


def counted_up_to_a_limit(model: Codebook, _: jax.Array, codes: jax.Array) -> None:
    before = model.counts[...]
    model.counts[...] = jnp.where(before < 2, before + jax.nn.one_hot(codes, 3).sum(0), before)


def kept_from_the_pass_before(model: Codebook, x: jax.Array, _: jax.Array) -> None:
    zeros = jnp.zeros(WIDTH)
    model.average[...] = lax.scan(lambda carry, row: ((row, carry[0]), None), (zeros, zeros), x)[0][1]


def counted_by_choice(model: Codebook, x: jax.Array, _: jax.Array) -> None:
    calls = model.calls[...]
    model.calls[...] = lax.cond(x[0, 0] > 0, lambda: calls + 1, lambda: calls)


def largest(model: Codebook, x: jax.Array, _: jax.Array) -> None:
    model.largest[...] = jnp.maximum(0.5 * model.largest[...], jnp.abs(x).max(0))


def averaged(model: Codebook, x: jax.Array, _: jax.Array) -> None:
    model.average[...] = 0.9 * model.average[...] + 0.1 * x.mean(0)


def counted_alone(model: Codebook, x: jax.Array, _: jax.Array) -> None:
    model.calls[...] += len(x)
    model.average[...] = x.mean(0)


# What the sums over devices are on one.
ALONE = {decayed_everywhere: decayed, counted_on_all_devices: counted_alone}


def rows() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((8, WIDTH)).astype(np.float32) * np.arange(1, 9)[:, None]


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - 1) ** 2)


def one_step(change: Any, rules: Any, engine: str, microbatches: int = 1) -> dict[str, np.ndarray]:
    plan, weights = fully_shard(
        Codebook(nnx.Rngs(0), change), data_parallel_mesh(4), engine=engine, variables=rules
    )
    optimizer = optax.sgd(0.1)
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer, microbatches=microbatches)
    state, _ = step(state, rows())
    return {path: np.asarray(value) for path, value in state.variables.items()}


@pytest.mark.fast_cases(
    "counted-rules0-shard_map",
    "counted_on_all_devices-rules3-shard_map",
    "largest-rules4-shard_map",
    "averaged-rules5-shard_map",
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (counted, {"counts": "sum"}),
        (scattered, {"cou*": "sum"}),
        (decayed_everywhere, {}),
        (counted_on_all_devices, {}),
        (largest, {Largest: "max"}),
        (averaged, {"*": "max", "average": "mean"}),
    ],
)
def test_variables_are_those_of_the_unsharded_model(change: Any, rules: Any, engine: str) -> None:
    if change in ALONE and engine == "pjit":
        pytest.skip("has no axis to sum over, and no need to")
    variables = one_step(change, rules, engine)
    model = Codebook(nnx.Rngs(0), ALONE.get(change, change))
    model(jnp.asarray(rows()))
    for path, value in variables.items():
        np.testing.assert_allclose(value, getattr(model, path)[...], rtol=1e-6, err_msg=path)


class Spectral(nnx.Module):
    """Units whose variables lie in dictionaries, and that replace their parameters, which flax's SpectralNorm does."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        linears = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))
        self.layers = nnx.List([nnx.SpectralNorm(linear, rngs=rngs) for linear in linears])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x, update_stats=True))
        return x


@pytest.mark.parametrize("engine", ENGINES)
def test_variables_in_dictionaries_of_units_are_those_of_the_unsharded_model(engine: str) -> None:
    model, optimizer = Spectral(nnx.Rngs(0)), optax.sgd(0.5)
    plan, weights = fully_shard(Spectral(nnx.Rngs(0)), data_parallel_mesh(4), engine=engine)
    state, step = init_state(plan, weights, optimizer), make_train_step(plan, loss, optimizer)
    plain = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
    for _ in range(3):
        graphdef, parameters, rest = nnx.split(model, nnx.Param, ...)

        def of(parameters: Any) -> Any:
            merged = nnx.merge(graphdef, parameters, rest, copy=True)  # noqa: B023  # called in this pass only
            return loss(merged, jnp.asarray(rows())), nnx.state(merged, nnx.Not(nnx.Param))

        (expected, changed), gradients = jax.value_and_grad(of, has_aux=True)(parameters)
        plain.update(model, gradients)
        nnx.update(model, changed)
        state, metrics = step(state, rows())
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    statistics = {path: value for path, value in state.variables.items() if "batch_stats" in path}
    assert len(statistics) == 4
    for path, value in nnx.to_flat_state(nnx.state(model, nnx.BatchStat)):
        np.testing.assert_allclose(statistics["/".join(map(str, path))], value[...], rtol=1e-4, atol=1e-5)


class Prefix(nnx.Module):
    """Attention to a cache that all rows of a batch share."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(6, 6, rngs=rngs)
        self.prefix = nnx.Cache(jnp.linspace(0.0, 1.0, 48).reshape(8, 6))

    def __call__(self, x: jax.Array, look: bool = True) -> jax.Array:
        y = self.up(x)
        return y + jax.nn.softmax(y @ self.prefix[...].T) @ self.prefix[...] if look else y


def test_a_cache_without_rows_of_the_batch_is_not_cut_silently() -> None:
    model, batch = Prefix(nnx.Rngs(0)), np.linspace(-1, 1, 32 * 6, dtype=np.float32).reshape(32, 6)

    def state(rules: Any, engine: str = "shard_map") -> Any:
        plan, weights = jax_impl.fully_shard(
            model, data_parallel_mesh(4), units=[], variables=rules, engine=engine
        )
        return plan, jax_impl.init_state(plan, weights, optax.sgd(0.1))

    def loss(model: Any, rows: jax.Array) -> jax.Array:
        return jnp.mean(model(rows) ** 2)

    plan, made = state({})
    message = r"variable 'prefix' \(Cache\): rule 'rows'.* 32 rows of the batch, got shape \(8, 6\).*'max'"
    with pytest.raises(ValueError, match=message):
        jax_impl.make_eval_step(plan, lambda model, rows: model(rows))(made, batch)
    with pytest.raises(ValueError, match=message):
        jax_impl.make_train_step(plan, loss, optax.sgd(0.1), donate=False)(made, batch)
    # What no result depends on may have any rows, as a decode cache has in training.
    outputs = jax_impl.make_eval_step(plan, lambda model, rows: model(rows, look=False))(made, batch)
    np.testing.assert_allclose(outputs, model(jnp.asarray(batch), look=False), rtol=1e-5, atol=1e-6)
    for plan, made in (state({"prefix": "max"}), state({}, "pjit")):
        outputs = jax_impl.make_eval_step(plan, lambda model, rows: model(rows))(made, batch)
        np.testing.assert_allclose(outputs, model(jnp.asarray(batch)), rtol=1e-5, atol=1e-6)


class TimeFirst(nnx.Module):
    """A decode cache whose rows are its second dimension."""

    def __init__(self, rngs: nnx.Rngs, tokens: int) -> None:
        self.up, self.index = nnx.Linear(6, 6, rngs=rngs), nnx.Cache(jnp.zeros((), jnp.int32))
        self.seen = nnx.Cache(jnp.zeros((tokens, 8, 6)))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.seen[...] = self.seen[...].at[self.index[...]].set(self.up(x))
        self.index[...] += 1
        return self.seen[...].sum(0)


@pytest.mark.parametrize("tokens", [5, 8])
def test_caches_whose_rows_lie_elsewhere_are_refused_in_words_or_followed(tokens: int) -> None:
    x = jnp.linspace(-1, 1, 48).reshape(8, 6)
    for engine in ENGINES:
        plan, weights = fully_shard(
            TimeFirst(nnx.Rngs(0), tokens), data_parallel_mesh(4), units=[], engine=engine
        )
        state = init_state(plan, weights, optax.sgd(0.1))
        decode = make_eval_step(plan, lambda model, x: model(x), mutable=True)
        if engine == "pjit":
            np.testing.assert_allclose(decode(state, x)[0], TimeFirst(nnx.Rngs(0), tokens)(x), rtol=1e-5)
            continue
        with pytest.raises(ValueError, match=r"\['index', 'seen'\] \(Cache\): expected rows .*engine='pjit'"):
            decode(state, x)


def test_sums_go_over_microbatches_too() -> None:
    model = Codebook(nnx.Rngs(0), counted)
    model(jnp.asarray(rows()))
    variables = one_step(counted, {"counts": "sum"}, "shard_map", microbatches=2)
    np.testing.assert_array_equal(variables["counts"], model.counts[...])
    assert variables["calls"] == 2


@pytest.mark.parametrize(
    ("change", "rules", "message"),
    [
        (counted, {}, r"variable 'counts' \(Variable\): expected the same value on all devices, or a rule"),
        (counted_by_choice, {}, r"variable 'calls' \(Variable\): expected the same value on all devices"),
        (largest, {}, r"variable 'largest' \(Largest\)"),
        (decayed, {"counts": "sum"}, r"'sum': expected the old value plus an increment.*psum\(batch_counts"),
        (counted_with_a_constant, {"counts": "sum"}, "rule 'sum': expected the old value plus an increment"),
        (kept_from_the_pass_before, {}, r"variable 'average' \(Variable\): expected the same value"),
        (counted_up_to_a_limit, {"counts": "sum"}, "rule 'sum': expected the old value plus an increment"),
        (counted, {"calls": "sum", "counts": "sum"}, "variable 'calls': rule 'sum'"),
    ],
)
def test_what_no_rule_makes_one_value_of_is_refused(change: Any, rules: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_step(change, rules, "shard_map")


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (
            {"counts": "average"},
            ValueError,
            "expected one of mean, sum, max, rows for 'counts', got 'average'",
        ),
        ({"count": "sum"}, ValueError, r"'count' matches none of \['average', 'calls'"),
        ({"calls": "mean"}, ValueError, "rule 'mean': expected a floating-point variable, got int32"),
        ({"flags": "sum"}, ValueError, "rule 'sum': expected a variable of numbers, got bool"),
        ({"counts": "rows"}, ValueError, r"that 4 devices divide, got shape \(3,\)"),
        ({3: "sum"}, TypeError, "expected patterns of paths or types of nnx variables, got 3"),
    ],
)
def test_wrong_rules_are_refused(rules: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        jax_impl.plan_sharding(Codebook(nnx.Rngs(0), counted), data_parallel_mesh(4), variables=rules)


class Writer(nnx.Module):
    """Attention over what came before, one token a call, with flax's own cache."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.blocks = nnx.List(
            [nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=True, rngs=rngs) for _ in range(2)]
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.embed.attend(x)


def writer(batch: int) -> Writer:
    model = Writer(nnx.Rngs(0))
    for block in model.blocks:
        block.init_cache((batch, 4, 8))
    return model


def last(model: Any, tokens: jax.Array) -> jax.Array:
    return model(tokens)[:, -1]


@pytest.mark.fast_cases("shard_map")
@pytest.mark.filterwarnings("ignore:pjit engine")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_decode_cache_works_token_by_token(engine: str) -> None:
    model = writer(8)
    plan, weights = fully_shard(model, data_parallel_mesh(4), engine=engine)
    state = init_state(plan, weights, optax.sgd(0.1))
    decode = make_eval_step(plan, last, mutable=True)
    tokens = jnp.arange(8)[:, None]
    for _ in range(3):
        logits, state = decode(state, tokens)
        expected = last(model, tokens)
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
        tokens = expected.argmax(-1)[:, None]
    cache = state.variables["blocks/0/cached_key"]
    assert cache.sharding.shard_shape(cache.shape)[0] == 2
    assert state.variables["blocks/0/cache_index"] == 3
    again = plan.merge(unshard(plan, state))
    np.testing.assert_allclose(again.blocks[0].cached_key[...], model.blocks[0].cached_key[...], atol=1e-6)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=True, rngs=rngs)
        self.attention.init_cache((8, 4, 8))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.attention(x)


class StackedWriter(nnx.Module):
    """The same with layers that are scanned, so that rows of the cache are its second dimension."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.layers = nnx.vmap(Layer, in_axes=(0,), out_axes=0)(rngs.fork(split=3))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: Layer, x: jax.Array) -> jax.Array:
            return layer(x)

        return self.embed.attend(run(self.layers, self.embed(tokens)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:pjit engine")
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_stacks_cache_works_and_is_saved(engine: str, prefetch: int, tmp_path: Path) -> None:
    model = StackedWriter(nnx.Rngs(0))
    options: Any = {"units": ["layers/*"], "stacked": ["layers"], "engine": engine, "prefetch": prefetch}
    plan, weights = fully_shard(model, data_parallel_mesh(4), **options)
    state = init_state(plan, weights, optax.sgd(0.1))
    decode = make_eval_step(plan, last, mutable=True)
    tokens = jnp.arange(8)[:, None]
    for _ in range(2):
        logits, state = decode(state, tokens)
        np.testing.assert_allclose(logits, last(model, tokens), rtol=1e-5, atol=1e-6)
        tokens = (tokens * 5 + 3) % 11
    jax_impl.save_checkpoint(tmp_path / "saved", plan, state, {})
    loaded = jax_impl.load_checkpoint(tmp_path / "saved", plan, optax.sgd(0.1)).state
    key = "layers/attention/cached_key"
    np.testing.assert_array_equal(loaded.variables[key], state.variables[key])
    assert loaded.variables[key].sharding.spec == PartitionSpec(None, "dp")


class Normed(nnx.Module):
    """Batch statistics, dropout and a counter."""

    def __init__(self, rngs: nnx.Rngs, counts: bool = False) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls, self.counts = nnx.Variable(jnp.zeros((), jnp.int32)), counts

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.dropout(layer(x))
        if self.counts:
            self.calls[...] += 1
        return self.norm(x)


@pytest.mark.fast_cases("True-True-shard_map", "True-False-shard_map")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("counts", [True, False])
def test_an_evaluation_that_changes_state_is_refused_by_name(engine: str, trains: bool, counts: bool) -> None:
    plan, weights = fully_shard(Normed(nnx.Rngs(0), counts), data_parallel_mesh(2), engine=engine)
    state = init_state(plan, weights, optax.sgd(0.1))

    def run(model: Any, x: jax.Array) -> jax.Array:
        model.norm.use_running_average = not trains
        return model(x)

    if not (trains or counts):
        # Random streams are drawn from, which is no change that a later call must know of.
        make_eval_step(plan, run)(state, rows())
        return
    changed = ["calls"] * counts + ["norm/mean", "norm/var"] * trains
    with pytest.raises(ValueError, match=rf"changes \[{', '.join(map(repr, changed))}\].*mutable=True"):
        make_eval_step(plan, run)(state, rows())
    dropped = make_eval_step(plan, run, mutable=False)(state, rows())
    kept, after = make_eval_step(plan, run, mutable=True)(state, rows())
    np.testing.assert_allclose(dropped, kept, rtol=1e-6)
    assert after.variables["calls"] == counts
    assert bool(np.any(after.variables["norm/mean"])) == trains
    assert state.variables["calls"] == 0


@pytest.mark.parametrize("change", [counted_by_shape, counted_by_size, counted_by_choice_of_a_shape])
def test_counts_of_one_devices_rows_are_refused_where_devices_see_their_own(change: Any) -> None:
    with pytest.raises(
        ValueError, match=r"variable 'calls'.* got a change that depends on the number of rows of"
    ):
        one_step(change, {}, "shard_map")
    plan, weights = fully_shard(Codebook(nnx.Rngs(0), change), data_parallel_mesh(4))
    state = init_state(plan, weights, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"variable 'calls'.*is x\.shape\[0\] inside a step: count the rows"):
        make_eval_step(plan, lambda model, x: model(x), mutable=True)(state, rows())
    alone = Codebook(nnx.Rngs(0), change)
    alone(jnp.asarray(rows()))
    assert one_step(change, {}, "pjit")["calls"] == alone.calls[...]


class Scanned(nnx.Module):
    """A stack whose layers have statistics, in evaluation."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs: nnx.Rngs) -> nnx.Module:
            return nnx.Sequential(nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs))

        self.layers = layers(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: nnx.Module, x: jax.Array) -> jax.Array:
            return jnp.tanh(layer(x))

        return run(self.layers, x)


def test_scanned_layers_are_refused_where_they_change_their_statistics_alone() -> None:
    """In loops that are written anew to gather ahead, too."""
    model = Scanned(nnx.Rngs(0))
    model.eval()
    plan, weights = fully_shard(
        model, data_parallel_mesh(2), units=["layers/*"], stacked=["layers"], prefetch=1
    )
    state = init_state(plan, weights, optax.sgd(0.1))
    outputs = make_eval_step(plan, lambda model, x: model(x))(state, rows())
    np.testing.assert_allclose(outputs, model(jnp.asarray(rows())), rtol=1e-5, atol=1e-6)
    model.train()
    plan, weights = fully_shard(
        model, data_parallel_mesh(2), units=["layers/*"], stacked=["layers"], prefetch=1
    )
    state = init_state(plan, weights, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"changes none of its variables, .*layers/1/mean"):
        make_eval_step(plan, lambda model, x: model(x))(state, rows())


def test_rows_that_fill_up_a_batch_may_change_no_state() -> None:
    plan, weights = fully_shard(Normed(nnx.Rngs(0), True), data_parallel_mesh(4))
    state = init_state(plan, weights, optax.sgd(0.1))
    with pytest.raises(ValueError, match="expected a multiple of 4 rows for mutable=True, got 6"):
        make_eval_step(plan, lambda model, x: model(x), mutable=True)(state, rows()[:6])
