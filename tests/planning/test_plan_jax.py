"""The planner's bytes and collectives are those that JAX's runtime measures, device by device and axis by axis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from hypothesis import given

import jax_impl
from bridge.planning import CostPlan, Workload, make_plan, parse_policy
from bridge.planning.models.model import Model, Parameter
from jax_impl.runtime.groups.sharding_plan import ShardingPlan
from tests.jax_impl.runtime import test_kept as nested
from tests.planning.test_plan_torch import MAIN, PART, cases, model_of, policy_text
from tests.support.examples import examples
from tests.support.parity.plan_runs import Spec

PRIMITIVES = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum": "all_reduce",
    "pmax": "all_reduce",
}


class Part(nnx.Module):
    """Parameters of any shapes, all of which the output depends on."""

    def __init__(self, specs: list[Spec]) -> None:
        for number, spec in enumerate(specs):
            dtype = jnp.bfloat16 if spec.narrow else jnp.float32
            setattr(self, f"p{number}", nnx.Param(jnp.full(spec.shape, 0.01, dtype)))

    def __call__(self, x: jax.Array) -> jax.Array:
        params = [value for value in vars(self).values() if isinstance(value, nnx.Param)]
        return x + sum((param[...].astype(x.dtype).sum() for param in params), jnp.zeros((), x.dtype))


class Whole(nnx.Module):
    """Parts one after the other."""

    def __init__(self, parts: list[list[Spec]], own: list[Spec]) -> None:
        self.factor = nnx.Param(jnp.ones(()))
        self.own = Part(own)
        self.parts = nnx.List([Part(specs) for specs in parts])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.own(x * self.factor[...].astype(x.dtype))
        for part in self.parts:
            x = part(x)
        return x


def loss(model: Any, rows: jax.Array) -> jax.Array:
    return model(rows).astype(jnp.float32).mean()


def frozen_paths(parts: list[list[Spec]], own: list[Spec]) -> list[str]:
    paths = [f"own/p{k}" for k, spec in enumerate(own) if spec.frozen]
    for number, specs in enumerate(parts):
        paths += [f"parts/{number}/p{k}" for k, spec in enumerate(specs) if spec.frozen]
    return paths


def assert_measured(
    mesh: tuple[int, ...], policy: str, parts: list[list[Spec]], own: list[Spec], microbatches: int
) -> None:
    world = math.prod(mesh)
    frozen = frozen_paths(parts, own)
    axes = jax_impl.data_parallel_mesh({f"axis{number}": size for number, size in enumerate(mesh)})
    plan, weights = jax_impl.fully_shard(
        Whole(parts, own), axes, jax_impl.ShardingPolicy.parse(policy, "test"), frozen=frozen
    )
    state = jax_impl.init_state(plan, weights, jax_impl.main_weight_adamw(1e-3))
    report = jax_impl.memory_report(plan, state)
    for device, memory in enumerate(report.devices):
        planned = make_plan(
            model_of(parts, own),
            parse_policy(policy, "test"),
            world,
            "jax",
            Workload(1, 3, microbatches),
            device=device,
        )
        rest = planned.at_rest
        assert memory.main_weights == rest.main_weights.real
        assert memory.moments == rest.moments.real
        assert memory.padding == rest.padding
        assert memory.total - memory.other == rest.total
    rows = jax.ShapeDtypeStruct((world * microbatches, 3), jnp.float32)
    gradients = jax_impl.make_gradients(plan, loss, microbatches)
    measured = Counter(dict(counted(jax.make_jaxpr(gradients)(weights, rows).jaxpr)))
    assert measured == expected(planned)
    by_size = Counter[tuple[str, str, int]]()
    for call, times in jax_impl.count_collectives(gradients, weights, rows).items():
        by_size[PRIMITIVES[call.kind], call.dtype, call.size * jnp.dtype(call.dtype).itemsize] += times
    assert sum(by_size.values()) == sum(measured.values())


def expected(plan: CostPlan) -> Counter[tuple[str, str, str, int]]:
    traffic: Counter[tuple[str, str, str, int]] = Counter()
    for call, times in plan.traffic.calls.items():
        traffic[call.kind, call.axis, call.dtype, call.nbytes] += times
    traffic["all_reduce", ",".join(plan.mesh.names[::-1]), "float32", 4] += plan.traffic.loss
    return traffic


def counted(jaxpr: Any, times: int = 1) -> Iterator[tuple[tuple[str, str, str, int], int]]:
    """Collectives of a jaxpr with the axes they run over; scans multiplied out."""
    traffic: Counter[tuple[str, str, str, int]] = Counter()
    for equation in jaxpr.eqns:
        name = equation.primitive.name.removesuffix("_invariant")
        if name in PRIMITIVES:
            names = equation.params.get("axes", equation.params.get("axis_name"))
            names = names if isinstance(names, tuple) else (names,)
            for a, b in zip(equation.invars, equation.outvars, strict=True):
                nbytes = max(v.aval.size * v.aval.dtype.itemsize for v in (a, b))
                traffic[PRIMITIVES[name], ",".join(names), a.aval.dtype.name, nbytes] += times
        inner = times * (equation.params["length"] if name == "scan" else 1)
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                traffic.update(dict(counted(value, inner)))
    yield from traffic.items()


@pytest.mark.slow
@examples(25)
@given(case=cases(MAIN))
def test_bytes_and_collectives_of_random_models_and_placements(
    case: tuple[tuple[int, ...], str, list[list[Spec]], list[Spec], int],
) -> None:
    assert_measured(*case)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        *(((3,), name) for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
        ((2, 3), "hsdp"),
        ((2, 3), "hfsdp"),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_bytes_and_collectives_of_every_strategy(
    mesh: tuple[int, ...], strategy: str, microbatches: int
) -> None:
    policy = policy_text(mesh, strategy, strategy, {"compute": "bfloat16", "reduce": "float32"})
    assert_measured(mesh, policy, [PART, PART], [Spec((9, 4))], microbatches)


@pytest.mark.parametrize("main", ["bfloat16", "given"])
def test_bytes_and_collectives_of_main_weights_in_other_dtypes(main: str) -> None:
    policy = policy_text((2, 2), "hfsdp", "optim_grads", {"main": main})
    assert_measured((2, 2), policy, [WIDE, PART], [Spec((9, 4)), Spec((3,), narrow=True)], 2)


WIDE = [
    Spec((64, 64)),
    Spec((7, 33)),
    Spec((5,)),
    Spec((4, 64), frozen=True),
    Spec((6, 32), frozen=True, narrow=True),
]


@pytest.mark.fast_cases("mesh3-hfsdp-mxfp8")
@pytest.mark.parametrize("gather", ["mxfp8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("mesh", "strategy"), [((3,), "optim_grads_params"), ((2,), "optim"), ((2, 2), "hsdp"), ((2, 3), "hfsdp")]
)
def test_bytes_and_collectives_of_weights_that_are_gathered_as_float8(
    mesh: tuple[int, ...], strategy: str, gather: str
) -> None:
    policy = policy_text(mesh, strategy, strategy, {"compute": "bfloat16", "gather": gather})
    assert_measured(mesh, policy, [WIDE, [Spec((8, 64))]], [Spec((9, 4)), Spec((3,))], 2)


class Stacked(nnx.Module):
    def __init__(self) -> None:
        self.layers = jax_impl.stack_layers([Part(WIDE[:3]) for _ in range(3)])
        self.own = Part([Spec((9, 4))])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.own(jax_impl.scan_layers(self.layers, x))


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["mxfp8", "float8_e4m3fn"])
def test_magnitudes_of_scanned_layers_are_compared_together(gather: str) -> None:
    strategy = "optim_grads_params"
    policy = policy_text((4,), strategy, strategy, {"gather": gather}).replace("parts.*", "layers.*")
    mesh = jax_impl.data_parallel_mesh({"axis0": 4})
    plan, weights = jax_impl.fully_shard(
        Stacked(), mesh, jax_impl.ShardingPolicy.parse(policy, "test"), stacked=["layers"]
    )
    rows = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    measured = Counter(
        dict(counted(jax.make_jaxpr(jax_impl.make_gradients(plan, loss))(weights, rows).jaxpr))
    )
    parameters = [
        Parameter(f"layers.{n}.p{k}", spec.shape) for n in range(3) for k, spec in enumerate(WIDE[:3])
    ]
    modules = ("", "own", *(f"layers.{n}" for n in range(3)))
    model = Model("test", modules, (*parameters, Parameter("own.p0", (9, 4))), stacks=("layers",))
    planned = make_plan(model, parse_policy(policy, "test"), 4, "jax", Workload(1, 3, 1))
    assert measured == expected(planned)
    compared = [call for call in planned.traffic.calls if call.kind == "all_reduce"]
    assert [call.nbytes for call in compared] == ([] if gather == "mxfp8" else [4 * 3 * 2, 4])


@pytest.mark.parametrize("recomputing", [(), ("own",), ("parts.*",), ("", "parts.*")])
def test_units_inside_recomputing_units_are_gathered_once_more_but_for_the_last(
    recomputing: tuple[str, ...],
) -> None:
    units = [
        f'[[unit]]\nmatch = "{match}"\nrecompute = {str(match in recomputing).lower()}\n'
        for match in ("own", "parts.*", "")
    ]
    policy = "[mesh]\nprefetch = 0\naxis0 = 3\n" + "".join(units)
    other = [Spec((7, 3))]
    assert_measured((3,), policy, [PART, other], [Spec((9, 4))], 2)
    model, parsed = model_of([PART, other], [Spec((9, 4))]), parse_policy(policy, "test")
    for unit in make_plan(model, parsed, 3, "jax", Workload(1, 3, 2)).units:
        times = sum(number for call, number in unit.calls.items() if call.kind == "all_gather")
        more = "" in recomputing and unit.paths[0] in ("own", "parts.0")
        assert times == 2 * (2 + more) * len(unit.groups)


def in_levels(layers: str, parts: str, root: bool) -> str:
    return f"""
        [mesh]
        axis0 = 4
        [[unit]]
        match = "layers.*.parts.*"
        {parts}
        [[unit]]
        match = "layers.*"
        {layers}
        [[unit]]
        match = ""
        recompute = {str(root).lower()}
    """


RECOMPUTED, WHOLE = "recompute = true", 'strategy = "optim_grads"'


@pytest.mark.each_value
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize(
    ("layers", "parts", "root", "stacked"),
    [
        (RECOMPUTED, "", False, False),
        (RECOMPUTED, RECOMPUTED, True, False),
        ("", RECOMPUTED, True, False),
        (WHOLE, "", True, False),
        (WHOLE, RECOMPUTED, True, True),
        (RECOMPUTED, "", True, True),
    ],
)
def test_units_at_several_levels(
    monkeypatch: Any, prefetch: int, layers: str, parts: str, root: bool, stacked: bool
) -> None:
    policy = in_levels(layers, parts, root).replace("[mesh]", f"[mesh]\nprefetch = {prefetch}")
    monkeypatch.setattr(ShardingPlan, "chained", False)
    plan = jax_impl.plan_sharding(
        nnx.eval_shape(lambda: nested.model_of(stacked=stacked)),
        jax_impl.data_parallel_mesh({"axis0": 4}),
        policy=jax_impl.ShardingPolicy.parse(policy, "test"),
        **({"stacked": ["layers"]} if stacked else {}),
    )
    weights = {key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in plan.arrays.items()}
    rows = jax.ShapeDtypeStruct((8, nested.WIDTH), jnp.float32)
    program = jax.make_jaxpr(jax_impl.make_gradients(plan, nested.loss))(weights, rows).jaxpr
    numbers = range(nested.PARTS)[::-1]
    modules = [f"layers.{n}{part}" for n in range(2) for part in (*(f".parts.{k}" for k in numbers), "")]
    square = (nested.WIDTH, nested.WIDTH)
    parameters = [
        Parameter(f"{path}.w", square) if "parts" in path else Parameter(f"{path}.scale", square[:1])
        for path in modules
    ]
    model = Model(
        "test",
        ("", *modules),
        (*parameters, Parameter("scale", square[:1])),
        stacks=("layers",) if stacked else (),
    )
    planned = make_plan(model, parse_policy(policy, "test"), 4, "jax", Workload(1, 3, 1))
    gathers = Counter({key: n for key, n in counted(program) if key[0] == "all_gather"})
    assert gathers == Counter({key: n for key, n in expected(planned).items() if key[0] == "all_gather"})
