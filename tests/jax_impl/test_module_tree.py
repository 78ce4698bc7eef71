import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_impl.module_tree import parameter_leaves, split_units
from tests.jax_impl.tiny import decoder


class Odd(nnx.Module):
    """Children in a list, a dict and an attribute."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.named = nnx.Dict({"0": nnx.Linear(2, 3, rngs=rngs)})
        self.head = nnx.Linear(3, 2, rngs=rngs)


def owned(units):
    return {path: unit.parameters for path, unit in units.items()}


def test_paths_are_sorted_with_list_indices_as_numbers():
    class Many(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Param(jnp.zeros(1)) for _ in range(11)])
            self.named = nnx.Dict({name: nnx.Param(jnp.zeros(1)) for name in ("9", "10")})

    expected = [*(f"layers/{index}" for index in range(11)), "named/10", "named/9"]
    assert list(parameter_leaves(Many())) == expected
    assert list(split_units(Many(), [])[""].parameters) == expected


def test_each_layer_is_a_unit_and_the_root_owns_the_rest():
    units = split_units(decoder(), ["layers/*"])
    assert list(units) == ["layers/0", "layers/1", ""]
    assert units[""].parameters == ("embed/embedding", "lm_head/kernel", "norm/scale")
    assert all(path.startswith("layers/1/") for path in units["layers/1"].parameters)
    assert len(units["layers/1"].parameters) == 9
    assert list(units[""].inner) == ["layers/0", "layers/1"]


def test_units_inside_units_own_what_lies_below_them():
    units = split_units(decoder(), ["layers/*", "layers/0/mlp"])
    assert units["layers/0/mlp"].parameters == tuple(
        f"layers/0/mlp/{k}/kernel" for k in ("down", "gate", "up")
    )
    assert not any("mlp/" in path for path in units["layers/0"].parameters)
    assert list(units["layers/0"].inner) == ["layers/0/mlp"]
    assert list(units[""].inner) == ["layers/0", "layers/1"]


def test_every_parameter_has_one_owner_whatever_holds_the_module():
    model = Odd(nnx.Rngs(0))
    units = split_units(model, ["blocks/1", "named/0", "head"])
    paths = [path for unit in units.values() for path in unit.parameters]
    assert sorted(paths) == list(parameter_leaves(model))
    assert units["named/0"].parameters == ("named/0/bias", "named/0/kernel")


def test_merging_units_gives_back_the_models_outputs():
    model = Odd(nnx.Rngs(0))
    units = split_units(model, ["blocks/*", "named/*", "head"])
    values = parameter_leaves(model)

    def call(path):
        unit = units[path]
        return unit.merge(
            [values[name] for name in unit.parameters], {below: call(below) for below in unit.inner}
        )

    merged, x = call(""), jnp.array([1.0, -2.0])
    for child in (lambda m: m.blocks[0], lambda m: m.blocks[1], lambda m: m.named["0"]):
        np.testing.assert_array_equal(child(merged)(x), child(model)(x))


def test_the_users_model_is_left_as_it_was():
    model = decoder()
    before = jax.tree.leaves(nnx.state(model))
    split_units(model, ["layers/*"])
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))
    assert type(model.layers[0]).__name__ == "Block"


def test_a_pattern_that_matches_nothing_is_named():
    with pytest.raises(ValueError, match=r"'blocks/\*' matches none of .*'layers/0'"):
        split_units(decoder(), ["layers/*", "blocks/*"])


def test_a_star_does_not_cross_a_slash():
    assert list(split_units(decoder(), ["layers/*"])) == ["layers/0", "layers/1", ""]


def test_weights_tied_across_units_are_refused_and_within_one_accepted():
    model = Odd(nnx.Rngs(0))
    model.blocks[1].kernel = model.blocks[0].kernel
    with pytest.raises(
        ValueError, match="'blocks/0/kernel' of unit '' is the same variable as 'blocks/1/kernel'"
    ):
        split_units(model, ["blocks/1"])
    assert "blocks/0/kernel" in split_units(model, ["head"])[""].parameters


def test_variables_that_are_no_parameters_are_refused_by_path():
    model = Odd(nnx.Rngs(0))
    model.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="norm/mean"):
        split_units(model, ["blocks/*"])
