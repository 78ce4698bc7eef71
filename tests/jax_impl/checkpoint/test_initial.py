"""Weights that a checkpoint lacks, or has in several trees: going on from one's own, and choosing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from bridge.core.formats import CheckpointError
from jax_impl import (
    TrainState,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    main_weight_adamw,
    make_eval_step,
    make_train_step,
    save_checkpoint,
    unshard,
)
from tests.jax_impl.test_losses import assert_close, batch, pair, parameters, quotient, token_losses
from tests.support.jax_impl import checkpoint_runs as runs

OPTIMIZER = main_weight_adamw(1e-2, eps=1e-3, weight_decay=0.1)


def other() -> Any:
    """Values that are not those of ``parameters``, with the same paths."""
    return jax.tree.map(lambda x: x[::-1] * 0.5 - 0.25, parameters())


def saved(path: Path, tree: Any) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def fresh(devices: int, engine: str, tree: Any) -> Any:
    mesh = data_parallel_mesh(devices)
    plan, weights = fully_shard(tree, mesh, units=["layers/*"], engine=engine, strategy="optim_grads_params")
    return plan, init_state(plan, weights, OPTIMIZER)


def assert_trains(plan: Any, state: TrainState, tree: Any) -> None:
    """A forward and a step, against the plain model with ``tree`` on the whole batch."""
    # As many as two, three and four devices divide.
    rows = jax.tree.map(lambda leaf: leaf[:12], batch(5))
    logits = make_eval_step(plan, token_losses)(state, rows)
    np.testing.assert_allclose(logits, token_losses(tree, rows), rtol=2e-5, atol=1e-5)
    expected, gradients = jax.value_and_grad(quotient)(tree, rows)
    reference = optax.adamw(1e-2, eps=1e-3, weight_decay=0.1)
    updates, _ = reference.update(gradients, reference.init(tree), tree)
    state, metrics = make_train_step(plan, pair, OPTIMIZER)(state, rows)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=2e-5)
    assert_close(unshard(plan, state.weights), optax.apply_updates(tree, updates), rtol=2e-5)


@pytest.mark.fast_cases("bias-shard_map", "shape-pjit", "head-pjit")
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
@pytest.mark.parametrize("without", ["head", "bias", "shape"])
def test_weights_that_are_missing_or_of_another_shape_are_the_callers(
    tmp_path: Path, engine: str, without: str
) -> None:
    stored, expected = other(), other()
    if without == "bias":
        # Beside weights of the same flat array that the file has.
        del stored["layers"][0]["b"]
        expected["layers"][0]["b"], name = parameters()["layers"][0]["b"], "params/layers/0/b"
    else:
        stored["head"] = jnp.ones((8, 2)) if without == "shape" else None
        stored = {key: value for key, value in stored.items() if value is not None}
        expected["head"], name = parameters()["head"], "params/head"
    path = saved(tmp_path / "c", {"params": stored})
    plan, initial = fresh(3 if engine == "shard_map" else 2, engine, parameters())
    with pytest.raises(CheckpointError, match=rf"(?=.*{name}).*strict=False with initial=state"):
        load_checkpoint(path, plan, strict=False)
    before = unshard(plan, initial.weights)
    loaded = load_checkpoint(path, plan, OPTIMIZER, strict=False, initial=initial)
    assert [n for n in loaded.fresh if n.startswith("params/")] == [name]
    assert loaded.ignored == (("params/head",) if without == "shape" else ())
    runs.assert_same_bits(
        unshard(plan, loaded.state.weights),
        {"head": expected["head"], **{f"layers/0/{k}": v for k, v in expected["layers"][0].items()}},
    )
    for key in plan.arrays:
        plan.check_array(key, loaded.state.weights[key])
    assert_trains(plan, loaded.state, expected)
    # The step used up what was loaded, not the caller's state.
    runs.assert_same_bits(unshard(plan, initial.weights), before)
    weights = load_checkpoint(path, plan, strict=False, initial=initial.weights).state.weights
    runs.assert_same_bits({"head": unshard(plan, weights)["head"]}, {"head": jnp.asarray(expected["head"])})


def test_moments_of_weights_that_are_the_callers_are_fresh(tmp_path: Path) -> None:
    plan, state = fresh(4, "shard_map", other())
    state, _ = make_train_step(plan, pair, OPTIMIZER)(state, batch())
    tensors = runs.logical(plan, state)
    del tensors["params/head"]
    path = saved(tmp_path / "c", runs.nested(tensors))
    plan, initial = fresh(2, "shard_map", parameters())
    loaded = load_checkpoint(path, plan, OPTIMIZER, strict=False, initial=initial)
    assert set(loaded.fresh) == {"params/head", "opt_state/mu/head", "opt_state/nu/head"}
    expected = tensors | {"params/head": parameters()["head"]}
    expected |= {f"opt_state/{moment}/head": np.zeros((8, 1), np.float32) for moment in ("mu", "nu")}
    runs.assert_same_bits(runs.logical(plan, loaded.state), expected)


def test_a_stack_and_variables_are_kept_like_the_rest(tmp_path: Path) -> None:
    case = (2, runs.DEFAULT, "shard_map", "mixed")
    plan, initial = runs.plan_of(*case), runs.fresh(*case)
    before = runs.logical(plan, initial)
    tensors = {name: np.cos(value + 1) for name, value in before.items() if name.startswith("params/")}
    kept = {
        "params/layers/linear/kernel",
        "params/embed/embedding",
        *(n for n in before if "variables/" in n),
    }
    path = saved(tmp_path / "c", runs.nested({n: v for n, v in tensors.items() if n not in kept}))
    loaded = load_checkpoint(path, plan, runs.OPTIMIZER, strict=False, initial=initial)
    assert {n for n in loaded.fresh if not n.startswith("opt_state/")} == kept
    expected = before | tensors | {name: before[name] for name in kept}
    runs.assert_same_bits(runs.logical(plan, loaded.state), expected)
    runs.train(loaded.state, *case, first=0, count=1)
    runs.assert_same_bits(runs.logical(plan, initial), before)


def test_initial_values_of_another_plan_or_used_up_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"params": {"layers": other()["layers"]}})
    plan, initial = fresh(2, "shard_map", parameters())
    with pytest.raises(ValueError, match="initial: expected strict=False"):
        load_checkpoint(path, plan, initial=initial)
    with pytest.raises(
        ValueError, match=r"initial: expected the plan's weights \['layers/0', ''\], got \['x'\]"
    ):
        load_checkpoint(path, plan, strict=False, initial={"x": jnp.ones(3)})
    shapes: Any = jax.eval_shape(lambda: initial.weights)
    with pytest.raises(ValueError, match=r"initial: array '': expected a jax.Array of float32, got Sh"):
        load_checkpoint(path, plan, strict=False, initial=shapes)
    other_plan, elsewhere = fresh(4, "shard_map", parameters())
    with pytest.raises(ValueError, match=r"expected shape .* over 2 devices"):
        load_checkpoint(path, plan, strict=False, initial=elsewhere)
    make_train_step(other_plan, pair, OPTIMIZER)(elsewhere, batch())
    with pytest.raises(ValueError, match="donated"):
        load_checkpoint(path, other_plan, strict=False, initial=elsewhere)
    nothing = saved(tmp_path / "d", {"params": {"another": np.ones(3)}})
    with pytest.raises(CheckpointError, match="Missing: params/"):
        load_checkpoint(nothing, plan, strict=False, initial=initial)


def test_of_several_trees_of_weights_one_is_chosen(tmp_path: Path) -> None:
    plan, _ = fresh(2, "shard_map", parameters())
    stored = {"teacher": parameters(), "student": {"params": other()}, "step": np.int64(7)}
    path = saved(tmp_path / "c", stored)
    message = r"in 'student/params' and 'teacher': choose by load_checkpoint\(..., tree='student/params'\)"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, plan)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, plan, strict=False, tree="studnet")
    for tree in ("student", "student/params"):
        loaded = load_checkpoint(path, plan, tree=tree)
        assert_close(unshard(plan, loaded.state.weights), other(), rtol=0)
        assert loaded.train == {"step": 7}
        assert {name for name in loaded.ignored if not name.startswith("teacher/")} == set()
    loaded = load_checkpoint(path, plan, OPTIMIZER, strict=False, tree="teacher")
    assert_close(unshard(plan, loaded.state.weights), parameters(), rtol=0)
    assert len(loaded.ignored) == 3
    assert_trains(plan, loaded.state, parameters())


def test_the_step_of_a_chosen_tree_comes_before_the_step_beside_the_trees(tmp_path: Path) -> None:
    plan, _ = fresh(2, "shard_map", parameters())
    student = {"params": other(), "step": np.int64(9)}
    path = saved(tmp_path / "c", {"teacher": parameters(), "student": student, "step": np.int64(7)})
    assert load_checkpoint(path, plan, strict=False, tree="student").train == {"step": 9}
    assert load_checkpoint(path, plan, strict=False, tree="teacher").train == {"step": 7}


def test_averages_beside_the_weights_and_one_tree_of_another_name(tmp_path: Path) -> None:
    plan, _ = fresh(2, "shard_map", parameters())
    path = saved(tmp_path / "c", {"params": parameters(), "ema": other()})
    with pytest.raises(CheckpointError, match=r"in 'ema' and 'params': .*tree='ema'"):
        load_checkpoint(path, plan)
    assert_close(unshard(plan, load_checkpoint(path, plan, tree="ema").state.weights), other(), rtol=0)
    assert_close(
        unshard(plan, load_checkpoint(path, plan, tree="params").state.weights), parameters(), rtol=0
    )
    path = saved(tmp_path / "d", {"network": other()})
    with pytest.raises(CheckpointError, match=r"in 'network': choose by .*tree='network'"):
        load_checkpoint(path, plan)


def test_a_chosen_tree_may_be_a_whole_state_or_have_its_optimizer_beside_it(tmp_path: Path) -> None:
    plan, state = fresh(4, "shard_map", other())
    state, _ = make_train_step(plan, pair, OPTIMIZER)(state, batch())
    tensors = runs.logical(plan, state)
    whole = {f"student/{name}": value for name, value in tensors.items()}
    beside = {n.replace("params/", "student/"): value for n, value in tensors.items()}
    teacher = {f"teacher/{n.removeprefix('params/')}": v + 1 for n, v in tensors.items() if "params/" in n}
    plan, _ = fresh(2, "pjit", parameters())
    for number, names in enumerate((whole, beside)):
        path = saved(tmp_path / str(number) / "c", runs.nested(names | teacher))
        loaded = load_checkpoint(path, plan, OPTIMIZER, tree="student")
        runs.assert_same_bits(runs.logical(plan, loaded.state), tensors)
        assert len(loaded.ignored) == 3
    path = saved(tmp_path / "more", runs.nested(whole | teacher | {"student/more": np.ones(2)}))
    with pytest.raises(CheckpointError, match="unexpected: student/more"):
        load_checkpoint(path, plan, OPTIMIZER, tree="student")


def test_a_tree_of_a_saved_state_may_be_named(tmp_path: Path) -> None:
    plan, state = fresh(2, "shard_map", other())
    save_checkpoint(tmp_path / "c", plan, state)
    loaded = load_checkpoint(tmp_path / "c", plan, OPTIMIZER, tree="params")
    runs.assert_same_bits(runs.logical(plan, loaded.state), runs.logical(plan, state))
