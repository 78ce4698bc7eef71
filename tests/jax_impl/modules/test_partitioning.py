"""Which parameters model axes cut, along which dimension: by styles, by annotations of the model, by a policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

from bridge.core.sharding import PolicyError
from bridge.core.sharding.policy.parallel import Cut
from jax_impl import (
    ShardingPolicy,
    apply_linen,
    data_parallel_mesh,
    fully_shard,
    init_sharded,
    init_state,
    main_weight_adamw,
    make_train_step,
    plan_sharding,
    unshard,
)
from jax_impl.modules.module_tree import parameter_leaves
from jax_impl.modules.partitioning import cuts_of
from jax_impl.modules.stack import stack_lengths
from jax_impl.modules.tree_model import as_module
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from tests.support.jax_impl import cut_models

TP = {"dp": 2, "tp": 2}
POLICY = """
[mesh]
dp = "all"
tp = 2
[precision]
main = "float64"
[[unit]]
match = "layers.*"
[[unit]]
match = ""
[[parallel]]
match = ["layers.*.attention.query", "layers.*.attention.wq"]
axis = "tp"
style = "colwise"
[[parallel]]
match = "layers.*.attention.out"
axis = "tp"
style = "rowwise"
[[parallel]]
match = "embed.embedding"
axis = "tp"
dimension = 1
"""


class Kinds(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(4, 8, rngs=rngs)
        self.heads = nnx.LinearGeneral(4, (2, 6), rngs=rngs)
        self.merge = nnx.LinearGeneral((2, 6), 4, axis=(-2, -1), rngs=rngs)
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.embed = nnx.Embed(6, 4, rngs=rngs)
        self.norm = nnx.RMSNorm(4, rngs=rngs)


def cuts(model: Any, parallel: Any, sizes: dict[str, int] | None = None, stacked: Any = ()) -> Any:
    module = as_module(model)
    mesh = data_parallel_mesh(sizes or TP)
    by_path = cuts_of(module, stack_lengths(module, stacked), mesh, None, parallel)
    return {path: tuple((cut.axis, cut.dimension) for cut in own) for path, own in by_path.items()}


@pytest.mark.parametrize(
    ("module", "style", "expected"),
    [
        ("linear", "colwise", {"kernel": 1, "bias": 0}),
        ("linear", "rowwise", {"kernel": 0}),
        ("heads", "colwise", {"kernel": 1, "bias": 0}),
        ("heads", "rowwise", {"kernel": 0}),
        ("merge", "rowwise", {"kernel": 0}),
        ("conv", "colwise", {"kernel": 3, "bias": 0}),
        ("conv", "rowwise", {"kernel": 2}),
        ("embed", "colwise", {"embedding": 1}),
        ("embed", "rowwise", {"embedding": 0}),
        ("norm", "colwise", {"scale": 0}),
        ("linear", "expert", {"kernel": 0, "bias": 0}),
        ("linear", PartitionSpec(None, "tp"), {"kernel": 1}),
    ],
)
def test_a_style_means_a_dimension_by_the_kind_of_parameter(
    module: str, style: Any, expected: dict[str, int]
) -> None:
    pattern = f"{module}/kernel" if isinstance(style, PartitionSpec) else module
    by_path = cuts(Kinds(), {pattern: style})
    assert by_path == {f"{module}/{name}": (("tp", dimension),) for name, dimension in expected.items()}


def test_a_pattern_may_name_a_parameter_and_a_style_one_of_two_axes() -> None:
    with jax.enable_x64(True):
        model = cut_models.expert_net()
    sizes = {"dp": 1, "ep": 2, "tp": 2}
    by_path = cuts(model, {"layers/*/w_in": "expert", "layers/0/router": "colwise"}, sizes)
    assert by_path == {
        "layers/0/router": (("tp", 1),),
        "layers/0/w_in": (("ep", 0),),
        "layers/1/w_in": (("ep", 0),),
    }


def test_layers_of_a_stack_are_cut_by_dimensions_of_one_layer() -> None:
    with jax.enable_x64(True):
        model = cut_models.decoder(stacked=True)
    by_path = cuts(model, {"layers/*/mlp/up": "colwise"}, stacked=["layers"])
    assert by_path == {"layers/mlp/up/kernel": (("tp", 1),)}
    with pytest.raises(
        ValueError, match=r"'layers/mlp/up/kernel': expected equal cuts of all 2 layers .* got cuts of 1"
    ):
        cuts(model, {"layers/1/mlp/up": "colwise"}, stacked=["layers"])


def test_a_policys_entries_are_followed_by_name() -> None:
    with jax.enable_x64(True):
        policy = ShardingPolicy.parse(POLICY)
        model = cut_models.decoder()
        plan, weights = policy.apply(model, mesh=data_parallel_mesh({"dp": 4, "tp": 2}))
        assert cuts_in(plan, "layers/0") == {
            "layers/0/attention/out/kernel": (Cut("tp", 0),),
            "layers/0/attention/query/kernel": (Cut("tp", 1),),
        }
        assert cuts_in(plan, "") == {"embed/embedding": (Cut("tp", 1),)}
        for path, value in unshard(plan, weights).items():
            assert value.shape == plan.parameters[path].shape
        # Keywords take the place of the policy's own entries.
        other = policy.apply(model, parallel={"layers/*/mlp/up": "colwise"})[0]
        assert cuts_in(other, "layers/0") == {"layers/0/mlp/up/kernel": (Cut("tp", 1),)}


def cuts_in(plan: ShardingPlan, unit: str) -> dict[str, tuple[Cut, ...]]:
    groups = plan.units[unit].groups
    return {path: own for group in groups for path in group.paths if (own := group.cuts_of(path))}


class Annotated(nnx.Module):
    """``names`` of the first kernel and its bias; the second kernel the other way."""

    def __init__(self, first: Any = (None, "tp"), bias: Any = ("tp",), second: Any = ("tp", None)) -> None:
        random = np.random.default_rng(0)

        def parameter(shape: tuple[int, ...], names: Any) -> nnx.Param[Any]:
            return nnx.Param(jnp.asarray(random.normal(size=shape)), out_sharding=names, eager_sharding=False)

        self.up, self.bias, self.down = (
            parameter((8, 12), first),
            parameter((12,), bias),
            parameter((12, 8), second),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.up[...] + self.bias[...]) @ self.down[...]


def test_annotations_of_an_nnx_model_are_followed() -> None:
    assert cuts(Annotated(), None) == {"bias": (("tp", 0),), "down": (("tp", 0),), "up": (("tp", 1),)}


def test_logical_names_are_resolved_by_flaxs_rules_and_others_warned_of() -> None:
    model = Annotated((None, "mlp"), ("mlp",), ("tp", "embed"))
    with linen.logical_axis_rules((("mlp", "tp"), ("embed", None))):
        assert cuts(model, None) == {"bias": (("tp", 0),), "down": (("tp", 0),), "up": (("tp", 1),)}
    with pytest.warns(RuntimeWarning, match=r"3 parameters .* no effect: 'bias' \('mlp',\), "):
        assert cuts(model, None) == {"down": (("tp", 0),)}


def test_annotations_of_a_stack_may_name_the_layers() -> None:
    class Stack(nnx.Module):
        def __init__(self, names: Any) -> None:
            self.layers = nnx.Dict(w=nnx.Param(jnp.ones((3, 4, 2)), out_sharding=names, eager_sharding=False))

    class Model(nnx.Module):
        def __init__(self, names: Any) -> None:
            self.stack = Stack(names)

    for names in ((None, "tp", None), ("tp", None)):
        assert cuts(Model(names), None, stacked=["stack"]) == {"stack/layers/w": (("tp", 0),)}
    with pytest.raises(ValueError, match=r"'stack/layers/w' of a stack: expected no axis of the mesh for"):
        cuts(Model(("tp", None, None)), None, stacked=["stack"])
    with pytest.raises(ValueError, match=r"of a stack: expected an annotation with a name.*got \('tp',\)"):
        cuts(Model(("tp",)), None, stacked=["stack"])


NET = linen.Sequential(
    [
        linen.Dense(
            12,
            param_dtype=jnp.float64,
            kernel_init=linen.with_partitioning(linen.initializers.normal(0.5), (None, "tp")),
        ),
        jnp.tanh,
        linen.Dense(8, param_dtype=jnp.float64),
    ]
)


def linen_loss(params: Any, rows: jax.Array) -> jax.Array:
    return jnp.mean((apply_linen(NET, {"params": params}, rows) - 1) ** 2)


def pytree() -> Any:
    random = np.random.default_rng(0)
    return {
        name: jnp.asarray(random.normal(size=shape)) for name, shape in {"a": (8, 12), "b": (12, 8)}.items()
    }


def pytree_loss(params: Any, rows: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(rows @ params["a"]) @ params["b"] - 1) ** 2)


@pytest.mark.each_value
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize(
    ("make", "loss", "parallel"),
    [
        pytest.param(Annotated, cut_models.expert_loss, None, id="nnx"),
        pytest.param(
            lambda: NET.init(jax.random.key(0), cut_models.expert_rows())["params"],
            linen_loss,
            None,
            id="linen",
        ),
        pytest.param(pytree, pytree_loss, {"a": PartitionSpec(None, "tp"), "b": "rowwise"}, id="pytree"),
    ],
)
def test_annotated_models_and_pytrees_train_as_unsharded(
    engine: str, make: Callable[[], Any], loss: Callable[..., jax.Array], parallel: Any
) -> None:
    with jax.enable_x64(True):
        model, rows = make(), cut_models.expert_rows()
        c = cut_models
        optimizer = main_weight_adamw(c.LR, c.B1, c.B2, c.EPS, c.DECAY)
        plan, weights = fully_shard(
            model,
            data_parallel_mesh(TP),
            engine=engine,
            units=[],
            **({} if parallel is None else {"parallel": parallel}),
        )
        assert any("tp" in jax.tree.leaves(tuple(array.sharding.spec)) for array in weights.values())
        step, state = make_train_step(plan, loss, optimizer), init_state(plan, weights, optimizer)
        plain = (
            nnx.merge(*nnx.split(model)) if isinstance(model, nnx.Module) else _Plain(linen.meta.unbox(model))
        )
        unsharded = loss if isinstance(model, nnx.Module) else lambda module, rows: loss(module.tree(), rows)
        losses, _, last = cut_models.trained(plain, unsharded, [rows, rows])
        for value in losses:
            state, metrics = step(state, rows)
            np.testing.assert_allclose(float(metrics["loss"]), value, rtol=1e-12)
        trained = unshard(plan, state.weights)
        for path, value in last.items():
            own = trained[path] if path in trained else trained[f"{path}/value"]
            np.testing.assert_allclose(own, value, rtol=0, atol=1e-13, err_msg=path)


class _Plain(nnx.Module):
    """A pytree of nested dictionaries as a module."""

    def __init__(self, tree: Any) -> None:
        for name, value in tree.items():
            setattr(self, name, _Plain(value) if isinstance(value, dict) else nnx.Param(value))

    def tree(self) -> Any:
        return {
            name: value.tree() if isinstance(value, _Plain) else value[...]
            for name, value in vars(self).items()
            if isinstance(value, _Plain | nnx.Param)
        }


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        def dense(features: int, names: tuple[Any, ...]) -> linen.Dense:
            init = linen.with_partitioning(linen.initializers.normal(0.5), names)
            return linen.Dense(features, param_dtype=jnp.float64, kernel_init=init)

        return x + dense(8, ("tp", None))(jnp.tanh(dense(12, (None, "tp"))(x))), None


class LinenStack(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scanned = linen.scan(
            LinenBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={linen.PARTITION_NAME: "layers"},
        )
        return scanned(name="layers")(x, None)[0]


@pytest.mark.fast_cases("sizes0")
@pytest.mark.parametrize("sizes", [TP, pytest.param({"dp": 2}, id="without a model axis")])
def test_boxes_of_a_scanned_linen_module_are_followed_where_they_can_be(sizes: dict[str, int]) -> None:
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows, optimizer = cut_models.expert_rows(), main_weight_adamw(1e-2)
        params = LinenStack().init(jax.random.key(0), rows)["params"]

        def loss(params: Any, rows: jax.Array) -> jax.Array:
            return jnp.mean((apply_linen(LinenStack(), {"params": params}, rows) - 1) ** 2)

        plan, weights = fully_shard(params, data_parallel_mesh(sizes), units=["layers/*"], stacked=["layers"])
        assert ("layers (tp)" in weights) == ("tp" in sizes)
        _, metrics = make_train_step(plan, loss, optimizer)(init_state(plan, weights, optimizer), rows)
        plain = LinenStack().apply({"params": linen.meta.unbox(params)}, rows)
        np.testing.assert_allclose(metrics["loss"], jnp.mean((plain - 1) ** 2), rtol=1e-12)


@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_an_annotated_model_is_born_cut_without_a_mesh_around(engine: str) -> None:
    def make() -> nnx.Module:
        init = nnx.with_partitioning(nnx.initializers.normal(0.5), (None, "tp"))
        return nnx.Linear(8, 12, kernel_init=init, rngs=nnx.Rngs(0))

    plan, weights, _ = init_sharded(make, data_parallel_mesh(TP), units=[], engine=engine)
    with nnx.use_eager_sharding(False):
        expected = parameter_leaves(make())
    for path, value in unshard(plan, weights).items():
        np.testing.assert_array_equal(value, expected[path])


@pytest.mark.parametrize(
    ("model", "parallel", "sizes", "message"),
    [
        (
            Annotated(("dp", "tp")),
            None,
            TP,
            r"parameter 'up': expected an annotation that names model axes only.* 'dp' is a data-parallel axis",
        ),
        (
            Annotated(),
            None,
            {"dp": 1, "tp": 5},
            r"parameter 'bias' \(12,\): expected dimension 0 to be cut over tp = 5 in equal parts, got 12",
        ),
        (
            Annotated(("tp", "tp")),
            None,
            TP,
            r"parameter 'up' \(8, 12\): expected one cut over 'tp', got several",
        ),
        (
            Annotated((None, ("tp", "ep"))),
            None,
            {"dp": 1, "ep": 2, "tp": 2},
            r"parameter 'up' \(8, 12\): expected one axis that cuts dimension 1, got 'ep' and 'tp'",
        ),
        (Annotated((), (), ()), None, TP, r"mesh: the model axis 'tp' cuts no parameter.*Rename the axis"),
        (
            Kinds(),
            {"linear": "colwise"},
            {"dp": 1, "ep": 2, "tp": 2},
            "the model axis 'ep' cuts no parameter",
        ),
        (
            Kinds(),
            {"lin": "colwise"},
            TP,
            r"parallel: .*expected modules or parameters that 'lin' matches, got none",
        ),
        (Kinds(), {"lin": PartitionSpec("tp")}, TP, r"parallel: .*'lin' matches none of \['conv/bias'"),
        (Kinds(), {"linear": PartitionSpec("dp")}, TP, r"'linear': expected model axes .*\['tp'\], got 'dp'"),
        (
            Kinds(),
            {"linear": "diagonal"},
            TP,
            "style: expected one of colwise, rowwise, expert, got 'diagonal'",
        ),
        (
            Kinds(),
            {"norm/scale": PartitionSpec(None, "tp")},
            TP,
            r"parameter 'norm/scale' \(4,\): expected a parameter with dimension 1, to cut it over 'tp', got 1 dim",
        ),
        (
            Kinds(),
            {"linear": "colwise"},
            {"dp": 1, "tp": 2, "model": 2},
            r"expected one model axis to which 'colwise' of 'linear' can apply, got \['tp', 'model'\]",
        ),
        (
            Kinds(),
            {"linear": "colwise"},
            {"dp": 2},
            r"parallel: expected a mesh with model axes, got \{'dp': 2\}",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(model: Any, parallel: Any, sizes: Any, message: str) -> None:
    with pytest.raises((ValueError, PolicyError), match=message):
        cuts(model, parallel, sizes)


def test_every_way_to_a_plan_refuses_a_model_axis_over_which_nothing_is_cut() -> None:
    with pytest.raises(ValueError, match="the model axis 'tp' cuts no parameter"):
        plan_sharding(Kinds(), data_parallel_mesh(TP), units=[])
    policy = ShardingPolicy.parse('[mesh]\ndp = 2\ntp = 2\n[[unit]]\nmatch = ""\n')
    with pytest.raises(ValueError, match="the model axis 'tp' cuts no parameter"):
        policy.apply(Kinds(), mesh=data_parallel_mesh(TP))


def test_annotations_without_a_model_axis_stay_without_effect() -> None:
    model = Annotated(("dp", "tp"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = plan_sharding(model, data_parallel_mesh(2), units=[])
    assert sum("no effect" in str(warning.message) for warning in caught) == 1
    assert list(plan.arrays) == [""]


def test_a_convolution_in_a_pytree_is_asked_for_its_dimension() -> None:
    tree = {"conv": {"kernel": jnp.zeros((3, 3, 2, 4)), "bias": jnp.zeros(4)}}
    with pytest.raises(
        ValueError, match=r"conv.kernel: expected dimension = N for a kernel of shape \(3, 3, 2, 4\)"
    ):
        cuts(tree, {"conv": "colwise"})
    assert cuts(tree, {"conv/kernel": PartitionSpec(None, None, None, "tp")})["conv/kernel"] == (("tp", 3),)
