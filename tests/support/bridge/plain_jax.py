"""Programs of an ordinary user of flax, optax and Orbax: train, save and load a sharded model, without this package.

    python -m tests.support.bridge.plain_jax '[{"do": "save", ...}, {"do": "load", ...}]'

prints a JSON list with the losses of every job. With TWINSHARD_TEST_PROCESSES, the program is one of several processes
that share the devices.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint.experimental import v1

from tests.support import compilation_cache

Tree = Any
ROWS = 24

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, b1=0.8, b2=0.9),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 3, 20), weight_decay=0.1),
    ),
    "masked": lambda: optax.chain(
        optax.masked(optax.adamw(1e-2), lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
        optax.masked(optax.sgd(1e-2, 0.9), lambda tree: jax.tree.map(lambda x: x.ndim == 1, tree)),
    ),
}


class Net(nnx.Module):
    """A model with sizes that 8 divides, and with sizes that it does not divide."""

    def __init__(self, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.inner = nnx.Linear(8, 40, rngs=rngs)
        self.norm = nnx.LayerNorm(40, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(40, 40, rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(40, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.inner(x))
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.out(x)


def placed(tree: Tree, mesh: Mesh, axis: int) -> Tree:
    """Shard leaves along an axis that the number of devices divides. Replicate the other leaves."""

    def put(leaf: Any) -> jax.Array:
        array = np.asarray(leaf)
        spec = [None] * array.ndim
        if array.ndim > axis and array.shape[axis] % mesh.size == 0:
            spec[axis] = "data"  # type: ignore[call-overload]  # a list of None at first
        return jax.make_array_from_callback(
            array.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda index: array[index]
        )

    return jax.tree.map(put, tree)


class Trainer:
    """State, and a step for it, on the first devices."""

    def __init__(self, optimizer: str, devices: int, axis: int, seed: int) -> None:
        self.mesh = Mesh(np.asarray(jax.devices()[:devices]), ("data",))
        self.graph, state = nnx.split(Net(seed))
        params = nnx.to_pure_dict(state)
        self.optimizer = OPTIMIZERS[optimizer]()
        self.state: Tree = placed(
            {"params": params, "opt_state": self.optimizer.init(params)}, self.mesh, axis
        )
        # The numbers of a fresh optimizer state do not depend on the seed.
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        self.step = jax.jit(self._step, out_shardings=(shardings, None))

    def run(self, steps: range) -> list[float]:
        losses = []
        rows = NamedSharding(self.mesh, PartitionSpec("data"))
        for step in steps:
            batch = np.random.default_rng(step).standard_normal((ROWS, 8)).astype(np.float32)
            data = jax.make_array_from_callback(batch.shape, rows, lambda index, batch=batch: batch[index])
            self.state, loss = self.step(self.state, data)
            losses.append(float(loss))
        return losses

    def _step(self, state: Tree, rows: jax.Array) -> tuple[Tree, jax.Array]:
        def loss_of(params: Tree) -> jax.Array:
            return jnp.square(nnx.merge(self.graph, as_state(params, self.graph))(rows)).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        updates, opt_state = self.optimizer.update(gradients, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def as_state(params: Tree, graph: Any) -> Any:
    """A pure dict as the state of a graph."""
    state = nnx.state(nnx.eval_shape(lambda: Net(0)))
    nnx.replace_by_pure_dict(state, params)
    return state


def abstract(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def save(path: str, optimizer: str, devices: int) -> list[float]:
    """Two steps, a save, two more steps."""
    trainer = Trainer(optimizer, devices, 0, seed=1)
    losses = trainer.run(range(2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, trainer.state)
    return losses + trainer.run(range(2, 4))


def load(path: str, optimizer: str, devices: int, how: str, axis: int) -> list[float]:
    """Two steps of a state that was loaded into a different initial state, sharded along `axis`."""
    trainer = Trainer(optimizer, devices, axis, seed=2)
    target = abstract(trainer.state)
    if how == "v0":
        with ocp.StandardCheckpointer() as checkpointer:
            trainer.state = checkpointer.restore(path, target)
    elif how == "v1":
        trainer.state = v1.load(path, target)
    else:
        with ocp.CheckpointManager(Path(path)) as manager:
            trainer.state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(target))
    return trainer.run(range(2, 4))


def main() -> None:
    processes = os.environ.get("TWINSHARD_TEST_PROCESSES")
    if processes:
        address, count, index = processes.split(",")
        jax.distributed.initialize(address, int(count), int(index))
    else:
        # Every job compiles the same few programs.
        compilation_cache.start()
    results = []
    for job in json.loads(sys.argv[1]):
        results.append({"save": save, "load": load}[job.pop("do")](**job))
    ours = {"bridge", "torch_impl", "jax_impl"} & {name.partition(".")[0] for name in sys.modules}
    assert not ours, f"expected a program without this package, found {ours}"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
