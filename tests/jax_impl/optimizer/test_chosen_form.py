"""Optimizers run on the shards, or on whole parameters where they look at shapes or names: programs tell which."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

import jax_impl
from jax_impl import data_parallel_mesh, fully_shard, init_state, main_weight_adamw, make_train_step, unshard
from jax_impl.optimizer.chosen_form import chosen_form
from jax_impl.optimizer.forms import arrays_of, trees_of
from jax_impl.optimizer.logical import fit_to_plan
from jax_impl.runtime.step.gradients import unchecked_gradients
from tests.support.jax_impl.optimizers import PLAIN, RATE, transformations
from tests.support.jax_impl.zoo import Everything, dense_tree, loss_of_layers, pairs


def labels_by_ndim(tree: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "other", tree)


def labels_by_name(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda keys, _: "other" if keys[-1].key == "b" else "matrix", tree
    )


def two_optimizers(labels: Any) -> optax.GradientTransformation:
    return optax.multi_transform({"matrix": optax.adam(RATE), "other": optax.sgd(RATE)}, labels)


def matrices(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


# In everyday programs, beside those of optax's public names.
COMPOSED: dict[str, Any] = {
    "decay of matrices": lambda: optax.adamw(1e-4, weight_decay=1e-5, mask=matrices),
    "labels by ndim": lambda: two_optimizers(labels_by_ndim),
    "labels by name": lambda: two_optimizers(labels_by_name),
    "accumulated": lambda: optax.MultiSteps(optax.adamw(RATE), 2).gradient_transformation(),
    "accumulated long": lambda: optax.MultiSteps(optax.contrib.muon(RATE), 20).gradient_transformation(),
    "accumulated float8": lambda: optax.MultiSteps(
        main_weight_adamw(RATE, mu_dtype="float8_e4m3fn"), 2
    ).gradient_transformation(),
    "clipped adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, 10, 100), weight_decay=0.1),
    ),
    "clipped main weights": lambda: optax.chain(optax.clip_by_global_norm(0.1), main_weight_adamw(RATE)),
    "main weights": lambda: main_weight_adamw(RATE),
}
ON_PARAMETERS = [
    "muon", "lamb", "lars", "adafactor", "sm3", "adaptive_grad_clip", "clip_by_block_rms", "decay of matrices",
    "labels by ndim", "labels by name", "accumulated long", "accumulated float8", "novograd",
    "add_noise",
]  # fmt: skip
ON_SHARDS = [
    "adamw", "lion", "sgd", "chain", "ema", "inject_hyperparams", "apply_if_finite", "schedule_free_adamw", "prodigy",
    "masked", "accumulated", "clipped adamw", "clipped main weights", "main weights",
]  # fmt: skip


loss = loss_of_layers()


def parameters(dtype: str = "float32") -> dict[str, Any]:
    return dense_tree((3, 5), head=(5, 2), bias=True, dtype=dtype)


def batches() -> list[Any]:
    return pairs(3, 8, 3, 2, growing=True)


@functools.cache
def plan_and_weights(engine: str = "shard_map", dtype: str = "float32") -> tuple[Any, Any]:
    return fully_shard(parameters(dtype), data_parallel_mesh(4), units=["layers/*"], engine=engine)


@functools.cache
def gradients_of_shards() -> Any:
    plan, _ = plan_and_weights(dtype="float64")
    return jax.jit(unchecked_gradients(plan, loss, 1), static_argnames="to_host")


@functools.cache
def plain_gradients() -> Any:
    return jax.jit(jax.value_and_grad(loss))


def trained(optimizer: optax.GradientTransformation) -> dict[str, jax.Array]:
    plan, weights = plan_and_weights(dtype="float64")
    weights = jax.tree.map(jnp.copy, weights)
    step = make_train_step(plan, loss, optimizer)
    # One program of the gradients for all optimizers; the update is the step's own.
    step._gradients = gradients_of_shards()
    step._checked = Everything()
    state = init_state(plan, weights, optimizer)
    for batch in batches():
        state, _ = step(state, batch)
    return unshard(plan, state.weights)


def plainly_trained(optimizer: optax.GradientTransformation) -> Any:
    weights = parameters("float64")
    state = optimizer.init(weights)
    able = optax.with_extra_args_support(optimizer)

    @jax.jit
    def update(gradients: Any, state: Any, weights: Any, value: jax.Array) -> Any:
        updates, state = able.update(gradients, state, weights, value=value)
        return optax.apply_updates(weights, updates), state

    for batch in batches():
        value, gradients = plain_gradients()(weights, batch)
        weights, state = update(gradients, state, weights, value)
    return weights


def by_path(tree: Any) -> dict[str, jax.Array]:
    return {
        "layers/0/w": tree["layers"][0]["w"],
        "layers/0/b": tree["layers"][0]["b"],
        "head": tree["head"],
        "bias": tree["bias"],
    }


def assert_trains_as_unsharded(name: str) -> None:
    """In float64: some divide by statistics of tiny gradients, and magnify what programs round otherwise."""
    make = {**transformations(), **COMPOSED}[name]
    with jax.enable_x64(True):
        weights = trained(make())
        expected = by_path(plainly_trained(PLAIN.get(name, make)()))
    for path, value in expected.items():
        np.testing.assert_allclose(
            weights[path], value, rtol=1e-5, atol=1e-5 * np.max(np.abs(value)), err_msg=path
        )


def form_of(optimizer: optax.GradientTransformation, engine: str = "shard_map") -> str | None:
    plan = plan_and_weights(engine)[0]
    return chosen_form(optimizer, arrays_of(plan), trees_of(plan), engine == "shard_map")


@pytest.mark.fast_cases(
    "lamb", "adafactor", "adaptive_grad_clip", "decay of matrices", "labels by name", "clip_by_block_rms"
)
@pytest.mark.parametrize("name", ON_PARAMETERS)
def test_what_looks_at_shapes_or_names_is_given_the_models_parameters(name: str) -> None:
    assert form_of({**transformations(), **COMPOSED}[name]()) == "name"
    assert_trains_as_unsharded(name)


@pytest.mark.fast_cases("adamw", "chain", "apply_if_finite", "schedule_free_adamw", "masked", "main weights")
@pytest.mark.parametrize("name", ON_SHARDS)
def test_what_is_elementwise_runs_on_the_shards(name: str) -> None:
    assert form_of({**transformations(), **COMPOSED}[name]()) is None
    assert_trains_as_unsharded(name)


@pytest.mark.parametrize("name", ["muon", "adafactor", "decay of matrices", "labels by ndim", "add_noise"])
def test_logical_arrays_are_parameters_already(name: str) -> None:
    assert form_of({**transformations(), **COMPOSED}[name](), "pjit") is None


def test_names_in_the_models_own_tree_are_given_where_arrays_have_paths() -> None:
    assert form_of(two_optimizers(labels_by_name), "pjit") == "name"
    by_end = two_optimizers(
        lambda tree: jax.tree_util.tree_map_with_path(
            lambda keys, _: "other" if keys[-1].key.rpartition("/")[-1] == "b" else "matrix", tree
        )
    )
    assert form_of(by_end, "pjit") is None


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (optax.lamb, "name"),
        (optax.lars, "name"),
        (optax.adamw, None),
        (optax.contrib.schedule_free_sgd, None),
    ],
)
def test_the_small_updates_of_a_warmup_tell_optimizers_apart(make: Any, form: str | None) -> None:
    assert form_of(make(optax.linear_schedule(0.0, 1e-3, 100_000))) == form


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_the_models_own_pytree_is_given_where_a_mask_was_made_of_it(engine: str) -> None:
    mask = jax.tree.map(lambda x: x.ndim > 1, parameters())
    assert form_of(optax.adamw(RATE, mask=mask), engine) == "tree"


@pytest.mark.fast_cases(
    "optimizer1-updates one flat array per unit, by unit, or the tree of the model's parameters.*got ValueError"
)
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.lbfgs(), "from only gradients, state, weights and the loss, got TypeError: .*'value_fn'"),
        (
            optax.adamw(RATE, mask={"blocks": True}),
            "updates one flat array per unit, by unit, or the tree of the model's parameters.*got ValueError",
        ),
    ],
)
def test_what_cannot_be_updated_is_refused_with_the_reason(optimizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_train_step(plan_and_weights()[0], loss, optimizer)


def large_plan(layers: int) -> Any:
    layer = {
        "w": jax.ShapeDtypeStruct((512, 2048), jnp.float32),
        "b": jax.ShapeDtypeStruct((2048,), jnp.float32),
    }
    tree = {"layers": [layer] * layers, "head": jax.ShapeDtypeStruct((512, 3000), jnp.float32)}
    return jax_impl.plan_sharding(tree, data_parallel_mesh(4), units=["layers/*"])


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adafactor(RATE, min_dim_size_to_factor=128),
        optax.adafactor(RATE, min_dim_size_to_factor=400),
        optax.adamw(RATE, mask=lambda tree: jax.tree.map(lambda x: x.shape[-1] != 3000, tree)),
    ],
)
def test_shapes_of_a_large_model_tell(optimizer: Any) -> None:
    plan = large_plan(6)
    assert chosen_form(optimizer, arrays_of(plan), trees_of(plan), True) == "name"


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(RATE),
        optax.masked(optax.adamw(RATE), {**{f"layers/{i}": i != 3 for i in range(6)}, "": True}),
    ],
)
def test_a_large_model_accepts_what_is_elementwise(optimizer: Any) -> None:
    plan = large_plan(6)
    assert chosen_form(optimizer, arrays_of(plan), trees_of(plan), True) is None


def keys_of(path: Any) -> list[str]:
    return [str(getattr(entry, "key", getattr(entry, "idx", ""))) for entry in path]


def labels_where(chosen: Any) -> Any:
    return lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if chosen(path) else "trained", tree
    )


def freezing(chosen: Any) -> optax.GradientTransformation:
    return optax.multi_transform(
        {"trained": optax.sgd(RATE), "frozen": optax.set_to_zero()}, labels_where(chosen)
    )


def after(steps: int, late: optax.GradientTransformation) -> optax.GradientTransformation:
    """Adam, and ``late`` from a later step on."""
    begins = optax.conditionally_transform(late, should_transform_fn=lambda step: step >= steps)
    return optax.chain(optax.scale_by_adam(), begins, optax.scale(-RATE))


def by_switch(tree_of_updates: Any, count: jax.Array) -> Any:
    normed = jax.tree.map(lambda x: x / (1 + jnp.linalg.norm(x)), tree_of_updates)
    return jax.lax.switch(jnp.minimum(count // 1000, 1), [lambda: tree_of_updates, lambda: normed])


def switched() -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return by_switch(updates, state), state + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)


def looped(chosen: Any) -> optax.GradientTransformation:
    """Updates by a loop, whose program is another one for parameters that are ``chosen`` by their path."""

    def repeated(path: Any, update: jax.Array) -> jax.Array:
        factor = 0.5 if chosen(path) else 0.9
        return jax.lax.fori_loop(0, 3, lambda _, value: value * factor, update)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(repeated, updates))


@pytest.mark.parametrize(
    ("optimizer", "form"),
    [
        (looped(lambda path: any(getattr(entry, "idx", None) == 3 for entry in path)), "tree"),
        (looped(lambda path: False), "name"),
        (freezing(lambda path: "3" in keys_of(path)), "name"),
        (freezing(lambda path: any(getattr(entry, "idx", None) == 3 for entry in path)), "tree"),
        (optax.adamw(RATE, mask={"head": True, "layers": [i != 2 for i in range(6)]}), "tree"),
        (after(3, optax.scale_by_trust_ratio()), "name"),
        (after(10_000, optax.clip_by_block_rms(1.0)), "name"),
        (after(10_000, optax.clip_by_global_norm(1.0)), None),
        (optax.MultiSteps(optax.lamb(RATE), 500).gradient_transformation(), "name"),
        (switched(), "name"),
        (
            optax.apply_if_finite(optax.adamw(optax.join_schedules([lambda _: 0.0, lambda _: RATE], [9])), 3),
            None,
        ),
    ],
)
def test_all_names_and_later_steps_count(optimizer: Any, form: str | None) -> None:
    plan = large_plan(6)
    assert chosen_form(optimizer, arrays_of(plan), trees_of(plan), True) == form


def divided_by_sum(measure: Any) -> optax.GradientTransformation:
    def update(updates: Any, _: Any) -> Any:
        total = sum(jnp.sum(measure(leaf)) for leaf in jax.tree.leaves(updates))
        return jax.tree.map(lambda leaf: leaf / total, updates)

    return optax.stateless(update)


@pytest.mark.parametrize(("measure", "form"), [(jnp.abs, None), (jnp.exp, "name"), (jnp.cos, "name")])
def test_sums_that_padding_would_change_are_taken_over_parameters(measure: Any, form: str | None) -> None:
    """Shards end in zeros that belong to no parameter, of which these are 0 or 1."""
    plan, _ = plan_and_weights()
    assert chosen_form(divided_by_sum(measure), arrays_of(plan), trees_of(plan), True) == form


class Blocks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(5)])
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return x


def of_blocks(chosen: Any) -> optax.GradientTransformation:
    return optax.multi_transform(
        {"trained": optax.adam(RATE), "frozen": optax.sgd(RATE)}, labels_where(chosen)
    )


@pytest.mark.fast_cases("shard_map-number")
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(lambda path: path[1].key == 3, id="number"),
        pytest.param(lambda path: "['blocks'][2]" in jax.tree_util.keystr(path), id="keystr"),
    ],
)
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_functions_of_flax_states_get_flax_states(engine: str, chosen: Any) -> None:
    rows = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    plan, weights = fully_shard(Blocks(nnx.Rngs(0)), data_parallel_mesh(4), engine=engine)
    optimizer = of_blocks(chosen)
    state = init_state(plan, weights, optimizer)
    step = make_train_step(plan, lambda model, x: jnp.mean((model(x) - 1) ** 2), optimizer)
    model = Blocks(nnx.Rngs(0))
    plain = nnx.Optimizer(model, of_blocks(chosen), wrt=nnx.Param)
    for _ in range(3):
        state, _ = step(state, rows)
        plain.update(model, nnx.grad(lambda model: jnp.mean((model(rows) - 1) ** 2))(model))
    assert not any(isinstance(x, nnx.State) for x in jax.tree.leaves(state.opt_state, is_leaf=is_state))
    for path, value in jax_impl.unshard(plan, state.weights).items():
        _, number, name = path.split("/")
        np.testing.assert_allclose(value, getattr(model.blocks[int(number)], name)[...], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("made_of", "form"),
    [(lambda state: state, "boxed"), (nnx.as_pure, "tree"), (nnx.to_pure_dict, "dictionary")],
)
def test_masks_made_of_a_flax_state_fit(made_of: Any, form: str) -> None:
    model = Blocks(nnx.Rngs(0))
    mask = jax.tree.map(lambda x: x.ndim > 1, made_of(nnx.state(model, nnx.Param)))
    plan, weights = fully_shard(model, data_parallel_mesh(4))
    optimizer = optax.chain(optax.trace(0.9), optax.add_decayed_weights(0.5, mask))
    assert chosen_form(optimizer, arrays_of(plan), trees_of(plan), True) == form
    state = init_state(plan, weights, optimizer)
    assert len(jax.tree.leaves(state.opt_state)) == 10
    assert not any(is_state(x) for x in jax.tree.leaves(state.opt_state, is_leaf=is_state))
    updates, after = jax.jit(fit_to_plan(plan, optimizer).update)(weights, state.opt_state, weights)
    assert jax.tree.structure(after) == jax.tree.structure(state.opt_state)
    initial = jax_impl.unshard(plan, weights)
    for path, update in jax_impl.unshard(plan, updates).items():
        np.testing.assert_allclose(update, initial[path] * (1 + 0.5 * path.endswith("kernel")), rtol=1e-6)


def is_state(node: Any) -> bool:
    return isinstance(node, nnx.State | nnx.Variable)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_labels_that_depend_on_how_flax_gives_a_state_are_refused(engine: str) -> None:
    plan, _ = fully_shard(Blocks(nnx.Rngs(0)), data_parallel_mesh(4), engine=engine)
    optimizer = of_blocks(lambda path: jax.tree_util.keystr(path).endswith("['kernel']"))
    with pytest.raises(ValueError, match=r"its nnx.as_pure, got masks or labels that differ"):
        make_train_step(plan, lambda model, x: jnp.mean(model(x)), optimizer)
