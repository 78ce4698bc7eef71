import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_impl import (
    abstract_state,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_train_step,
    save_checkpoint,
    shard_batch,
    unshard,
)
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from tests.support.jax_impl.checkpoint_runs import whole_buffer
from tests.support.jax_impl.tiny import decoder, loss, named, tokens
from tests.support.jax_impl.zoo import Weighted

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def gradients_of(model, loss_fn, batch, *, devices=2, microbatches=1, **keywords):
    """Sharded loss and gradients, and those of the plain model on the whole batch, as ``{path: value}``."""
    plan, weights = fully_shard(model, data_parallel_mesh(devices), **keywords)
    step = make_train_step(plan, loss_fn, optax.sgd(1.0), microbatches=microbatches)
    value, buffers = step.gradients(weights, batch)
    graphdef, state = nnx.split(model)
    plain, reference = jax.jit(jax.value_and_grad(lambda s: loss_fn(nnx.merge(graphdef, s), batch)))(state)
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    return unshard(plan, buffers), named(reference)


def assert_close(arrays, expected):
    assert list(arrays) == list(expected)
    for path, value in expected.items():
        scale = np.abs(value).max(initial=0)
        np.testing.assert_allclose(arrays[path], value, rtol=1e-4, atol=2e-6 * scale + 1e-12, err_msg=path)


class Shared(nnx.Module):
    """Calls one unit twice, passes it flags and trees, and has an unused unit and empty and scalar parameters."""

    def __init__(self, rngs):
        self.cell = Cell(rngs)
        self.unused = nnx.Linear(3, 5, rngs=rngs)
        self.temperature = nnx.Param(jnp.float32(1.5))
        self.nothing = nnx.Param(jnp.zeros((0, 4)))

    def __call__(self, x):
        state = {"value": x, "count": jnp.arange(x.shape[0])}
        state = self.cell(state, flip=False)
        state = self.cell(state, flip=True, name="again")
        return state["value"] * self.temperature[...] + self.nothing[...].sum()


class Cell(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 3, rngs=rngs)
        self.gain = nnx.Param(jnp.array([0.5, -1.5, 2.0]))

    def __call__(self, state, *, flip, name=None):
        assert isinstance(flip, bool)
        x = jnp.tanh(self.inner(state["value"])) * self.gain[...]
        return {"value": -x if flip else x, "count": state["count"] + 1}


def mean_square(model, rows):
    return jnp.mean(model(rows) ** 2)


def rows(count):
    return np.random.default_rng(3).normal(size=(count, 3)).astype(np.float32)


@pytest.mark.fast_cases("optim_grads_params")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_may_be_nested_reused_unused_and_called_with_flags_and_trees(strategy):
    keywords = {"strategy": strategy, "units": ["cell", "cell/inner", "unused"]}
    gradients, expected = gradients_of(
        Shared(nnx.Rngs(0)), mean_square, rows(12), devices=3, microbatches=2, **keywords
    )
    assert_close(gradients, expected)
    assert not np.any(gradients["unused/kernel"])
    assert np.any(gradients["cell/inner/kernel"])


@pytest.mark.parametrize(
    "strategy", [*(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES[:-1]), STRATEGIES[-1]]
)
def test_a_root_that_owns_nothing_and_more_devices_than_rows_work(strategy):
    model = decoder()
    units = ["embed", "layers/*", "norm", "lm_head"]
    plan, _ = fully_shard(model, data_parallel_mesh(8), strategy=strategy, units=units)
    assert plan.units[""].module.parameters == ()
    gradients, expected = gradients_of(model, loss, tokens(8), devices=8, strategy=strategy, units=units)
    assert_close(gradients, expected)


def test_a_model_without_inner_units_is_one_unit():
    gradients, expected = gradients_of(decoder(), loss, tokens(4), units=[])
    assert_close(gradients, expected)


def test_any_optax_transformation_can_be_the_optimizer():
    model, batch = decoder(), tokens(4)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
    plan, weights = fully_shard(model, data_parallel_mesh(4))
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer)
    graphdef, expected = nnx.split(model)
    opt_state = jax.jit(optimizer.init)(expected)

    @jax.jit
    def plain(weights, opt_state):
        gradients = jax.grad(lambda s: loss(nnx.merge(graphdef, s), batch))(weights)
        updates, opt_state = optimizer.update(gradients, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state

    for _ in range(3):
        state, _ = step(state, batch)
        expected, opt_state = plain(expected, opt_state)
    trained = unshard(plan, state.weights)
    for path, value in named(expected).items():
        np.testing.assert_allclose(trained[path], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_means_over_ranks_are_divided_not_multiplied_by_a_rounded_reciprocal(strategy):
    plan, weights = fully_shard(
        Weighted(np.ones(512, np.float32)), data_parallel_mesh(3), strategy=strategy, units=[]
    )
    batch = np.zeros((3, 512), np.float32)
    batch[0] = np.random.default_rng(0).normal(size=512)
    step = make_train_step(plan, lambda model, x: jnp.mean(model(x)), optax.sgd(1.0))
    _, gradients = step.gradients(weights, batch)
    np.testing.assert_array_equal(unshard(plan, gradients)["weight"], batch[0] / np.float32(3))


@pytest.mark.fast_cases("nested")
@pytest.mark.parametrize(
    "arrange",
    [jax.tree.leaves, lambda weights: {unit: {"momentum": buffer} for unit, buffer in weights.items()}],
    ids=["list", "nested"],
)
def test_moments_are_sharded_wherever_a_transformation_keeps_them(arrange):
    plan, weights = fully_shard(decoder(), data_parallel_mesh(4))
    optimizer = optax.GradientTransformation(
        lambda weights: arrange(jax.tree.map(jnp.zeros_like, weights)),
        lambda gradients, state, _: (gradients, arrange(gradients)),
    )
    state = init_state(plan, weights, optimizer)
    for _ in range(2):
        assert jax.tree.leaves(state.opt_state)
        assert all(leaf.sharding == plan.sharding("") for leaf in jax.tree.leaves(state.opt_state))
        state, _ = make_train_step(plan, loss, optimizer)(state, tokens(4))


def test_state_stays_sharded_as_it_was_and_padding_stays_zero():
    optimizer = main_weight_adamw(1e-2, weight_decay=0.1)
    plan, weights = fully_shard(decoder(), data_parallel_mesh(4))
    state = init_state(plan, weights, optimizer)
    before = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    step = make_train_step(plan, loss, optimizer)
    for _ in range(2):
        state, _ = step(state, tokens(4))
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state) == before
    for buffers in (state.weights, state.opt_state.mu, state.opt_state.nu):
        for unit, buffer in buffers.items():
            layout = plan.units[unit].layout
            padding = 0
            for index in range(len(layout.shard_sizes)):
                values = whole_buffer(layout, np.asarray(buffer), index)
                real = np.zeros(len(values), bool)
                for slot in layout.occupied(index):
                    real[slot.offset : slot.end] = True
                assert not np.any(values[~real])
                assert np.any(values[real])
                padding += np.count_nonzero(~real)
            assert padding == layout.padded_size - layout.numel


def test_the_state_given_to_a_step_is_donated_and_gradients_leave_it_alone():
    optimizer = main_weight_adamw(1e-2)
    plan, weights = fully_shard(decoder(), data_parallel_mesh(2))
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer)
    step.gradients(state.weights, tokens(2))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    step(state, tokens(2))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.weights, state.opt_state.mu)))


def test_a_donated_state_is_refused_rather_than_given_to_xla():
    optimizer = main_weight_adamw(1e-2)
    plan, weights = fully_shard(decoder(), data_parallel_mesh(2))
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, loss, optimizer)
    after, _ = step(state, tokens(2))
    message = r"array 'layers/0': expected values, got an array that was donated to an earlier step"
    with pytest.raises(ValueError, match=message):
        step.gradients(state.weights, tokens(2))
    with pytest.raises(ValueError, match=r"optimizer state .*mu\['.*'\]: expected values, got an array"):
        step(
            dataclasses.replace(after, opt_state=dataclasses.replace(state.opt_state, count=jnp.int32(1))),
            tokens(2),
        )
    step(after, tokens(2))


def test_rank_r_gets_the_rth_contiguous_part_of_the_batch():
    plan, _ = fully_shard(decoder(), data_parallel_mesh(3))
    batch = {"x": np.arange(12).reshape(6, 2), "y": np.arange(6.0)}
    placed = shard_batch(plan, batch)
    for name, array in placed.items():
        for shard in array.addressable_shards:
            rank = list(plan.mesh.devices.flat).index(shard.device)
            np.testing.assert_array_equal(shard.data, batch[name][2 * rank : 2 * rank + 2])


@pytest.mark.fast_cases("optim", "optim_grads_params")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_microbatch_k_is_the_kth_contiguous_part_of_the_ranks_rows(strategy):
    # Only a loss that is no mean over single rows can tell how rows were grouped.
    def grouped(model, x):
        return jnp.mean(model(x)) ** 2

    model, x = Shared(nnx.Rngs(0)), rows(12)
    plan, weights = fully_shard(model, data_parallel_mesh(2), strategy=strategy, units=["cell"])
    step = make_train_step(plan, grouped, optax.sgd(1.0), microbatches=3)
    value, _ = step.gradients(weights, x)
    expected = np.mean([grouped(model, x[i : i + 2]) for i in range(0, 12, 2)])
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "dimensions"),
    [
        (tokens(5), r"\[\(5,\)\]"),
        (tokens(0), r"\[\(0,\)\]"),
        ({"x": tokens(6), "y": tokens(12)}, r"\[\(6,\), \(12,\)\]"),
        (np.float32(1), r"\[\(\)\]"),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_with_what_is_expected(batch, dimensions):
    plan, _ = fully_shard(decoder(), data_parallel_mesh(2))
    message = rf"positive multiple of 6 \(2 devices x 3 microbatches\), got first dimensions {dimensions}"
    with pytest.raises(ValueError, match=message):
        shard_batch(plan, batch, 3)


def test_microbatches_below_one_are_refused():
    plan: ShardingPlan = fully_shard(decoder(), data_parallel_mesh(2))[0]
    with pytest.raises(ValueError, match="microbatches >= 1, got 0"):
        make_train_step(plan, loss, optax.sgd(1.0), microbatches=0)


@pytest.mark.fast_cases("shard_map")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_numbers_and_arrays_of_one_device_in_an_optimizers_state_are_placed(engine, tmp_path):
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.5)
    plan, weights = fully_shard(
        nnx.Linear(8, 8, rngs=nnx.Rngs(0)), data_parallel_mesh(4), units=[], engine=engine
    )
    step = make_train_step(plan, lambda model, x: jnp.mean((model(x) - x) ** 2), optimizer)
    rows, losses = np.ones((8, 8), np.float32), []
    shared = jnp.asarray(0.25)
    placed = jax.device_put(np.float32(0.25), plan.replicated)
    for number, rate in enumerate([placed, 0.25, np.float32(0.25), np.asarray(0.25), shared, shared]):
        state = init_state(plan, jax.tree.map(jnp.copy, weights), optimizer)
        state.opt_state.hyperparams["learning_rate"] = rate
        save_checkpoint(tmp_path / str(number), plan, state)
        for given in (state, load_checkpoint(tmp_path / str(number), plan, optimizer).state):
            after, _ = step(given, rows)
            losses.append(float(step(after, rows)[1]["loss"]))
    assert losses == losses[:1] * 12
    on_host = {key: np.asarray(array) for key, array in weights.items()}
    with pytest.raises(ValueError, match=r"array .*got .* with no sharding: place it by jax.device_put"):
        step(dataclasses.replace(init_state(plan, weights, optimizer), weights=on_host), rows)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_lowered_programs_are_those_that_a_step_runs(engine):
    plan, weights = fully_shard(decoder(), data_parallel_mesh(2), engine=engine)
    optimizer = main_weight_adamw(1e-2)
    step = make_train_step(plan, loss, optimizer, microbatches=2, donate=False)
    state = init_state(plan, weights, optimizer)
    batch = shard_batch(plan, tokens(4), 2)
    shapes = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=batch.sharding)
    first, second = (
        program.compile() for program in step.lower_programs(abstract_state(plan, optimizer), shapes)
    )
    parts, gradients, _ = first(state.weights, batch, state.variables, ())
    for key, array in gradients.items():
        assert array.sharding.is_equivalent_to(plan.sharding(key), array.ndim), key
    updated = second(state.weights, state.opt_state, gradients, parts.value)[:2]
    expected, metrics = step(state, batch)
    assert parts.value == metrics["loss"]
    for mine, its in zip(
        jax.tree.leaves(updated), jax.tree.leaves((expected.weights, expected.opt_state)), strict=True
    ):
        np.testing.assert_array_equal(mine, its)
