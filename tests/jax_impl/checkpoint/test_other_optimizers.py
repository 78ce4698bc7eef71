"""Checkpoints of other optimizers, or of some moments only: what fits is kept, and the rest is fresh."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from bridge.core.formats import CheckpointError
from jax_impl import (
    load_checkpoint,
    main_weight_adamw,
    unshard,
    variable_leaves,
)
from tests.support.jax_impl.stock_programs import (
    ADAMW,
    ENGINES,
    WIDTH,
    Net,
    adamw,
    assert_goes_on_as,
    clipped,
    flax_train_state,
    plan_of,
    save,
    trained,
    without,
)


def _is_adam(state: Any) -> bool:
    return isinstance(state, optax.ScaleByAdamState)


CHANGES: dict[str, tuple[Any, Any]] = {
    "chain to adamw": (clipped, adamw),
    "adamw to chain": (adamw, clipped),
    "chain to main weights": (clipped, functools.cache(lambda: main_weight_adamw(**ADAMW))),
    "injected": (adamw, functools.cache(lambda: optax.inject_hyperparams(optax.adamw)(**ADAMW))),
    "schedule": (adamw, functools.cache(lambda: optax.adamw(**ADAMW | {"learning_rate": lambda _: 1e-2}))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "engine"),
    [
        pytest.param(c, e, marks=() if (c, e) == ("chain to adamw", "shard_map") else pytest.mark.slow)
        for c in CHANGES
        for e in ENGINES
    ],
)
def test_another_optimizer_keeps_the_moments_that_fit(tmp_path: Path, change: str, engine: str) -> None:
    before, after = (make() for make in CHANGES[change])
    program = trained(before)
    path = save(tmp_path / "c", flax_train_state(program))
    variables = variable_leaves(Net())
    with pytest.raises(
        CheckpointError, match=r"strict=False continues with the tensors that fit.*opt_state/"
    ):
        load_checkpoint(path, plan_of(engine), after, variables=variables)
    loaded = load_checkpoint(path, plan_of(engine), after, strict=False, variables=variables)
    fresh = [name for name in loaded.fresh if not name.startswith("variables/")]
    hyper = {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay"}
    assert set(fresh) == {
        "injected": {"opt_state/count", *(f"opt_state/hyperparams/{name}" for name in hyper)},
        "schedule": {"opt_state/2/count"},
    }.get(change, set())
    assert loaded.ignored == ()
    # The same moments, moved by hand.
    old = program.optimizer.opt_state
    program.optimizer = nnx.Optimizer(
        program.model, adamw() if change == "chain to main weights" else after, wrt=nnx.Param
    )
    moments = next(s for s in jax.tree.leaves(old, is_leaf=_is_adam) if _is_adam(s))
    program.optimizer.opt_state = jax.tree.map(
        lambda s: moments if _is_adam(s) else s, program.optimizer.opt_state, is_leaf=_is_adam
    )
    assert_goes_on_as(program, loaded, engine, after)


@pytest.mark.parametrize("engine", ["shard_map", pytest.param("pjit", marks=pytest.mark.slow)])
def test_moments_of_some_parameters_are_kept_and_the_others_fresh(tmp_path: Path, engine: str) -> None:
    """Of one unit, and so of one flat array; accumulators of ``adagrad`` do not begin at zero."""
    optimizer = optax.adagrad(1e-2, initial_accumulator_value=0.5)
    program, plan = trained(optimizer), plan_of(engine)
    tree = flax_train_state(program)
    squares = tree.opt_state[0].sum_of_squares
    blocks = squares["blocks"]
    fewer = without(squares, "blocks", 1, "bias")
    path = save(tmp_path / "c", {"params": tree.params, "opt_state": [{"sum_of_squares": fewer}, None]})
    variables = variable_leaves(Net())
    loaded = load_checkpoint(path, plan, optimizer, strict=False, variables=variables)
    fresh = {name for name in loaded.fresh if not name.startswith("variables/")}
    assert fresh == {"opt_state/0/sum_of_squares/blocks/1/bias"}
    accumulators = unshard(plan, loaded.state.opt_state[0].sum_of_squares)
    np.testing.assert_array_equal(accumulators["blocks/1/bias"], np.full(WIDTH, 0.5, np.float32))
    np.testing.assert_array_equal(accumulators["blocks/1/kernel"], blocks[1]["kernel"])
    np.testing.assert_array_equal(accumulators["blocks/0/bias"], blocks[0]["bias"])
    assert not np.array_equal(accumulators["blocks/0/bias"], np.full(WIDTH, 0.5, np.float32))


@pytest.mark.parametrize("lacks", ["moments", "count"])
def test_moments_and_their_count_are_taken_together_or_not_at_all(tmp_path: Path, lacks: str) -> None:
    program, plan = trained(adamw()), plan_of("shard_map")
    adam = flax_train_state(program).opt_state[0]
    # The count of a schedule counts no moments.
    state = [{"mu": adam.mu, "nu": adam.nu}, {"count": adam.count}]
    opt_state = [{"count": adam.count}, None] if lacks == "moments" else state
    path = save(tmp_path / "c", {"params": program.parameters, "opt_state": opt_state})
    loaded = load_checkpoint(path, plan, adamw(), strict=False, variables=variable_leaves(Net()))
    assert int(loaded.state.opt_state[0].count) == 0
    assert not any(np.any(moments) for moments in loaded.state.opt_state[0].nu.values())
    assert len(loaded.ignored) == (1 if lacks == "moments" else 11)
    assert {"opt_state/0/count", "opt_state/0/nu/head/kernel"} <= {*loaded.fresh}
