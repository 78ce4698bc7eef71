"""A run on one or two processes that saves asynchronously by the manager. ``Zygote`` forks and kills it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_impl import (
    CheckpointManager,
    data_parallel_mesh,
    fully_shard,
    init_state,
    main_weight_adamw,
    make_train_step,
    simulate_devices,
)
from tests.support.killed_saves import KEPT, STEPS, acknowledge, serve


def run(job: dict[str, Any], rank: int) -> None:
    world = job["world"]
    if world > 1:
        jax.distributed.initialize(f"localhost:{_port(job, rank)}", world, rank)
    simulate_devices(2 // world)
    random = np.random.default_rng(0)
    weights = {f"w{k}": random.standard_normal((31, 31), np.float32) for k in range(6)}
    plan, arrays = fully_shard(weights, data_parallel_mesh(2), units=[])
    optimizer = main_weight_adamw(0.01)
    state = init_state(plan, arrays, optimizer)
    train_step = make_train_step(plan, _loss, optimizer)
    with CheckpointManager(job["directory"], max_to_keep=KEPT) as manager:
        first = 0
        if manager.latest_step() is not None:
            loaded = manager.load(plan, optimizer, timeout=job["timeout"])
            state, first = loaded.state, loaded.train["step"]
        for index in range(first, STEPS):
            rows = np.random.default_rng(index).standard_normal((4, 31), np.float32)
            state, _ = train_step(state, rows)
            manager.save(
                index + 1, plan, state, {"step": index + 1}, metrics={"index": index}, timeout=job["timeout"]
            )
            if index > first:
                acknowledge(job, rank, index)
    acknowledge(job, rank, STEPS)


def _loss(weights: Any, rows: jax.Array) -> jax.Array:
    for matrix in weights.values():
        rows = jnp.tanh(rows @ matrix)
    return jnp.mean(rows**2)


def _port(job: dict[str, Any], rank: int) -> int:
    """A free port, which the first process chooses."""
    path = Path(job["log"], "port")
    if rank == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        path.with_suffix(".new").write_text(str(port))
        path.with_suffix(".new").rename(path)
        return int(port)
    while not path.exists():
        pass
    return int(path.read_text())


if __name__ == "__main__":
    # ``test_processes.py`` tests that a survivor does not wait forever. It takes four times the timeout.
    serve(run, patience=1)
