"""Optimizer states as optax and flax really nest them: to torch, where moments follow weights, and back exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
from flax import nnx

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import MappingError, MappingTable, Plan, make_plan, parse_mapping
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.dcp_files import stock_save
from tests.support.bridge.memory_reader import MemoryReader

Tree = dict[str, Any]

RULES = """
[[rule]]
torch = "layers.{i}.weight : n m"
jax = "layers/{i}/kernel : m n"
[[rule]]
torch = "layers.{i}.bias"
jax = "layers/{i}/bias"
[[rule]]
torch = "norm.weight"
jax = "norm/scale"
optional = true
"""


def table(extra: str = "") -> MappingTable:
    return parse_mapping(extra + RULES, "optax.toml")


def weights(seed: int = 0) -> Tree:
    rng = np.random.default_rng(seed)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    layers = {str(i): {"kernel": array(3, 4), "bias": array(4)} for i in range(2)}
    return {"layers": layers, "norm": {"scale": array(5)}}


def kernels_only(tree: Tree) -> Tree:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", tree)


def by_name(tree: Tree) -> Tree:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "decayed" if path[-1].key == "kernel" else "plain", tree
    )


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 9)
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(0.1),
    "clipped, scheduled": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
    "decay masked": lambda: optax.adamw(0.1, mask=kernels_only),
    "masked": lambda: optax.chain(optax.masked(optax.scale_by_adam(), kernels_only), optax.scale(-0.1)),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "partitioned": lambda: optax.partition(
        {"decayed": optax.adamw(0.1), "plain": optax.adam(SCHEDULE)}, by_name
    ),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "accumulated": lambda: optax.MultiSteps(optax.adamw(0.1), 2),
}
WITHOUT_STEPS = {"momentum"}


def trained(optimizer: optax.GradientTransformation, steps: int = 2) -> tuple[Tree, Any]:
    """Weights and optimizer state after some steps with random gradients."""
    params = weights()
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(weights(step + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def saved(path: Path, tree: Tree) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def contents(
    path: Path,
) -> tuple[dict[tuple[str | int, ...], np.ndarray], dict[tuple[str | int, ...], object]]:
    """Tensors and objects by tree path."""
    with open_checkpoint(path) as reader:
        tensors = {info.path: reader.read(name) for name, info in reader.tensors.items()}
        return tensors, {path: reader.objects[name] for name, path in reader.object_paths.items()}


def assert_same(converted: Path, expected: Path) -> None:
    (tensors, objects), (expected_tensors, expected_objects) = contents(converted), contents(expected)
    assert tensors.keys() == expected_tensors.keys()
    assert [path for path, array in expected_tensors.items() if not same_bits(tensors[path], array)] == []
    assert objects == expected_objects


def moments(state: Any, name: str) -> dict[str, np.ndarray]:
    """Every array below an attribute called ``name`` in an optimizer state, by the weight's name in torch."""
    by_name = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        keys = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
        if name in keys:
            *parts, last = keys[keys.index(name) + 1 :]
            torch = ".".join([*parts, {"kernel": "weight", "scale": "weight"}.get(last, last)])
            by_name[torch] = np.asarray(leaf).T
    return by_name


@pytest.mark.fast_cases("adamw", "decay masked", "partitioned", "momentum", "accumulated")
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_an_optax_state_becomes_torch_state_and_comes_back_exactly(
    tmp_path: Path, optimizer_name: str
) -> None:
    optimizer = OPTIMIZERS[optimizer_name]()
    params, state = trained(optimizer)
    tree = {"params": params, "opt_state": state, "step": jnp.asarray(2)}
    saved(tmp_path / "jax", tree)
    convert(tmp_path / "jax", tmp_path / "torch", mapping=table())
    tensors, _ = contents(tmp_path / "torch")
    names = {".".join(map(str, path)): array for path, array in tensors.items()}
    entries = {"mu": "exp_avg", "nu": "exp_avg_sq", "trace": "momentum_buffer"}
    expected = {
        f"optimizer.state.{weight}.{torch}": array
        for name, torch in entries.items()
        for weight, array in moments(state, name).items()
    }
    assert len(expected) >= 2
    converted = {
        name: array
        for name, array in names.items()
        if name.startswith("optimizer.state.") and not name.endswith(".step")
    }
    assert converted.keys() == expected.keys()
    assert [name for name, array in expected.items() if not same_bits(converted[name], array)] == []
    steps = {
        name: float(a)
        for name, a in names.items()
        if name.startswith("optimizer.state.") and name.endswith("step")
    }
    updates = 1.0 if optimizer_name == "accumulated" else 2.0
    with_steps = (
        {name.rpartition(".")[0] for name in expected} if optimizer_name not in WITHOUT_STEPS else set()
    )
    assert steps == {f"{weight}.step": updates for weight in with_steps}

    convert(tmp_path / "torch", tmp_path / "back", mapping=table())
    assert_same(tmp_path / "back", tmp_path / "jax")
    target = jax.tree.map(
        ocp.utils.to_shape_dtype_struct, {"params": params, "opt_state": state, "step": jnp.asarray(2)}
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "back", target)
    after, _ = optimizer.update(weights(7), restored["opt_state"], restored["params"])
    straight, _ = optimizer.update(weights(7), state, params)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, after, straight)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])


@pytest.mark.parametrize("pure", [False, True])
def test_an_nnx_optimizer_goes_to_torch_and_back(tmp_path: Path, pure: bool) -> None:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)
    rng = np.random.default_rng(1)
    gradients = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), nnx.state(model, nnx.Param)
    )
    optimizer.update(model, gradients)
    states = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
    tree = {key: nnx.to_pure_dict(s) for key, s in states.items()} if pure else states
    saved(tmp_path / "jax", tree)
    convert(tmp_path / "jax", tmp_path / "torch", mapping=table())
    tensors, _ = contents(tmp_path / "torch")
    names = {".".join(map(str, path)): array for path, array in tensors.items()}
    adam = nnx.to_pure_dict(states["optimizer"])["opt_state"][0]
    for i in range(2):
        kernel = np.asarray(model.layers[i].kernel.get_value())
        assert same_bits(names[f"model.layers.{i}.weight"], np.array(kernel.T, order="C"))
        mu = np.asarray(adam["mu"]["layers"][i]["kernel"])
        assert same_bits(names[f"optimizer.state.layers.{i}.weight.exp_avg"], np.array(mu.T, order="C"))
        assert names[f"optimizer.state.layers.{i}.bias.step"] == 1
    convert(tmp_path / "torch", tmp_path / "back", mapping=table())
    assert_same(tmp_path / "back", tmp_path / "jax")


F32 = np.dtype(np.float32)


def contents_of(plan: Plan, reader: MemoryReader) -> dict[str, np.ndarray]:
    return {name: t.read(reader, Box.whole(t.shape)) for name, t in plan.tensors.items()}


def translated(source: MemoryReader, to: str, mapping: MappingTable, into: str | None = None) -> MemoryReader:
    plan = make_plan(source, to, mapping, into=into)
    kept = {path: source.objects[name] for path, name in plan.objects.values()}
    return MemoryReader(to, contents_of(plan, source), kept | dict(plan.notes.values()))


def two_states(count: int = 4) -> dict[str, np.ndarray]:
    """Weights and biases in states of their own, with other step counts; the norm is frozen."""
    arrays = {"params/norm/scale": random_bits((5,), F32, 99)}
    for i in range(2):
        for leaf, shape, state in (("kernel", (3, 4), "a/0"), ("bias", (4,), "b/1")):
            arrays[f"params/layers/{i}/{leaf}"] = random_bits(shape, F32, len(arrays))
            for moment in ("mu", "nu"):
                arrays[f"opt_state/{state}/{moment}/layers/{i}/{leaf}"] = random_bits(shape, F32, len(arrays))
    return arrays | {"opt_state/a/0/count": np.int32(7), "opt_state/b/1/count": np.int32(count)}


def test_states_with_other_counts_give_each_weight_its_step_and_come_back() -> None:
    jax_tree = MemoryReader("orbax", {name: np.asarray(a) for name, a in two_states().items()})
    torch_tree = translated(jax_tree, "dcp", table())
    steps = {name: float(a) for name, a in torch_tree.arrays.items() if name.endswith(".step")}
    assert steps == {
        f"optimizer.state.layers.{i}.{leaf}.step": step
        for i in range(2)
        for leaf, step in (("weight", 7.0), ("bias", 4.0))
    }
    back = translated(torch_tree, "orbax", table())
    assert back.arrays.keys() == jax_tree.arrays.keys()
    assert [n for n, a in jax_tree.arrays.items() if not same_bits(back.arrays[n], a)] == []


def test_without_the_notes_different_steps_are_refused_for_one_count() -> None:
    jax_tree = MemoryReader("orbax", {name: np.asarray(a) for name, a in two_states().items()})
    torch_tree = MemoryReader("dcp", translated(jax_tree, "dcp", table()).arrays)
    with pytest.raises(
        MappingError, match=r"same step for every parameter, since opt_state/count is one number"
    ):
        make_plan(torch_tree, "orbax", table())
    equal = MemoryReader("orbax", {name: np.asarray(a) for name, a in two_states(count=7).items()})
    bare = translated(MemoryReader("dcp", translated(equal, "dcp", table()).arrays), "orbax", table())
    assert int(bare.arrays["opt_state/count"]) == 7
    assert "opt_state/mu/norm/scale" not in bare.arrays
    assert same_bits(
        bare.arrays["opt_state/nu/layers/1/bias"], equal.arrays["opt_state/b/1/nu/layers/1/bias"]
    )


TREES = """
[convention.a]
[convention.b]
weights = "params/params/{w}"
exp_avg = "opt_state/0/mu/params/{w}"
[convention.t]
[convention.u]
weights = "{w}"
[[rule]]
a = "layers/{i}/kernel : m n"
b = "decoder/layers/kernel : n {i} m"
t = "layers.{i}.weight : n m"
u = "h.{i}.w : n m"
[[rule]]
a = "layers/{i}/bias : n"
b = "decoder/layers/bias : {i} n"
t = "layers.{i}.bias : n"
u = "h.{i}.b : n"
[[rule]]
a = "norm/scale"
b = "decoder/norm/scale"
t = "norm.weight"
u = "ln.w"
"""


def test_between_two_trees_the_chain_stays_and_the_counts_are_not_touched() -> None:
    mapping = parse_mapping(TREES, "trees")
    arrays = {name: np.asarray(a) for name, a in two_states().items()}
    arrays["opt_state/a/1/count"] = np.asarray(12, np.int32)
    source = MemoryReader("orbax", arrays)
    converted = translated(source, "orbax", mapping, "b")
    kernels = [arrays[f"opt_state/a/0/mu/layers/{i}/kernel"].T for i in range(2)]
    expected = np.stack(kernels, axis=1)
    assert same_bits(converted.arrays["opt_state/a/0/mu/params/decoder/layers/kernel"], expected)
    assert int(converted.arrays["opt_state/b/1/count"]) == 4
    assert int(converted.arrays["opt_state/a/1/count"]) == 12
    assert "opt_state/0/mu/params/decoder/layers/kernel" not in converted.arrays
    back = translated(converted, "orbax", mapping, "a")
    assert back.arrays.keys() == arrays.keys()
    assert [name for name, a in arrays.items() if not same_bits(back.arrays[name], a)] == []


def test_between_two_torch_conventions_each_weight_keeps_its_step() -> None:
    mapping = parse_mapping(TREES, "trees")
    jax_tree = MemoryReader("orbax", {name: np.asarray(a) for name, a in two_states().items()})
    source = MemoryReader("dcp", translated(jax_tree, "dcp", mapping, "t").arrays)
    converted = translated(source, "dcp", mapping, "u")
    assert float(converted.arrays["optimizer.state.h.1.w.step"]) == 7
    assert float(converted.arrays["optimizer.state.h.1.b.step"]) == 4
    back = translated(converted, "dcp", mapping, "t")
    assert back.arrays.keys() == source.arrays.keys()
    assert [name for name, a in source.arrays.items() if not same_bits(back.arrays[name], a)] == []


def test_a_stack_of_layers_with_different_steps_is_refused() -> None:
    arrays = {f"model.layers.{i}.weight": random_bits((4, 3), F32, i) for i in range(2)}
    arrays |= {f"model.layers.{i}.bias": random_bits((4,), F32, 5 + i) for i in range(2)}
    arrays["model.norm.weight"] = random_bits((5,), F32, 9)
    for i in range(2):
        state = f"optimizer.state.layers.{i}.weight."
        arrays |= {state + s: random_bits((4, 3), F32, 20 + i) for s in ("exp_avg", "exp_avg_sq")}
        arrays[state + "step"] = np.asarray(3 + i, np.float32)
    with pytest.raises(
        MappingError, match=r"got 3 in optimizer\.state\.layers\.0\.weight\.step and 4 in optimizer"
    ):
        make_plan(MemoryReader("dcp", arrays), "orbax", parse_mapping(TREES, "trees"), into="b")


def test_accumulated_gradients_are_not_taken_for_another_trees() -> None:
    arrays = {name: np.asarray(a) for name, a in two_states().items()}
    arrays["opt_state/acc_grads/layers/0/kernel"] = random_bits((3, 4), F32, 5)
    with pytest.raises(
        MappingError, match=r"1 of \d+ tensors match no rule: opt_state/acc_grads/layers/0/kernel"
    ):
        make_plan(MemoryReader("orbax", arrays), "orbax", parse_mapping(TREES, "trees"), into="b")


def test_one_moment_in_two_states_is_refused() -> None:
    arrays = {name: np.asarray(a) for name, a in two_states().items()}
    arrays["opt_state/b/1/mu/layers/0/kernel"] = random_bits((3, 4), F32, 5)
    arrays["opt_state/b/1/nu/layers/0/kernel"] = random_bits((3, 4), F32, 6)
    with pytest.raises(
        MappingError,
        match=r"expected one exp_avg of a weight, got two of layers/0/kernel \(opt_state/a/0/mu/",
    ):
        make_plan(MemoryReader("orbax", arrays), "dcp", table())


@pytest.mark.parametrize(
    "note",
    [
        "x",
        {"jax": 3},
        {"jax": {"states": [3]}},
        {"jax": {"weights": 1, "states": []}},
        {"jax": {"states": []}},
    ],
)
def test_a_malformed_note_is_no_note(note: object) -> None:
    equal = MemoryReader("orbax", {name: np.asarray(a) for name, a in two_states(count=7).items()})
    arrays = translated(equal, "dcp", table()).arrays
    plan = make_plan(MemoryReader("dcp", arrays, {("twinshard", "places"): note}), "orbax", table())
    assert "opt_state/mu/layers/0/kernel" in plan.tensors


CHAINED = """
[convention.torch]
[convention.jax]
exp_avg = "opt_state/0/mu/{w}"
exp_avg_sq = "opt_state/0/nu/{w}"
step = "opt_state/0/count"
"""


def test_stock_orbax_restores_what_came_from_torch_into_adamw(tmp_path: Path) -> None:
    shapes = {f"layers.{i}.{n}": s for i in range(2) for n, s in (("weight", (4, 3)), ("bias", (4,)))}
    state: dict[str, Any] = {}
    for k, (name, shape) in enumerate(shapes.items()):
        state[f"model.{name}"] = torch.from_numpy(random_bits(shape, np.dtype(np.float32), k))
        for j, entry in enumerate(("exp_avg", "exp_avg_sq")):
            state[f"optimizer.state.{name}.{entry}"] = torch.full(shape, k + j / 2)
        state[f"optimizer.state.{name}.step"] = torch.tensor(7.0)
    stock_save(state, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", mapping=table(CHAINED))
    params = weights()
    del params["norm"]
    template = {"params": params, "opt_state": optax.adamw(0.1).init(params)}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(
            tmp_path / "b", jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
        )
    assert jax.tree.structure(restored) == jax.tree.structure(template)
    assert restored["opt_state"][0].count == 7
    kernel = restored["opt_state"][0].nu["layers"]["1"]["kernel"]
    assert (kernel == 2.5).all()
    optax.adamw(0.1).update(params, restored["opt_state"], restored["params"])
    convert(tmp_path / "b", tmp_path / "c", mapping=table(CHAINED))
    with open_checkpoint(tmp_path / "a") as original, open_checkpoint(tmp_path / "c") as other:
        for name in original.tensors:
            assert same_bits(original.read(name), other.read(name))
