"""Parameters cut over model axes train as unsharded ones, in float64, and only their own parts travel.

Every row of a batch differs, so every data-parallel rank has data of its own.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl import (
    data_parallel_mesh,
    fully_shard,
    init_state,
    main_weight_adamw,
    make_eval_step,
    make_train_step,
    parameter_norms,
    unshard,
)
from jax_impl.train_state import shard_batch
from tests.support.jax_impl import cut_models
from tests.support.jax_impl.axis_collectives import OverAxes, collectives_over_axes
from tests.support.jax_impl.tiny import loss, tokens

STEPS = 3
TWO, FOUR, THREE_AXES = {"dp": 2, "tp": 2}, {"dp": 2, "tp": 4}, {"outer": 2, "dp": 2, "tp": 2}
ENGINES = ("shard_map", "pjit")


class Case(NamedTuple):
    engine: str
    strategy: str
    mesh: dict[str, int]
    microbatches: int = 1
    stacked: bool = False
    recompute: bool = False
    prefetch: int = 0

    def __str__(self) -> str:
        flags = [name for name in ("stacked", "recompute", "prefetch") if getattr(self, name)]
        mesh = "x".join(map(str, self.mesh.values()))
        return "-".join([self.engine, self.strategy, mesh, f"k{self.microbatches}", *flags])


QUICK = [
    Case("shard_map", "optim_grads_params", TWO),
    Case("shard_map", "hfsdp", THREE_AXES, 2, stacked=True, recompute=True, prefetch=1),
    Case("pjit", "hsdp", THREE_AXES, 2, stacked=True),
]
ON_ONE = itertools.product(
    ENGINES, ("no_shard", "optim", "optim_grads", "optim_grads_params"), (TWO, FOUR), ((1, 0), (2, 1))
)
ON_TWO = itertools.product(
    ENGINES, ("no_shard", "optim", "optim_grads", "hsdp", "hfsdp"), (THREE_AXES,), ((1, 1), (2, 0))
)
# The others of two choices take turns, so that each meets all strategies.
SLOW = [
    Case(engine, strategy, mesh, microbatches, bool(i & 1), bool(i >> 1 & 1), prefetch)
    for i, (engine, strategy, mesh, (microbatches, prefetch)) in enumerate(itertools.chain(ON_ONE, ON_TWO))
]


@functools.cache
def reference(stacked: bool) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    return cut_models.trained(
        cut_models.decoder(stacked), loss, [tokens(16, seed=step) for step in range(STEPS)]
    )


def assert_equal_within(arrays: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert sorted(arrays) == sorted(expected)
    for path, value in expected.items():
        scale = float(np.abs(value).max())
        np.testing.assert_allclose(arrays[path], value, rtol=0, atol=1e-12 * scale, err_msg=path)


def optimizer() -> Any:
    c = cut_models
    return main_weight_adamw(c.LR, c.B1, c.B2, c.EPS, c.DECAY)


@pytest.mark.fast_cases("shard_map-optim_grads_params-2x2-k1", "pjit-hsdp-2x2x2-k2-stacked")
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=str(case)) for case in QUICK),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW if case not in QUICK),
    ],
)
def test_steps_of_a_decoder_equal_those_of_the_unsharded_model(case: Case) -> None:
    with jax.enable_x64(True):
        losses, norms, last = reference(case.stacked)
        plan, weights = fully_shard(
            cut_models.decoder(case.stacked),
            data_parallel_mesh(case.mesh),
            engine=case.engine,
            strategy=case.strategy,
            recompute=case.recompute,
            prefetch=case.prefetch,
            stacked=["layers"] if case.stacked else [],
            parallel=cut_models.DECODER,
        )
        step = make_train_step(plan, loss, optimizer(), microbatches=case.microbatches, metrics=["grad_norm"])
        state, seen = init_state(plan, weights, optimizer()), []
        for number in range(STEPS):
            state, metrics = step(state, tokens(16, seed=number))
            seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        np.testing.assert_allclose(seen, list(zip(losses, norms, strict=True)), rtol=1e-12)
        assert_equal_within(unshard(plan, state.weights), last)


@pytest.mark.fast_cases("ep-tp-shard_map", "ep-pjit")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        pytest.param({"dp": 2, "ep": 2}, cut_models.EXPERTS, id="ep"),
        pytest.param({"dp": 2, "ep": 2, "tp": 2}, cut_models.EXPERTS_AND_TENSORS, id="ep-tp"),
    ],
)
def test_experts_train_as_the_unsharded_model(
    engine: str, mesh: dict[str, int], parallel: dict[str, Any]
) -> None:
    with jax.enable_x64(True):
        batches = [cut_models.expert_rows(seed) for seed in range(STEPS)]
        losses, norms, last = cut_models.trained(cut_models.expert_net(), cut_models.expert_loss, batches)
        plan, weights = fully_shard(
            cut_models.expert_net(), data_parallel_mesh(mesh), engine=engine, parallel=parallel
        )
        step = make_train_step(plan, cut_models.expert_loss, optimizer(), metrics=["grad_norm"])
        state = init_state(plan, weights, optimizer())
        for rows, value, norm in zip(batches, losses, norms, strict=True):
            state, metrics = step(state, rows)
            np.testing.assert_allclose(float(metrics["loss"]), value, rtol=1e-12)
            np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-12)
        assert_equal_within(unshard(plan, state.weights), last)


@pytest.mark.parametrize("engine", ENGINES)
def test_norms_count_cut_parameters_once_and_whole_ones_once(engine: str) -> None:
    with jax.enable_x64(True):
        plan, weights = fully_shard(
            cut_models.decoder(),
            data_parallel_mesh(THREE_AXES),
            engine=engine,
            strategy="hfsdp",
            parallel=cut_models.DECODER,
        )
        expected = {path: np.linalg.norm(np.ravel(x)) for path, x in unshard(plan, weights).items()}
        norms = parameter_norms(plan, weights)
        assert norms.keys() == expected.keys()
        np.testing.assert_allclose(list(norms.values()), list(expected.values()), rtol=1e-13)


@pytest.mark.slow
@pytest.mark.optimized
def test_only_a_devices_own_parts_travel_and_no_weights_over_a_model_axis() -> None:
    with jax.enable_x64(True):
        mesh = data_parallel_mesh(THREE_AXES)
        plan, weights = fully_shard(cut_models.decoder(), mesh, strategy="hfsdp", parallel=cut_models.DECODER)
        step = make_train_step(plan, loss, optimizer())
        batch = shard_batch(plan, tokens(12))
        program = step._gradients.lower(weights, batch, {}, ()).compile()
        collectives = collectives_over_axes(program.as_text(), mesh)
    rows = {key: math.prod(stored.shape) for key, stored in plan.arrays.items()}
    # Of a cut array a device's row is half.
    own = {key: size // 2 if "tp" in key else size for key, size in rows.items()}
    assert any("tp" in key for key in own)
    gathers = [collective for collective in collectives if collective.operation == "all_gather"]
    assert {collective.axes for collective in gathers} == {("dp",), ("outer",)}
    assert set(sizes(gathers, "dp")) == {size for size in own.values() if size}
    assert set(sizes(gathers, "outer")) == {size // 2 for size in own.values() if size}
    reductions = [collective for collective in collectives if collective.operation == "reduce_scatter"]
    assert sorted(sizes(reductions, "dp")) == sorted(size for size in own.values() if size)
    assert sorted(sizes(reductions, "outer")) == sorted(size // 2 for size in own.values() if size)
    over_model = [collective for collective in collectives if "tp" in collective.axes]
    assert all(collective.operation == "psum" and collective.axes == ("tp",) for collective in over_model)
    # Activations of 3 rows, 6 tokens and 12 features, and numbers for each token: no parameter is so large.
    hidden, numbers = 3 * 6 * 12, 3 * 6
    activation_sizes = [array.size for collective in over_model for array in collective.arrays]
    assert set(activation_sizes) == {hidden, numbers}
    # Forward: after attention and mlp of 2 layers, and the embedding. Backward: queries, keys, values, gates and ups of
    # each layer, and the output. A softmax over the vocabulary: maxima, sums, and logits of the targets.
    assert (activation_sizes.count(hidden), activation_sizes.count(numbers)) == (5 + 11, 3)


def sizes(collectives: list[OverAxes], axis: str) -> list[int]:
    return [
        array.size for collective in collectives if collective.axes == (axis,) for array in collective.arrays
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_evaluation_and_statistics(engine: str) -> None:
    with jax.enable_x64(True):
        model = cut_models.expert_net()
        plan, weights = fully_shard(
            model, data_parallel_mesh({"dp": 2, "ep": 2}), engine=engine, parallel=cut_models.EXPERTS
        )
        rows = cut_models.expert_rows()[:7]
        outputs = make_eval_step(plan, lambda model, rows: model(rows))(weights, rows)
        np.testing.assert_allclose(outputs, model(rows), rtol=1e-12)

        def with_aux(model: Any, rows: jax.Array) -> Any:
            output = model(rows)
            # The mean over features of which each ep device has all, and a count.
            return jnp.mean(output**2), {"mean": jnp.mean(output), "rows": len(rows)}

        rows = cut_models.expert_rows()
        step = make_train_step(plan, with_aux, optimizer(), has_aux=True)
        _, metrics = step(init_state(plan, weights, optimizer()), rows)
        np.testing.assert_allclose(metrics["aux"]["mean"], np.mean(model(rows)), rtol=1e-12)
        assert metrics["aux"]["rows"] == len(rows)


@pytest.mark.slow
def test_the_same_step_gives_the_same_bits_however_often() -> None:
    """Collectives of the compiler beside those of the strategy neither hang nor change simulated devices' results."""
    with jax.enable_x64(True):
        plan, weights = fully_shard(
            cut_models.decoder(stacked=True),
            data_parallel_mesh(THREE_AXES),
            strategy="hfsdp",
            stacked=["layers"],
            parallel=cut_models.DECODER,
        )
        step = make_train_step(plan, loss, optimizer(), microbatches=2, donate=False)
        state = init_state(plan, weights, optimizer())
        outcomes = set()
        for _ in range(300):
            after, _ = step(state, tokens(16))
            outcomes.add(tuple(np.asarray(x).tobytes() for x in after.weights.values()))
        assert len(outcomes) == 1
