"""The planner's bytes and collectives are those that PyTorch's runtime measures, rank by rank and axis by axis."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from bridge.planning import CostPlan, Workload, make_plan, parse_policy
from bridge.planning.cost.at_rest import at_rest
from bridge.planning.models.model import Model, Parameter
from tests.support.examples import examples
from tests.support.parity.plan_runs import KINDS, Spec, train
from tests.support.ranks import RankGroup

# One axis, and two on which every strategy is legal.
MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 1)]
DTYPES = ("float32", "bfloat16")
MAIN = ("float32", "bfloat16", "given")


def policy_text(mesh: tuple[int, ...], part: str, root: str, precision: dict[str, str]) -> str:
    """``part`` and ``root``: a strategy's name, or how many of the innermost axes are sharded, as in "0 1 2"."""
    axes = [f"axis{number} = {size}" for number, size in enumerate(mesh)]
    lines = ["[mesh]", *axes, "[precision]", *(f'{key} = "{value}"' for key, value in precision.items())]
    for match, chosen in (("parts.*", part), ("", root)):
        lines += ["[[unit]]", f'match = "{match}"']
        if chosen[0].isalpha():
            lines.append(f'strategy = "{chosen}"')
            continue
        for key, depth in zip(
            ("parameters", "gradients", "optimizer"), map(int, chosen.split()), strict=True
        ):
            word = "partial" if key == "gradients" else "replicate"
            words = [word] * (len(mesh) - depth) + ["shard"] * depth
            lines.append(f"{key} = {words}")
    return "\n".join(lines).replace("'", '"')


def model_of(parts: list[list[Spec]], own: list[Spec]) -> Model:
    """What ``plan_runs.Whole`` is made of."""

    def parameters(at: str, specs: list[Spec]) -> list[Parameter]:
        return [
            Parameter(f"{at}.p{k}", spec.shape, "bfloat16" if spec.narrow else "float32", not spec.frozen)
            for k, spec in enumerate(specs)
        ]

    listed = [Parameter("factor", ()), *parameters("own", own)]
    for number, specs in enumerate(parts):
        listed += parameters(f"parts.{number}", specs)
    modules = ("", "own", *(f"parts.{number}" for number in range(len(parts))))
    return Model("test", modules, tuple(listed))


def assert_measured(
    ranks: RankGroup,
    mesh: tuple[int, ...],
    policy: str,
    parts: list[list[Spec]],
    own: list[Spec],
    microbatches: int,
) -> None:
    world = 1
    for size in mesh:
        world *= size
    measured = ranks.run(world, train, policy, parts, own, microbatches)
    for rank, record in enumerate(measured):
        workload = Workload(1, 3, microbatches)
        plan = make_plan(
            model_of(parts, own), parse_policy(policy, "test"), world, "torch", workload, device=rank
        )
        memory, planned = record["memory"], plan.at_rest
        assert memory.main_weights == planned.main_weights.allocated
        assert memory.padding == planned.main_weights.padding
        assert memory.moments == planned.moments.allocated
        assert memory.gradients == planned.gradients.allocated
        assert memory.compute_weights == planned.compute_weights.allocated
        assert memory.total == planned.total
        assert_collectives(plan, record)
        # The runtime lists the root first.
        *inner, root = [unit for unit in plan.units for _ in unit.paths]
        layouts = [group.layout.fingerprint for unit in (root, *inner) for group in unit.groups]
        assert sorted(record["fingerprints"]) == sorted(layouts)


@pytest.mark.parametrize(
    ("mesh", "part", "root"),
    [
        ((2,), "optim", "no_shard"),
        ((2,), "optim_grads", "optim_grads_params"),
        pytest.param((2, 2), "0 0 2", "0 1 2", marks=pytest.mark.slow),
    ],
)
def test_remainders_in_place_of_float32_main_weights(
    ranks: RankGroup, mesh: tuple[int, ...], part: str, root: str
) -> None:
    precision = {"compute": "bfloat16", "reduce": "float32"}
    text = policy_text(mesh, part, root, precision)
    text = text.replace("[precision]", "[precision]\nstore_param_remainders = true")
    specs = [Spec((9, 4)), Spec((7,)), Spec((3, 5), narrow=True)]
    assert_measured(ranks, mesh, text, [specs, specs], [Spec((6, 5))], 2)


def assert_collectives(plan: CostPlan, record: dict[str, Any]) -> None:
    for unit in plan.units:
        for path in unit.paths:
            for collective in KINDS:
                calls = sum(times for call, times in unit.calls.items() if call.kind == collective)
                nbytes = sum(
                    times * call.nbytes for call, times in unit.calls.items() if call.kind == collective
                )
                assert record["calls"].get((path, collective), 0) == calls, (path, collective)
                assert record["bytes"].get((path, collective), 0) == nbytes, (path, collective)
    if record["groups"] is None:
        return
    mesh = plan.mesh
    coordinates = divmod(plan.device, mesh.sizes[-1])
    inner = tuple(coordinates[0] * mesh.sizes[-1] + n for n in range(mesh.sizes[-1]))
    outer = tuple(m * mesh.sizes[-1] + coordinates[1] for m in range(mesh.devices // mesh.sizes[-1]))
    for members, axis in ((inner, mesh.names[-1]), (outer, mesh.names[0])):
        if len(members) > 1:
            for collective in KINDS:
                assert record["groups"].get((collective, members), 0) == plan.traffic.count(
                    collective, axis
                ), (collective, axis)


SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)
SPECS = st.lists(st.builds(Spec, SHAPES, st.booleans(), st.booleans()), max_size=4)


@st.composite
def cases(
    draw: st.DrawFn, main: tuple[str, ...] = ("float32",)
) -> tuple[tuple[int, ...], str, list[list[Spec]], list[Spec], int]:
    mesh = draw(st.sampled_from(MESHES))
    chosen = []
    for _ in range(2):
        depths = sorted(draw(st.integers(0, len(mesh))) for _ in range(3))
        chosen.append(" ".join(map(str, depths)))
    chosen_dtypes = {key: draw(st.none() | st.sampled_from(DTYPES)) for key in ("compute", "reduce", "grad")}
    precision = {"main": draw(st.sampled_from(main))}
    precision |= {key: dtype for key, dtype in chosen_dtypes.items() if dtype is not None}
    parts = draw(st.lists(SPECS, min_size=1, max_size=3))
    return (
        mesh,
        policy_text(mesh, *chosen, precision),
        parts,
        draw(SPECS),
        draw(st.integers(1, 3)),
    )


@pytest.mark.slow
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases(MAIN))
def test_bytes_and_collectives_of_random_models_and_placements(
    ranks: RankGroup, case: tuple[tuple[int, ...], str, list[list[Spec]], list[Spec], int]
) -> None:
    mesh, policy, parts, own, microbatches = case
    assert_measured(ranks, mesh, policy, parts, own, microbatches)


PART = [Spec((7, 5)), Spec((7,)), Spec((5, 7)), Spec((3,), frozen=True)]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        *(((3,), name) for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
        ((2, 2), "hsdp"),
        ((2, 2), "hfsdp"),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_bytes_and_collectives_of_every_strategy(
    ranks: RankGroup, mesh: tuple[int, ...], strategy: str, microbatches: int
) -> None:
    policy = policy_text(mesh, strategy, strategy, {"compute": "bfloat16", "reduce": "float32"})
    assert_measured(ranks, mesh, policy, [PART, PART], [Spec((9, 4))], microbatches)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "precision",
    [
        {},
        {"main": "bfloat16"},
        {"main": "given"},
        {"main": "given", "compute": "float32", "grad": "float32"},
    ],
)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_bytes_of_weights_that_are_given_in_two_dtypes(
    ranks: RankGroup, strategy: str, precision: dict[str, str]
) -> None:
    narrow = [Spec((5, 7), narrow=True), Spec((6, 3), frozen=True, narrow=True)]
    policy = policy_text((2,), strategy, strategy, precision)
    assert_measured(ranks, (2,), policy, [[*PART, *narrow], narrow], PART, 2)


def test_all_devices_together_hold_every_element_once() -> None:
    policy = parse_policy(policy_text((2, 3), "hfsdp", "hfsdp", {}), "test")
    model = model_of([PART, PART], [Spec((9, 4))])
    plan = make_plan(model, policy, 6, "torch", Workload())
    held = [
        unit.count * at_rest(unit.groups, "torch", device).main_weights.real
        for unit in plan.units
        for device in range(6)
    ]
    assert sum(held) == 4 * model.numel


WIDE = [
    Spec((64, 64)),
    Spec((7, 33)),
    Spec((5,)),
    Spec((4, 64), frozen=True),
    Spec((6, 32), frozen=True),
    Spec((3, 32), frozen=True, narrow=True),
]


@pytest.mark.fast_cases("mesh4-hfsdp-mxfp8", "mesh1-optim-float8_e4m3fn")
@pytest.mark.parametrize("gather", ["mxfp8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ((3,), "optim_grads_params"),
        ((2,), "optim"),
        ((1,), "no_shard"),
        ((2, 2), "hsdp"),
        ((2, 2), "hfsdp"),
    ],
)
def test_bytes_and_collectives_of_weights_that_are_gathered_as_float8(
    ranks: RankGroup, mesh: tuple[int, ...], strategy: str, gather: str
) -> None:
    policy = policy_text(mesh, strategy, strategy, {"compute": "bfloat16", "gather": gather})
    assert_measured(ranks, mesh, policy, [WIDE, [Spec((8, 64))]], [Spec((9, 4)), Spec((3,))], 2)
