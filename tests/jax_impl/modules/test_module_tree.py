from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_impl import stack_layers
from jax_impl.models import Decoder
from jax_impl.modules.interception import catch_calls
from jax_impl.modules.module_tree import (
    module_paths,
    parameter_leaves,
    split_units,
    variable_infos,
    variable_leaves,
)
from jax_impl.modules.stack import stack_lengths
from jax_impl.modules.unit_parameter import UnitRun
from tests.support.jax_impl.tiny import CONFIG, decoder


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
    units = split_units(decoder(), ["layers/0", "layers/1"])
    assert list(units) == ["layers/0", "layers/1", ""]
    assert units[""].parameters == ("embed/embedding", "lm_head/kernel", "norm/scale")
    assert all(path.startswith("layers/1/") for path in units["layers/1"].parameters)
    assert len(units["layers/1"].parameters) == 9
    assert list(units[""].inner) == ["layers/0", "layers/1"]


def test_units_inside_units_own_what_lies_below_them():
    units = split_units(decoder(), ["layers/0/mlp", "layers/1", "layers/0"])
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
    units = split_units(model, ["blocks/0", "blocks/1", "named/0", "head"])
    values = parameter_leaves(model)

    def leaves(path):
        return [values[name] for name in units[path].parameters]

    def call(path, run, arrays, witnesses, arguments):
        return run(units[path].values(leaves(path), {}), arguments)

    runs = {path: UnitRun(path, None, (), partial(call, path)) for path in units[""].inner}
    merged, x = units[""].merge(leaves(""), [], runs), jnp.array([1.0, -2.0])
    with catch_calls([nnx.Linear]):
        for child in (lambda m: m.blocks[0], lambda m: m.blocks[1], lambda m: m.named["0"]):
            np.testing.assert_array_equal(child(merged)(x), child(model)(x))


def test_the_users_model_is_left_as_it_was():
    model = decoder()
    before = jax.tree.leaves(nnx.state(model))
    split_units(model, ["layers/0"])
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))
    assert type(model.layers[0]).__name__ == "Block"


def test_weights_tied_across_units_are_refused_and_within_one_accepted():
    model = Odd(nnx.Rngs(0))
    model.blocks[1].kernel = model.blocks[0].kernel
    with pytest.raises(
        ValueError, match="'blocks/0/kernel' of unit '' is the same variable as 'blocks/1/kernel'"
    ):
        split_units(model, ["blocks/1"])
    assert "blocks/0/kernel" in split_units(model, ["head"])[""].parameters


def test_names_in_a_layout_are_dotted_and_relative_to_the_unit():
    units = split_units(decoder(), ["layers/1", "layers/1/mlp"])
    assert units["layers/1/mlp"].names == ("down.kernel", "gate.kernel", "up.kernel")
    assert "attention.query.kernel" in units["layers/1"].names
    assert "layers.0.mlp.up.kernel" in units[""].names


class Noisy(nnx.Module):
    """Variables of several kinds, one of them in two places."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.inner = nnx.Dict({"norm": nnx.BatchNorm(2, rngs=rngs)})
        self.again = self.norm


def test_variables_that_are_no_parameters_are_listed_once_with_their_kinds():
    model = Noisy(nnx.Rngs(0, dropout=1))
    infos = variable_infos(model)
    classes = {path: info.cls.__name__ for path, info in infos.items()}
    assert classes == {
        "again/mean": "BatchStat",
        "again/var": "BatchStat",
        "drop/rngs/count": "RngCount",
        "drop/rngs/key": "RngKey",
        "inner/norm/mean": "BatchStat",
        "inner/norm/var": "BatchStat",
    }
    assert list(variable_leaves(model)) == list(infos)
    units = split_units(model, ["inner/norm", "drop"])
    assert units["inner/norm"].variables == ("inner/norm/mean", "inner/norm/var")
    assert units["drop"].variables == ("drop/rngs/count", "drop/rngs/key")
    assert sorted(units[""].variables) == sorted(infos)


def test_a_variable_without_an_array_is_refused_by_path():
    model = Noisy(nnx.Rngs(0, dropout=1))
    model.note = nnx.Variable("text")
    with pytest.raises(ValueError, match="variable 'note': expected an array, got str"):
        variable_infos(model)


def stacked():
    return Decoder(CONFIG, rngs=nnx.Rngs(0), stacked=True)


def test_the_layers_of_a_stack_are_modules_of_their_own():
    model = stacked()
    assert stack_lengths(model, ["layers"]) == {"layers": 2}
    paths = module_paths(model, {"layers": 2})
    assert paths["layers.0"] == paths["layers.1"] == "layers"
    assert paths["layers.1.mlp.up"] == "layers/mlp/up"
    assert "layers" not in paths
    assert {"", "embed", "norm", "lm_head"} <= set(paths)
    units = split_units(model, ["layers", "layers/mlp"], {"layers": 2})
    assert {path: unit.layers for path, unit in units.items()} == {"layers": 2, "layers/mlp": 2, "": None}
    assert dict(zip(units["layers/mlp"].names, units["layers/mlp"].shapes, strict=True)) == {
        "down.kernel": (19, 13),
        "gate.kernel": (13, 19),
        "up.kernel": (13, 19),
    }


@pytest.mark.parametrize(
    ("stacks", "message"),
    [
        (["blocks"], "expected paths of submodules, got 'blocks'"),
        (["layers", "layers/mlp"], "no stack inside another, got 'layers/mlp'"),
        (["embed", "lm_head"], None),
        ([""], "expected paths of submodules, got ''"),
    ],
)
def test_stacks_that_are_none_are_refused(stacks, message):
    with pytest.raises(ValueError, match=r"over layers, got 'layers', a list .* stack_layers makes one"):
        stack_lengths(Decoder(CONFIG, rngs=nnx.Rngs(0)), ["layers"])
    if message is None:
        # A module of one parameter can be read as a stack of its rows: nothing tells it from one.
        assert stack_lengths(stacked(), stacks) == {"embed": 23, "lm_head": 13}
        return
    with pytest.raises(ValueError, match=message):
        stack_lengths(stacked(), stacks)


def test_layers_of_other_leading_sizes_are_no_stack():
    message = r"all parameters of 'layers/0' with one leading axis .*'layers/0/mlp/up/kernel'"
    with pytest.raises(ValueError, match=message):
        stack_lengths(decoder(), ["layers/0"])


def test_stacking_layers_that_differ_is_refused():
    layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1))]
    assert stack_layers(layers).kernel.shape == (2, 2, 2)
    np.testing.assert_array_equal(stack_layers(layers).kernel[1], layers[1].kernel[...])
    with pytest.raises(ValueError, match="layer 1 differs from layer 0"):
        stack_layers([layers[0], nnx.Linear(2, 3, rngs=nnx.Rngs(0))])
    with pytest.raises(ValueError, match="layer 1 differs from layer 0"):
        stack_layers([layers[0], nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))])
    with pytest.raises(ValueError, match="at least one layer"):
        stack_layers([])


class OfAnyShape(nnx.Module):
    """A layer whose class and attributes do not say its shape."""

    def __init__(self, size):
        self.scale = nnx.Param(jnp.ones(size))


def test_layers_that_differ_in_a_shape_alone_are_not_stacked():
    with pytest.raises(ValueError, match="expected equal layers, but layer 2 differs from layer 0"):
        stack_layers([OfAnyShape(2), OfAnyShape(2), OfAnyShape(3)])
