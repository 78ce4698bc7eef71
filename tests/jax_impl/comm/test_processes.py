"""Training and checkpoints on several processes, held to one process and to the unsharded model."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from orbax.checkpoint.experimental import v1

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import open_checkpoint
from jax_impl import load_checkpoint, main_weight_adamw, save_checkpoint, variable_leaves
from jax_impl.modules.module_tree import parameter_leaves
from tests.support.jax_impl import checkpoint_runs as runs
from tests.support.jax_impl import process_job as jobs
from tests.support.jax_impl.tiny import named, tokens

STEPS, SAVED_AFTER = 5, 3
OPTIMIZER = main_weight_adamw(**runs.STEADY)
# What each group trains and saves, by name: (group, case).
SAVES = {
    "hfsdp": ("2x2", runs.Case((2, 2), "hfsdp")),
    "pjit": ("2x2", runs.Case(4, "optim_grads_params", "pjit")),
    "mixed": ("2x2", runs.Case(4, "optim_grads_params", "shard_map", "mixed")),
    "optim": ("4x1", runs.Case(4, "optim")),
    "pjit hfsdp": ("4x1", runs.Case((2, 2), "hfsdp", "pjit")),
    # Rows of one tp device on both processes, and both tp devices on one.
    "tensors": ("4x1", runs.Case(2, "optim_grads_params", tensors=2)),
}
# Which of these the other group goes on with, and how it is sharded there.
LOADS = [
    ("hfsdp", "4x1", runs.Case(4, "optim")),
    ("pjit", "4x1", runs.Case(4, "optim")),
    ("mixed", "4x1", runs.Case(4, "optim_grads_params", "shard_map", "mixed")),
    ("optim", "2x2", runs.Case(4, "optim_grads_params", "pjit")),
    ("pjit hfsdp", "2x2", runs.Case((2, 2), "hfsdp")),
    ("tensors", "2x2", runs.Case(4, "optim")),
    ("pjit hfsdp", "2x2", runs.Case(2, "optim_grads_params", "pjit", tensors=2)),
]


def each_save() -> list[Any]:
    return [pytest.param(name, marks=() if name == "hfsdp" else pytest.mark.slow, id=name) for name in SAVES]


def each_load() -> list[Any]:
    return [pytest.param(*load, id=f"{load[0]} in {load[1]}") for load in LOADS]


class Groups(dict[str, jobs.Group]):
    """By processes x devices, started when first asked for."""

    def __missing__(self, name: str) -> jobs.Group:
        self[name] = jobs.Group(*map(int, name.split("x")))
        return self[name]


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, jobs.Group]]:
    groups = Groups()
    yield groups
    for group in groups.values():
        group.close()


class Saved(dict[str, tuple[Path, list[Any]]]):
    """By name, made when first asked for: the path of a save, and what each process of its group answered."""

    def __init__(self, groups: dict[str, jobs.Group], base: Path) -> None:
        super().__init__()
        self._groups, self._base = groups, base

    def __missing__(self, name: str) -> tuple[Path, list[Any]]:
        group, case = SAVES[name]
        path = self._base / name.replace(" ", "-")
        self[name] = (
            path,
            self._groups[group].run(jobs.train_and_save, case=case, path=str(path), timeout=500),
        )
        return self[name]


@pytest.fixture(scope="module")
def saved(groups: dict[str, jobs.Group], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(groups, tmp_path_factory.mktemp("saved"))


@functools.cache
def unsharded() -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and last weights of plain JAX and optax on one device."""
    graphdef, weights = nnx.split(runs.model())
    optimizer = optax.adamw(**runs.STEADY)
    opt_state = optimizer.init(weights)

    @jax.jit
    def step(weights: Any, opt_state: Any, rows: jax.Array) -> tuple[jax.Array, Any, Any]:
        value, gradients = jax.value_and_grad(lambda w: runs.loss_of(nnx.merge(graphdef, w), rows))(weights)
        updates, opt_state = optimizer.update(gradients, opt_state, weights)
        return value, optax.apply_updates(weights, updates), opt_state

    losses = []
    for index in range(STEPS):
        value, weights, opt_state = step(weights, opt_state, tokens(runs.ROWS, seed=100 + index))
        losses.append(float(value))
    return losses, {path: np.asarray(value) for path, value in named(weights).items()}


@functools.cache
def one_process(case: runs.Case) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same run on as many devices of this one process."""
    state = runs.fresh(*case, optimizer=OPTIMIZER)
    state, losses = runs.train(state, *case, first=0, count=STEPS, optimizer=OPTIMIZER)
    return losses, runs.logical(runs.plan_of(*case), state)


def assert_close(tensors: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        other = (
            np.frombuffer(tensors[name], value.dtype).reshape(value.shape)
            if "variables" in name
            else tensors[name]
        )
        np.testing.assert_allclose(other, value, rtol=1e-6, atol=1e-6, err_msg=name)


def weights_of(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix("params/"): value for name, value in arrays.items() if name.startswith("params/")
    }


def raised(answers: list[Any]) -> list[str]:
    assert all("raised" in answer for answer in answers), answers
    return [answer["raised"] for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("name", each_save())
def test_several_processes_save_under_a_mapping_what_convert_makes_of_the_plain_checkpoint(
    saved: Saved, tmp_path: Path, name: str
) -> None:
    path, answers = saved[name]
    assert all("raised" not in answer for answer in answers), answers
    if SAVES[name][1].model != "decoder":
        return
    axes = {"d": runs.CONFIG.head_dim}
    convert(path, tmp_path / "converted", to="orbax", mapping="decoder", into="torch", axes=axes)
    with open_checkpoint(f"{path}-mapped") as mapped, open_checkpoint(tmp_path / "converted") as expected:
        assert {n: i.shape for n, i in mapped.tensors.items()} == {
            n: i.shape for n, i in expected.tensors.items()
        }
        for tensor in expected.tensors:
            assert mapped.read(tensor).tobytes() == expected.read(tensor).tobytes(), tensor


@pytest.mark.parametrize("name", each_save())
def test_a_run_on_several_processes_is_the_run_of_one_process(saved: Saved, name: str) -> None:
    path, answers = saved[name]
    for answer in answers:
        assert "raised" not in answer, answer
        assert answer == answers[0]
    losses, final = one_process(SAVES[name][1])
    np.testing.assert_allclose(answers[0]["losses"], losses, rtol=0, atol=1e-6)
    assert_close(dict(np.load(f"{path}-final.npz")), final)
    if name != "mixed":
        np.testing.assert_allclose(answers[0]["losses"], unsharded()[0], rtol=0, atol=1e-6)
        assert_close(weights_of(dict(np.load(f"{path}-final.npz"))), unsharded()[1])


@pytest.mark.parametrize("name", each_save())
def test_each_process_wrote_a_part_and_stock_orbax_reads_the_whole_in_one(saved: Saved, name: str) -> None:
    path, answers = saved[name]
    processes = 2 if SAVES[name][0] == "2x2" else 4
    assert answers[0]["train"] == {"step": SAVED_AFTER, "rank": 0}
    assert len(list(path.glob("ocdbt.process_*/manifest.ocdbt"))) == processes
    assert {file.name for file in path.iterdir()} == {
        "_CHECKPOINT_METADATA",
        "_METADATA",
        "commit_success.txt",
        "d",
        "manifest.ocdbt",
        "twinshard_manifest.json",
        *(f"ocdbt.process_{i}" for i in range(processes)),
    }
    expected = dict(np.load(f"{path}-saved.npz"))
    with open_checkpoint(path) as reader:
        ours = {n: reader.read(n) for n in reader.tensors if not n.startswith("train/")}
        assert any(len(info.chunks) > 2 for info in reader.tensors.values())
    with ocp.StandardCheckpointer() as checkpointer:
        v0 = checkpointer.restore(path)
    for restored in (ours, leaves(v0), leaves(v1.load(path))):
        restored = {n: np.asarray(value) for n, value in restored.items() if not n.startswith("train/")}
        assert restored.keys() == expected.keys()
        for n, value in expected.items():
            assert restored[n].tobytes() == value.tobytes(), n


def leaves(tree: Any) -> dict[str, Any]:
    return {"/".join(key.key for key in keys): value for keys, value in jax.tree.leaves_with_path(tree)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "group", "case"), each_load())
def test_another_number_of_processes_goes_on_with_it_under_another_strategy(
    groups: dict[str, jobs.Group],
    saved: Saved,
    tmp_path: Path,
    name: str,
    group: str,
    case: runs.Case,
) -> None:
    path, answers = saved[name]
    arguments = {"load": str(path), "first": SAVED_AFTER, "before": STEPS - SAVED_AFTER, "after": 0}
    resumed = groups[group].run(
        jobs.train_and_save, case=case, path=str(tmp_path / "c"), timeout=500, **arguments
    )
    assert all("losses" in answer for answer in resumed), resumed
    loaded, before = dict(np.load(tmp_path / "c-loaded.npz")), dict(np.load(f"{path}-saved.npz"))
    runs.assert_same_bits(loaded, before)
    np.testing.assert_allclose(resumed[0]["losses"], answers[0]["losses"][SAVED_AFTER:], rtol=0, atol=1e-6)
    assert_close(dict(np.load(tmp_path / "c-final.npz")), one_process(SAVES[name][1])[1])


@pytest.mark.parametrize("name", each_save())
def test_one_process_goes_on_with_it(saved: Saved, name: str) -> None:
    path, answers = saved[name]
    case = runs.Case(3, "optim", "pjit") if name != "mixed" else SAVES["mixed"][1]
    plan = runs.plan_of(*case)
    loaded = load_checkpoint(path, plan, OPTIMIZER)
    tensors = runs.logical(plan, loaded.state)
    for tensor, value in np.load(f"{path}-saved.npz").items():
        assert tensors[tensor].tobytes() == value.tobytes(), tensor
    assert np.isfinite(runs.forward(plan, loaded.state)).all()
    state, losses = runs.train(loaded.state, *case, first=SAVED_AFTER, count=2, optimizer=OPTIMIZER)
    np.testing.assert_allclose(losses, answers[0]["losses"][SAVED_AFTER:], rtol=0, atol=1e-6)
    assert_close(weights_of(runs.logical(plan, state)), weights_of(one_process(SAVES[name][1])[1]))


def test_the_save_of_one_process_is_loaded_by_several(groups: dict[str, jobs.Group], tmp_path: Path) -> None:
    plan, state = runs.plan_of(3, "optim"), runs.fresh(3, "optim")
    save_checkpoint(tmp_path / "c", plan, state)
    assert groups["2x2"].run(jobs.load, path=str(tmp_path / "c")) == [{"loaded": True}] * 2


@pytest.mark.slow
def test_several_processes_go_on_with_a_stock_checkpoint_and_leave_steps_for_stock_orbax(
    groups: dict[str, jobs.Group], tmp_path: Path
) -> None:
    """Of moments, one flat array has some that are stored and some that are not."""
    case = SAVES["hfsdp"][1]
    plan = runs.plan_of(*case)
    state, _ = runs.train(
        runs.fresh(*case, optimizer=OPTIMIZER), *case, first=0, count=2, optimizer=OPTIMIZER
    )
    tensors = runs.logical(plan, state)
    lacking = [f"opt_state/{moment}/layers/0/mlp/up/kernel" for moment in ("mu", "nu")]
    stored = {
        name.replace("opt_state/", "opt_state/0/"): value
        for name, value in tensors.items()
        if name not in lacking
    }
    with ocp.CheckpointManager(tmp_path / "stock") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(runs.nested(stored)))
    loaded = load_checkpoint(tmp_path / "stock", plan, OPTIMIZER, strict=False)
    assert sorted(loaded.fresh) == lacking
    _, expected = runs.train(loaded.state, *case, first=2, count=3, optimizer=OPTIMIZER)
    path = tmp_path / "run" / "5"
    path.parent.mkdir()
    arguments = {"load": str(tmp_path / "stock"), "first": 2, "before": 3, "after": 0}
    answers = groups["2x2"].run(
        jobs.train_and_save, case=case, path=str(path), strict=False, item="default", timeout=500, **arguments
    )
    assert all("losses" in answer for answer in answers), answers
    for answer in answers:
        np.testing.assert_allclose(answer["losses"], expected, rtol=1e-6)
    before = {name: x if name not in lacking else np.zeros_like(x) for name, x in tensors.items()}
    runs.assert_same_bits(dict(np.load(f"{path}-loaded.npz")), before)
    for file in tmp_path.glob("run/*.npz"):
        file.rename(tmp_path / file.name)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore(5)
    assert restored["train"]["step"] == 5
    restored = leaves({name: value for name, value in restored.items() if name != "train"})
    runs.assert_same_bits(restored, dict(np.load(tmp_path / "5-saved.npz")))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shard_map", "pjit"])
def test_several_processes_keep_their_own_weights_where_a_checkpoint_has_none(
    groups: dict[str, jobs.Group], tmp_path: Path, engine: str
) -> None:
    """Of the parameters of one flat array some are stored, variables are not; nobody has an array whole."""
    case = runs.Case(4, "optim_grads_params", engine, "mixed")
    kept = ["params/embed/embedding", "params/layers/linear/kernel"]
    whole = {f"params/{name}": np.asarray(x) for name, x in parameter_leaves(runs.model("mixed")).items()}
    stored = {name: np.cos(x + 1) for name, x in whole.items() if name not in kept}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", runs.nested(stored))
    answers = groups["2x2"].run(jobs.load_on_initial, path=str(tmp_path / "c"), case=case)
    variables = [f"variables/{path}" for path in variable_leaves(runs.model("mixed"))]
    assert answers == [{"wrong": [], "fresh": sorted([*kept, *variables])}] * 2


FAILURES = {
    "open": (0, "jax_impl.checkpoint.checkpoint:Contents:of"),
    "open of another": (1, "jax_impl.checkpoint.checkpoint:Contents:of"),
    "write": (1, "bridge.core.formats.orbax.writer:OrbaxPart:write"),
    "first process's write": (0, "bridge.core.formats.orbax.zarr.chunks:ChunkStore:encode"),
    "spill": (1, "jax_impl.checkpoint.checkpoint:Chunks:finish"),
    "assemble": (1, "jax_impl.checkpoint.checkpoint:Chunks:write_spilled"),
    "flush": (1, "bridge.core.formats.orbax.writer:OrbaxPart:finish"),
    "commit": (0, "bridge.core.formats.orbax.writer:OrbaxWriter:_require_stored"),
    "rename": (0, "bridge.core.formats.files.atomic:AtomicDirectory:commit"),
}


@pytest.mark.parametrize(
    "where",
    [pytest.param(w, marks=() if w in ("write", "rename") else pytest.mark.slow) for w in FAILURES],
)
def test_an_error_of_one_process_fails_the_save_on_all_and_leaves_nothing(
    groups: dict[str, jobs.Group], tmp_path: Path, where: str
) -> None:
    process, target = FAILURES[where]
    arguments = {"process": process, "target": target, "text": "broken on purpose"}
    errors = raised(groups["2x2"].run(jobs.fail_to_save, path=str(tmp_path / "new" / "c"), **arguments))
    assert re.search("^(OSError|CheckpointError): .*broken on purpose", errors[process])
    pattern = rf"CheckpointError: checkpoint: save: \w+: process {process}: .*broken on purpose$"
    assert re.search(pattern, errors[1 - process])
    assert list(tmp_path.iterdir()) == []
    # The next save is in step again.
    assert groups["2x2"].run(jobs.save, path=str(tmp_path / "c")) == [{"saved": True}] * 2


def test_an_existing_destination_is_refused_by_all(groups: dict[str, jobs.Group], tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "precious").touch()
    first, second = raised(groups["2x2"].run(jobs.save, path=str(tmp_path / "c")))
    assert first.startswith("FileExistsError: ")
    assert "process 0: FileExistsError" in second
    assert [file.name for file in tmp_path.rglob("*")] == ["c", "precious"]


@pytest.mark.slow  # half a minute of waiting
@pytest.mark.parametrize("absent", [0, 3])
def test_a_process_that_does_not_come_fails_the_save_on_all_without_a_hang(
    groups: dict[str, jobs.Group], tmp_path: Path, absent: int
) -> None:
    late = 20 if absent else 34
    answers = groups["4x1"].run(
        jobs.save, path=str(tmp_path / "c"), timeout_of_save=10, absent=absent, late=late
    )
    errors = raised(answers)
    for process, error in enumerate(errors):
        if absent:
            assert f"expected word from all processes within 10 s, got none from [{absent}]" in error
        elif process:
            assert "expected word from process 0 within 30 s, got none" in error
    assert list(tmp_path.iterdir()) == []
    assert groups["4x1"].run(jobs.save, path=str(tmp_path / "c")) == [{"saved": True}] * 4


def test_processes_that_do_not_do_the_same_are_told(groups: dict[str, jobs.Group], tmp_path: Path) -> None:
    group = groups["2x2"]
    assert group.run(jobs.save, path=str(tmp_path / "c")) == [{"saved": True}] * 2
    for error in raised(group.run(jobs.save_or_load, path=str(tmp_path / "c"), loader=1)):
        assert "process 1: expected step 'save: open' as on the others, got 'load: choose'" in error
    errors = raised(group.run(jobs.save_other_plans, path=str(tmp_path / "new")))
    assert all("expected the first process's plan and state" in error for error in errors)
    errors = raised(group.run(jobs.save_own_paths, path=str(tmp_path / "new")))
    differing = "process 1: expected the path .*new-0 as on process 0, got the path .*new-1"
    assert all(re.search(differing, error) for error in errors)
    errors = raised(group.run(jobs.load_own_paths, path=str(tmp_path / "c")))
    assert all(f"got the path {tmp_path}/c-1, step=None" in error for error in errors)
    assert [file.name for file in tmp_path.iterdir()] == ["c"]


def test_an_error_of_one_process_fails_the_load_on_all(groups: dict[str, jobs.Group], tmp_path: Path) -> None:
    group = groups["2x2"]
    assert group.run(jobs.save, path=str(tmp_path / "c")) == [{"saved": True}] * 2
    errors = raised(group.run(jobs.fail_to_load, path=str(tmp_path / "c"), process=1))
    assert "process 1: OSError: broken on purpose" in errors[0]
    assert errors[1] == "OSError: broken on purpose"


@pytest.mark.slow
def test_a_process_that_dies_in_a_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    with jobs.Group(2, 1) as group:
        (tmp_path / "d").mkdir()
        alive, dead = group.run(jobs.die_in_a_save, path=str(tmp_path / "d" / "c"), process=1, timeout=120)
        assert dead is None
        assert "got none from [1]" in alive["raised"]
        assert list((tmp_path / "d").iterdir()) == []
