"""State of every optimizer at rest, to the byte what each runtime keeps, and what a runtime cannot run."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import jax
import pytest

import jax_impl
from bridge.planning import Workload, make_plan, parse_policy
from bridge.planning.optimizers import CONSTANTS, Optimizer
from tests.planning.test_plan_jax import Whole, frozen_paths
from tests.planning.test_plan_torch import model_of, policy_text
from tests.support.parity.optimizer_runs import state_bytes
from tests.support.parity.plan_runs import Spec
from tests.support.ranks import RankGroup

# Matrices that Adafactor factors in both runtimes and such that optax does not, a stack, a row, a vector, a frozen one.
PART = [
    Spec((130, 128)),
    Spec((12, 5)),
    Spec((2, 3, 8)),
    Spec((1, 9)),
    Spec((7,)),
    Spec((5, 7), frozen=True),
]
OWN = [Spec((9, 4)), Spec((2, 144, 132))]
MESHES = [((3,), "optim_grads_params"), ((2, 2), "hfsdp"), ((2, 2), "hsdp"), ((2,), "no_shard")]


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
@pytest.mark.parametrize(
    ("name", "dtypes", "offload"),
    [
        ("adamw", ("float32", "float32"), 0.0),
        ("adamw", ("bfloat16", "bfloat16"), 0.0),
        ("adamw", ("float16", "float8_e4m3fn"), 0.0),
        ("adamw", ("float32", "float32"), 1.0),
        ("adamw", ("bfloat16", "float32"), 0.3),
        ("sgd", ("float32", "float32"), 0.0),
        ("sgd-momentum", ("float32", "float32"), 0.0),
        ("adafactor", ("float32", "float32"), 0.0),
    ],
)
def test_state_at_rest_in_torch(
    ranks: RankGroup,
    mesh: tuple[int, ...],
    strategy: str,
    name: str,
    dtypes: tuple[str, str],
    offload: float,
) -> None:
    text = policy_text(mesh, strategy, strategy, {})
    world = math.prod(mesh)
    chosen = Optimizer(name, dtypes, Fraction(offload)) if name == "adamw" else Optimizer(name)
    measured = ranks.run(world, state_bytes, text, [PART, PART], OWN, name, dtypes, offload)
    for rank, found in enumerate(measured):
        plan = make_plan(
            model_of([PART, PART], OWN),
            parse_policy(text, "test"),
            world,
            "torch",
            Workload(),
            device=rank,
            optimizer=chosen,
        )
        rest = plan.at_rest
        assert (rest.moments.allocated, rest.host) == (found["device"], found["host"])
        assert rest.moments.allocated + rest.host == found["report"]
        assert (rest.host > 0) == (offload > 0)


def held(tree: Any, device: jax.Device) -> tuple[int, int]:
    """Bytes on the device and in the host's memory; counters and constants are left out."""
    found = [0, 0]
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not jax.tree_util.keystr(path).endswith(CONSTANTS):
            for shard in leaf.addressable_shards:
                if shard.device == device:
                    found[leaf.sharding.memory_kind == "pinned_host"] += shard.data.nbytes
    return found[0], found[1]


@pytest.mark.parametrize(("mesh", "strategy"), MESHES)
@pytest.mark.parametrize(
    ("name", "first", "offload"),
    [
        ("adamw", "bfloat16", 0),
        ("adamw", None, 1),
        ("sgd", None, 0),
        ("sgd-momentum", None, 0),
        ("sgd-momentum", "bfloat16", 0),
        ("lion", "bfloat16", 0),
        ("lion", None, 1),
        ("adafactor", None, 0),
        ("muon", None, 0),
        ("muon", "bfloat16", 0),
    ],
)
def test_state_at_rest_in_jax(
    mesh: tuple[int, ...], strategy: str, name: str, first: str | None, offload: int
) -> None:
    text = policy_text(mesh, strategy, strategy, {})
    chosen = Optimizer(name, (first, None), Fraction(offload))
    plan, weights = jax_impl.fully_shard(
        Whole([PART, PART], OWN),
        jax_impl.data_parallel_mesh({f"axis{number}": size for number, size in enumerate(mesh)}),
        jax_impl.ShardingPolicy.parse(text, "test"),
        frozen=frozen_paths([PART, PART], OWN),
    )
    state = jax_impl.init_state(plan, weights, chosen.transformation()).opt_state
    if offload:
        state = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), state)
    for number, device in enumerate(plan.mesh.devices.flat):
        planned = make_plan(
            model_of([PART, PART], OWN),
            parse_policy(text, "test"),
            math.prod(mesh),
            "jax",
            Workload(),
            device=number,
            optimizer=chosen,
        ).at_rest
        assert (planned.moments.allocated, planned.host) == held(state, device)
