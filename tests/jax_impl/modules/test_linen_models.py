"""linen modules as their users write them: right numbers, or refused by name; never the zeros that stand for a unit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

from jax_impl import apply_linen, data_parallel_mesh, fully_shard, make_train_step
from tests.jax_impl.modules.test_tree_models import DIM, VOCABULARY, assert_trains_as_alone, linen_loss, rows

pytestmark = pytest.mark.filterwarnings("ignore:pjit engine")


def features() -> np.ndarray:
    return np.random.default_rng(3).normal(size=(8, DIM)).astype(np.float32)


class Inner(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(DIM)(x)


class Outer(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return Inner()(x)


class Tied(linen.Module):
    attend: bool

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = linen.Embed(VOCABULARY, DIM, name="embed")
        x = linen.Dense(DIM)(embed(tokens))
        return embed.attend(x) if self.attend else x @ embed.embedding.T


class Teacher(linen.Module):
    """The module applied inside has a submodule at the path of a unit outside."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        taught = Outer().apply(Outer().init(jax.random.key(5), x), x)
        return Inner()(x) + taught


class OwnMethods(linen.Module):
    def setup(self) -> None:
        self.first, self.second = Inner(), Inner()

    def encode(self, x: jax.Array) -> jax.Array:
        return self.first(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.second(self.encode(x))


class Computing(linen.Module):
    def setup(self) -> None:
        self.weight = 2 * self.param("weight", linen.initializers.normal(1.0), (DIM, DIM))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight


class Keywords(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, mutable: int, method: int, rngs: int) -> jax.Array:
        return linen.Dense(DIM)(x) * mutable * method * rngs


class Calls(linen.Module):
    """Modules that look at weights in setup, take awkward keywords, and are called by lifted functions."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = Keywords(name="keywords")(Computing(name="computing")(x), mutable=2, method=3, rngs=4)
        return linen.remat(lambda module, x: module(x))(Inner(name="again"), x)


class Field(linen.Module):
    embed: linen.Module

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return linen.Dense(DIM)(self.embed(tokens))


class Shared(linen.Module):
    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = linen.Embed(VOCABULARY, DIM, name="embed")
        return Field(embed, name="encoder")(tokens) + Field(embed, name="decoder")(tokens)


class Mapped(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mapped = linen.vmap(
            Inner, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
        )
        return mapped(name="mapped")(x).sum(0)


class Scanned(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scan = linen.scan(
            lambda module, x, _: (module(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scan(Inner(name="layers"), x, None)[0]


@pytest.mark.fast_cases(
    "shard_map-net2-given2-units2", "pjit-net1-given1-units1", "shard_map-net4-given4-units4"
)
@pytest.mark.parametrize(
    ("net", "given", "units"),
    [
        (Tied(True), rows(), ["embed"]),
        (Teacher(), features(), ["Inner_0"]),
        (OwnMethods(), features(), ["first", "second"]),
        (Calls(), features(), ["keywords", "computing", "again"]),
        (Shared(), rows(), ["embed"]),
    ],
)
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_modules_train(net, given, units, engine):
    params = net.init(jax.random.key(0), given)["params"]
    reference = linen_loss(net, linen.Module.apply)
    assert_trains_as_alone(
        params, linen_loss(net, apply_linen), given, reference=reference, units=units, engine=engine
    )


@pytest.mark.parametrize(
    ("net", "given", "units", "message"),
    [
        (Tied(False), rows(), ["embed"], r"unit 'embed': .*, got transpose at .*test_linen_models\.py:\d+"),
        (
            Mapped(),
            features(),
            ["mapped"],
            "unit 'mapped', no stack: expected a linen module .* inside nn.scan or nn.vmap",
        ),
        (
            Mapped(),
            features(),
            ["mapped/Dense_0"],
            "unit 'mapped/Dense_0', no stack: expected a linen module",
        ),
        (Scanned(), features(), ["layers"], "unit 'layers', no stack: expected a linen module"),
        (Shared(), rows(), ["encoder"], "choose units that contain both: .*embedding"),
    ],
)
def test_modules_whose_units_cannot_be_had_are_refused(net, given, units, message):
    params = net.init(jax.random.key(0), given)["params"]
    plan, weights = fully_shard(params, data_parallel_mesh(2), units=units)
    with pytest.raises(ValueError, match=message):
        make_train_step(plan, linen_loss(net, apply_linen), optax.sgd(0.1)).gradients(weights, given)


def test_a_unit_may_be_all_of_a_module_and_methods_may_be_functions():
    params = {"unit": Inner().init(jax.random.key(0), features())["params"]}

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        y = apply_linen(Inner(), {"params": params["unit"]}, x, rngs=jax.random.key(1))
        return jnp.mean(apply_linen(Inner(), {"params": params["unit"]}, y, method=Inner.__call__) ** 2)

    assert_trains_as_alone(params, loss_fn, features(), units=["unit"])


@pytest.mark.parametrize("mutable", [True, ["params"], "params", linen.DenyList("batch_stats")])
def test_parameters_are_not_mutable(mutable):
    params = Inner().init(jax.random.key(0), features())
    with pytest.raises(ValueError, match="mutable: expected False or names of collections other than params"):
        apply_linen(Inner(), params, features(), mutable=mutable)


def test_apply_instead_of_apply_linen_gathers_for_each_parameter():
    net = Outer()
    params = net.init(jax.random.key(0), features())["params"]
    loss = linen_loss(net, linen.Module.apply)
    assert_trains_as_alone(params, loss, features(), reference=loss, units=["Inner_0"])
