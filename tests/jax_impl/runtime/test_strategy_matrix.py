"""Every strategy of both engines, in float64, against AdamW in NumPy on gradients of the plain model and whole batch.

Every row of a batch differs, so every device and microbatch has data of its own. float64 leaves 1e-12 for the order of
sums; anything that is wrong by a factor, a row or a missing reduction is far off.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_impl import data_parallel_mesh, fully_shard, init_state, main_weight_adamw, make_train_step, unshard
from jax_impl.models import Decoder
from tests.support.jax_impl.tiny import CONFIG, loss, named, tokens

ROWS, STEPS = 72, 10
# A large eps keeps Adam from hiding a wrong gradient scale, and from magnifying rounding where gradients are tiny.
LR, B1, B2, EPS, DECAY = 1e-2, 0.8, 0.9, 1e-3, 0.1
# In the pjit engine what does not divide is whole on every device: most of this divides by 2, 3, 4 and 8.
EVEN = dataclasses.replace(CONFIG, d_model=24, d_ff=48, vocab_size=25)
CONFIGS = {"shard_map": CONFIG, "pjit": EVEN}


class Case(NamedTuple):
    engine: str
    strategy: str
    mesh: tuple[int, ...]
    microbatches: int
    stacked: bool
    recompute: bool
    prefetch: int = 0

    def __str__(self) -> str:
        flags = [name for name in ("stacked", "recompute", "prefetch") if getattr(self, name)]
        mesh = "x".join(map(str, self.mesh))
        return "-".join([self.engine, self.strategy, mesh, f"k{self.microbatches}", *flags])


ONE_AXIS = itertools.product(
    CONFIGS,
    ["no_shard", "optim", "optim_grads", "optim_grads_params"],
    [(1,), (2,), (3,), (4,), (8,)],
    [1, 3],
    [False, True],
    [False, True],
)
TWO_AXES = [
    (engine, strategy, mesh, *rest)
    for engine, strategy, mesh, rest in itertools.product(
        CONFIGS,
        ["no_shard", "optim", "optim_grads", "hsdp", "hfsdp"],
        [(2, 2), (2, 4), (3, 2), (1, 2)],
        [(1, False, True), (3, True, False)],
    )
]
CASES = [
    # Prefetch goes with no other choice, and costs no further case.
    [Case(*values, prefetch=(i ^ i >> 1 ^ i >> 2 ^ i >> 3) & 1) for i, values in enumerate(cases)]
    for cases in (ONE_AXIS, TWO_AXES)
]
# The cheapest that have every value of every choice, which a test below makes sure of.
FAST = {
    "shard_map-no_shard-1-k1",
    "shard_map-no_shard-2-k3",
    "shard_map-optim-4-k1-stacked-prefetch",
    "shard_map-optim_grads-3-k1-stacked-recompute",
    "shard_map-optim_grads_params-2-k3-prefetch",
    "shard_map-hsdp-2x4-k1-recompute",
    "shard_map-hfsdp-1x2-k3-stacked-prefetch",
    "pjit-no_shard-8-k3-stacked",
    "pjit-optim_grads-4-k1-prefetch",
    "pjit-optim_grads_params-3-k1-recompute",
    "pjit-optim-3x2-k1-recompute-prefetch",
    "pjit-hsdp-2x2-k3-stacked-prefetch",
    "pjit-hfsdp-1x2-k1-recompute-prefetch",
}
QUICK = [case for case in itertools.chain(*CASES) if str(case) in FAST]


def decoder(engine: str, stacked: bool) -> Decoder:
    """The same weights, stacked or not; larger than fresh ones, so that every parameter matters to the loss."""
    model = Decoder(CONFIGS[engine], rngs=nnx.Rngs(1), dtype=jnp.float64, stacked=stacked)
    graphdef, state = nnx.split(model)

    def scaled(path: tuple[Any, ...], variable: Any) -> Any:
        return variable if path[-1] == "scale" else jax.tree.map(lambda x: 10 * x, variable)

    flat = [(path, scaled(path, variable)) for path, variable in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def batch(step: int) -> np.ndarray:
    return tokens(ROWS, seed=step)


@functools.cache
def reference(engine: str) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Losses of each step, first gradients, and last weights."""
    graphdef, state = nnx.split(decoder(engine, False))
    gradients_of = jax.jit(jax.value_and_grad(lambda s, rows: loss(nnx.merge(graphdef, s), rows)))
    paths, tree = list(named(state)), jax.tree.structure(state)
    weights = [np.asarray(x) for x in jax.tree.leaves(state)]
    m, v = ([np.zeros_like(w) for w in weights] for _ in range(2))
    losses, first = [], {}
    for t in range(1, STEPS + 1):
        value, gradients = gradients_of(jax.tree.unflatten(tree, weights), batch(t))
        leaves = [np.asarray(g) for g in jax.tree.leaves(gradients)]
        losses.append(float(value))
        first = first or dict(zip(paths, leaves, strict=True))
        m = [B1 * a + (1 - B1) * g for a, g in zip(m, leaves, strict=True)]
        v = [B2 * a + (1 - B2) * g * g for a, g in zip(v, leaves, strict=True)]
        weights = [
            w * (1 - LR * DECAY) - LR * (a / (1 - B1**t)) / (np.sqrt(b / (1 - B2**t)) + EPS)
            for w, a, b in zip(weights, m, v, strict=True)
        ]
    return losses, first, dict(zip(paths, weights, strict=True))


def stacked_names(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """``layers/0/x`` and ``layers/1/x`` as ``layers/x`` with a leading axis."""
    result: dict[str, Any] = {}
    for path, value in values.items():
        parts = path.split("/")
        if parts[0] == "layers":
            result.setdefault("/".join(["layers", *parts[2:]]), []).append(value)
        else:
            result[path] = value
    return {path: np.stack(value) if isinstance(value, list) else value for path, value in result.items()}


def assert_equal_within(arrays: dict[str, Any], expected: dict[str, np.ndarray], tolerance: float) -> None:
    assert sorted(arrays) == sorted(expected)
    for path, value in expected.items():
        scale = float(np.abs(value).max())
        assert scale > 0, f"{path} takes no part in the test"
        np.testing.assert_allclose(arrays[path], value, rtol=0, atol=tolerance * scale, err_msg=path)


def mesh_of(sizes: tuple[int, ...]) -> jax.sharding.Mesh:
    return data_parallel_mesh(dict(zip(("outer", "inner")[-len(sizes) :], sizes, strict=True)))


@pytest.mark.fast_cases(
    "shard_map-hsdp-2x4-k1-recompute",
    "pjit-optim_grads-4-k1-prefetch",
    "pjit-optim_grads_params-3-k1-recompute",
    "shard_map-optim_grads-3-k1-stacked-recompute",
    "shard_map-optim_grads_params-2-k3-prefetch",
    "shard_map-hfsdp-1x2-k3-stacked-prefetch",
    "shard_map-no_shard-1-k1",
    # Alone in the fast tier, this case fails without the all-reduce, or with the mean over a wrong count.
    "shard_map-no_shard-2-k3",
    "pjit-optim-3x2-k1-recompute-prefetch",
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=[] if case in QUICK else [pytest.mark.slow])
        for case in itertools.chain(*CASES)
    ],
)
def test_ten_steps_equal_those_of_the_unsharded_model(case):
    with jax.enable_x64(True):
        losses, first, last = reference(case.engine)
        optimizer = main_weight_adamw(LR, B1, B2, EPS, DECAY)
        plan, weights = fully_shard(
            decoder(case.engine, case.stacked),
            mesh_of(case.mesh),
            engine=case.engine,
            strategy=case.strategy,
            recompute=case.recompute,
            prefetch=case.prefetch,
            stacked=["layers"] if case.stacked else [],
        )
        if math.prod(case.mesh) > 1 and case.strategy != "no_shard":
            cut = [key for key in weights if not weights[key].sharding.is_fully_replicated]
            assert cut or plan.axes.shards(1) == 1, "nothing is sharded, so this would prove nothing"
        step = make_train_step(plan, loss, optimizer, microbatches=case.microbatches)
        _, gradients = step.gradients(weights, batch(1))
        expected = (stacked_names(first), stacked_names(last)) if case.stacked else (first, last)
        assert_equal_within(unshard(plan, gradients), expected[0], 1e-12)
        state, seen = init_state(plan, weights, optimizer), []
        for t in range(1, STEPS + 1):
            state, metrics = step(state, batch(t))
            seen.append(float(metrics["loss"]))
        np.testing.assert_allclose(seen, losses, rtol=1e-12)
        assert_equal_within(unshard(plan, state.weights), expected[1], 1e-12)


def test_the_quick_cases_have_every_value_of_every_choice():
    every = list(itertools.chain(*CASES))
    for field in Case._fields:
        assert {getattr(case, field) for case in QUICK} == {getattr(case, field) for case in every}, field
    for engine in CONFIGS:
        assert {case.strategy for case in QUICK if case.engine == engine} == {case.strategy for case in every}
