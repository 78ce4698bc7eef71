"""Training runs to interrupt. Plans and compiled steps are made once per number of devices and strategy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bridge.core.sharding import Layout
from jax_impl import (
    ShardingPlan,
    TrainState,
    data_parallel_mesh,
    init_state,
    main_weight_adamw,
    make_train_step,
    plan_sharding,
    scan_layers,
    shard_weights,
    stack_layers,
    variable_leaves,
)
from jax_impl.checkpoint.contents import Contents, HostCopy
from jax_impl.models import Decoder
from jax_impl.modules.module_tree import parameter_leaves
from jax_impl.runtime.groups.cut_group import CutGroup
from jax_impl.runtime.groups.flat_group import FlatGroup
from jax_impl.runtime.groups.logical_group import LogicalGroup
from tests.support.jax_impl.tiny import CONFIG, decoder, loss, tokens

DEFAULT = "optim_grads_params"
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# Divisible by one to four devices.
ROWS = 12
# One block: a step is compiled for every number of devices and strategy, and blocks add to that most.
CONFIG_OF_RUNS = dataclasses.replace(CONFIG, n_layers=1)
OPTIMIZER = main_weight_adamw(1e-2, weight_decay=0.1)
# The parts of the decoder that two devices can divide.
HEADS = {f"layers/*/attention/{name}": "colwise" for name in ("query", "key", "value")} | {
    "layers/*/attention/out": "rowwise"
}
# A large eps keeps Adam from magnifying the rounding of sums where gradients are tiny.
STEADY = {"learning_rate": 1e-2, "b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.1}


class Case(NamedTuple):
    """How a model is sharded: ``devices`` on one axis, or on an outer and an inner one, each ``tensors`` times."""

    devices: int | tuple[int, int]
    strategy: str = DEFAULT
    engine: str = "shard_map"
    model: str = "decoder"
    tensors: int = 1


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(12, 12, rngs=rngs)
        self.norm = nnx.BatchNorm(12, epsilon=0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.norm(self.linear(x)))


class Mixed(nnx.Module):
    """Frozen parameters, a stack, batch statistics in and outside of it, and random numbers."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0, dropout=7)
        self.embed = nnx.Embed(CONFIG.vocab_size, 12, rngs=rngs)
        self.layers = stack_layers([Layer(rngs) for _ in range(3)])
        self.norm = nnx.BatchNorm(12, epsilon=0.1, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.head = nnx.Linear(12, 5, rngs=rngs)

    def __call__(self, rows: jax.Array) -> jax.Array:
        x = scan_layers(self.layers, self.embed(rows).mean(axis=1))
        return self.head(self.dropout(self.norm(x)))


def model(name: str = "decoder") -> nnx.Module:
    if name == "decoder":
        return decoder(CONFIG_OF_RUNS)
    return Decoder(CONFIG, rngs=nnx.Rngs(1), stacked=True) if name == "stacked" else Mixed()


def loss_of(model: Any, rows: jax.Array) -> jax.Array:
    return jnp.mean((model(rows) - 0.5) ** 2) if isinstance(model, Mixed) else loss(model, rows)


@functools.cache
def _plan(case: Case) -> ShardingPlan:
    outer, inner = case.devices if isinstance(case.devices, tuple) else (0, case.devices)
    sizes = {"dp_outer": outer, "dp": inner} if outer else {"dp": inner}
    parallel: dict[str, Any] = {"parallel": HEADS} if case.tensors > 1 else {}
    return plan_sharding(
        nnx.eval_shape(lambda: model(case.model)),
        data_parallel_mesh({**sizes, "tp": case.tensors} if parallel else sizes),
        **parallel,
        strategy=case.strategy,
        engine=case.engine,
        stacked=[] if case.model == "decoder" else ["layers"],
        frozen=["embed/*", "layers/linear/bias"] if case.model == "mixed" else [],
    )


@functools.cache
def _step(case: Case, optimizer: Any) -> Any:
    return make_train_step(_plan(case), loss_of, optimizer)


def plan_of(*case: Any) -> ShardingPlan:
    return _plan(Case(*case))


def step_of(*case: Any, optimizer: Any = OPTIMIZER) -> Any:
    return _step(Case(*case), optimizer)


def fresh(*case: Any, optimizer: Any = OPTIMIZER) -> TrainState:
    plan, made = plan_of(*case), model(Case(*case).model)
    return init_state(plan, shard_weights(plan, parameter_leaves(made)), optimizer, variable_leaves(made))


def train(
    state: TrainState, *case: Any, first: int, count: int, optimizer: Any = OPTIMIZER
) -> tuple[TrainState, list[float]]:
    """``count`` steps, each on another batch whose rows, and so every device's, all differ. ``state`` is used up."""
    losses = []
    for index in range(first, first + count):
        state, metrics = step_of(*case, optimizer=optimizer)(state, tokens(ROWS, seed=100 + index))
        losses.append(float(metrics["loss"]))
    return state, losses


def logical(plan: ShardingPlan, state: TrainState) -> dict[str, np.ndarray]:
    """Every tensor of a train state with AdamW, by its name in a checkpoint, cut from the gathered arrays."""
    by_prefix = {
        "params": state.weights,
        "opt_state/mu": state.opt_state.mu,
        "opt_state/nu": state.opt_state.nu,
    }
    arrays = {}
    for prefix, by_key in by_prefix.items():
        for path, value in logical_arrays(plan, by_key).items():
            arrays[f"{prefix}/{path}"] = value
    for path, value in state.variables.items():
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        arrays[f"variables/{path}"] = np.array(jax.random.key_data(value) if is_key else value)
    return {**arrays, "opt_state/count": np.array(state.opt_state.count)}


def logical_arrays(plan: ShardingPlan, by_key: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """``{path: value}`` of weights or moments. Frozen parameters have no moments."""
    arrays = {}
    for unit in plan.units.values():
        for group in unit.groups:
            if not by_key.keys() >= group.stored.keys():
                continue
            if isinstance(group, LogicalGroup):
                arrays |= {path: np.array(by_key[path]) for path in group.paths}
                continue
            assert isinstance(group, FlatGroup)
            flat = np.array(by_key[group.key])
            if isinstance(group, CutGroup) and group.axes:
                arrays |= _joined(group, flat)
                continue
            layers = [flat] if group.layers is None else list(flat)
            for path, slot in zip(group.paths, group.layout.slots, strict=True):
                values = [
                    whole_buffer(group.layout, layer, slot.buffer)[slot.offset : slot.end].reshape(slot.shape)
                    for layer in layers
                ]
                arrays[path] = values[0] if group.layers is None else np.stack(values)
    return arrays


def _joined(group: CutGroup, flat: np.ndarray) -> dict[str, np.ndarray]:
    """Of parameters that one model axis cuts, which are in no stack."""
    layout = group.layout
    rows = flat.reshape(layout.num_shards, -1, layout.shard_size).swapaxes(0, 1)
    arrays = {}
    for path, slot in zip(group.paths, layout.slots, strict=True):
        buffers = [whole_buffer(layout, row.reshape(-1), slot.buffer) for row in rows]
        parts = [buffer[slot.offset : slot.end].reshape(slot.shape) for buffer in buffers]
        (cut,) = group.cuts_of(path)
        arrays[path] = np.concatenate(parts, axis=cut.dimension)
    return arrays


def whole_buffer(layout: Layout, flat: np.ndarray, buffer: int) -> np.ndarray:
    """One of a layout's buffers from the unit's array, in which it lies a shard at a time."""
    if not layout.shard_sizes:
        return flat
    size, before = layout.shard_sizes[buffer], sum(layout.shard_sizes[:buffer])
    starts = [rank * sum(layout.shard_sizes) + before for rank in range(layout.num_shards)]
    return np.concatenate([flat[start : start + size] for start in starts])


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in arrays.items():
        *parents, last = name.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def assert_same_bits(tensors: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        a, b = np.asarray(tensors[name]), np.asarray(value)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert a.tobytes() == b.tobytes(), name


def forward(plan: ShardingPlan, state: TrainState) -> np.ndarray:
    """Outputs of the logical model on one device."""
    arrays = logical(plan, state)
    variables = {path: state.variables[path] for path in plan.variables}
    local = {path: value.addressable_shards[0].data for path, value in variables.items()}
    parameters = {path: jnp.asarray(arrays[f"params/{path}"]) for path in plan.parameters}
    return np.asarray(_outputs(*nnx.split(plan.merge(parameters, local))))


@functools.partial(jax.jit, static_argnums=0)
def _outputs(graphdef: nnx.GraphDef, values: nnx.State) -> jax.Array:
    return nnx.merge(graphdef, values)(tokens(2, seed=7))


def perturbed(state: Any) -> Any:
    """The state with other values in every buffer, moments too, of which the layout's padding keeps zeros."""
    return jax.tree.map(
        lambda x: (
            jnp.where(x == 0, 0, x + 0.25 * jnp.cos(jnp.arange(x.size, dtype=x.dtype))) if x.ndim else x + 3
        ),
        state,
    )


def host_bytes(contents: Contents) -> int:
    """Bytes of the copies that ``on_host`` made."""
    copies = [copy for by_key in contents.arrays.values() for copy in by_key.values()]
    return sum(copy.nbytes for copy in copies if isinstance(copy, HostCopy)) + sum(
        int(value.nbytes) for value in contents.whole.values() if isinstance(value, np.ndarray)
    )
