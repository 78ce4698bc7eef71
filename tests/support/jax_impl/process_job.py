"""Groups of processes under ``jax.distributed`` on this machine, and their jobs.

The processes of a group start once and run the same jobs one after another. ``Group`` runs this file as a program.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from bridge.core.formats.orbax.reader import OrbaxReader
from bridge.core.formats.orbax.writer import OrbaxPart
from bridge.core.formats.orbax.zarr import chunks
from bridge.core.mapping import load_mapping
from jax_impl import (
    ShardingPlan,
    TrainState,
    load_checkpoint,
    main_weight_adamw,
    save_checkpoint,
    simulate_devices,
    unshard,
)
from jax_impl.checkpoint.names import is_key
from jax_impl.modules.module_tree import parameter_leaves
from tests.support.compiler_effort import inherited_flags
from tests.support.jax_impl import checkpoint_runs as runs

_ROOT = Path(__file__).parents[3]


class Group:
    """``processes`` processes with ``devices`` simulated devices each. They end with the group."""

    def __init__(self, processes: int, devices: int) -> None:
        self._members: list[tuple[subprocess.Popen[bytes], Connection]] = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
        environment["XLA_FLAGS"] = inherited_flags()
        for index in range(processes):
            ours, theirs = Pipe()
            arguments = map(str, (port, processes, index, devices, theirs.fileno()))
            member = subprocess.Popen(
                [sys.executable, "-m", "tests.support.jax_impl.process_job", *arguments],
                cwd=_ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            self._members.append((member, ours))

    def start(self, job: Callable[..., Any], **arguments: Any) -> None:
        """Run a function of a module, with JSON arguments, in all processes."""
        for _, pipe in self._members:
            pipe.send_bytes(json.dumps([job.__module__, job.__name__, arguments]).encode())

    def results(self, timeout: float = 240) -> list[Any]:
        """Of each process: what the job returned, or ``{"raised": "Type: text"}``; None of one that died.

        Raises ``TimeoutError`` when a process takes longer, and ends the group.
        """
        deadline, answers = time.monotonic() + timeout, []
        for index, (_, pipe) in enumerate(self._members):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise TimeoutError(
                        f"expected an answer of process {index} within {timeout:g} s, got none"
                    )
                answers.append(json.loads(pipe.recv_bytes()))
            except EOFError:
                answers.append(None)
        return answers

    def run(self, job: Callable[..., Any], *, timeout: float = 240, **arguments: Any) -> list[Any]:
        self.start(job, **arguments)
        return self.results(timeout)

    def close(self) -> None:
        # jax.distributed handles SIGTERM and waits at exit for dead processes.
        for member, pipe in self._members:
            pipe.close()
            member.kill()
            member.wait()
        self._members = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def train_and_save(
    case: list[Any],
    path: str,
    load: str | None = None,
    first: int = 0,
    before: int = 3,
    after: int = 2,
    strict: bool = True,
    item: str | None = None,
) -> dict[str, Any]:
    """``before`` steps, a save at ``path``, ``after`` steps; all losses.

    Process 0 writes what the state was at ``<path>-{loaded,saved,final}.npz``, gathered by collectives.
    """
    key, optimizer = _case(case), _optimizer()
    plan, step = runs.plan_of(*key), {"optimizer": optimizer}
    if load is None:
        state = runs.fresh(*key, **step)
    else:
        state = load_checkpoint(load, plan, optimizer, strict=strict, timeout=60).state
        _dump(plan, state, f"{path}-loaded.npz")
    state, losses = runs.train(state, *key, first=first, count=before, **step)
    with small_chunks():
        train = {"step": first + before, "rank": jax.process_index()}
        save_checkpoint(path, plan, state, train, item=item, timeout=60)
        if key.model == "decoder":
            mapping = load_mapping("decoder").with_axes({"d": runs.CONFIG.head_dim})
            save_checkpoint(f"{path}-mapped", plan, state, train, mapping=mapping, timeout=60)
    _dump(plan, state, f"{path}-saved.npz")
    loaded = load_checkpoint(path, plan, optimizer, timeout=60)
    for array, expected in zip(jax.tree.leaves(loaded.state), jax.tree.leaves(state), strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert array.sharding == expected.sharding
        for shard, other in zip(array.addressable_shards, expected.addressable_shards, strict=True):
            assert bits(shard.data) == bits(other.data)
    state, rest = runs.train(loaded.state, *key, first=first + before, count=after, **step)
    _dump(plan, state, f"{path}-final.npz")
    return {"losses": losses + rest, "train": loaded.train}


@contextmanager
def small_chunks() -> Iterator[None]:
    """Chunks of a few rows: some inside one device's shard, some over two or three."""
    before, chunks._CHUNK = chunks._CHUNK, 300
    try:
        yield
    finally:
        chunks._CHUNK = before


def bits(array: jax.Array) -> bytes:
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array).tobytes()


def _case(case: list[Any]) -> runs.Case:
    return runs.Case(*(tuple(field) if isinstance(field, list) else field for field in case))


@functools.cache
def _optimizer() -> Any:
    return main_weight_adamw(**runs.STEADY)


def _small(strategy: str = runs.DEFAULT) -> tuple[ShardingPlan, TrainState]:
    """A state that no step is done with."""
    count = len(jax.devices())
    return runs.plan_of(count, strategy), runs.fresh(count, strategy)


def _dump(plan: ShardingPlan, state: TrainState, path: str) -> None:
    by_prefix = {
        "params": state.weights,
        "opt_state/mu": state.opt_state.mu,
        "opt_state/nu": state.opt_state.nu,
    }
    tensors = {
        f"{prefix}/{p}": v for prefix, by_key in by_prefix.items() for p, v in unshard(plan, by_key).items()
    }
    for name, value in state.variables.items():
        local = value.addressable_shards[0].data
        tensors[f"variables/{name}"] = np.frombuffer(bits(local), np.uint8)
    tensors["opt_state/count"] = state.opt_state.count
    if jax.process_index() == 0:
        np.savez(path, **{name: np.asarray(value) for name, value in tensors.items()})


def fail_to_save(path: str, process: int, target: str, text: str) -> dict[str, Any]:
    """A save in which ``process`` raises ``OSError(text)`` where it calls ``target``, a "module:class:method"."""
    plan, state = _small()
    module, owner, name = target.split(":")
    where = getattr(importlib.import_module(module), owner)

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError(text)

    original = getattr(where, name)
    if jax.process_index() == process:
        setattr(where, name, broken)
    try:
        with small_chunks():
            save_checkpoint(path, plan, state, timeout=60)
    finally:
        setattr(where, name, original)
    return {"saved": True}


def save(
    path: str, timeout_of_save: float = 60, absent: int | None = None, late: float = 0
) -> dict[str, Any]:
    """A save; process ``absent`` begins ``late`` seconds after the others."""
    plan, state = _small()
    # Compile times of the processes differ by seconds.
    multihost_utils.sync_global_devices("before the save")
    if jax.process_index() == absent:
        time.sleep(late)
    save_checkpoint(path, plan, state, timeout=timeout_of_save)
    return {"saved": True}


def save_or_load(path: str, loader: int) -> dict[str, Any]:
    """All processes save, except one, which loads."""
    plan, state = _small()
    if jax.process_index() == loader:
        load_checkpoint(path, plan, timeout=60)
    else:
        save_checkpoint(f"{path}-new", plan, state, timeout=60)
    return {"saved": True}


def save_other_plans(path: str) -> dict[str, Any]:
    strategy = "no_shard" if jax.process_index() else runs.DEFAULT
    save_checkpoint(path, *_small(strategy), timeout=60)
    return {"saved": True}


def save_own_paths(path: str) -> dict[str, Any]:
    save_checkpoint(f"{path}-{jax.process_index()}", *_small(), timeout=60)
    return {"saved": True}


def load(path: str) -> dict[str, Any]:
    load_checkpoint(path, _small()[0], runs.OPTIMIZER, timeout=60)
    return {"loaded": True}


def load_own_paths(path: str) -> dict[str, Any]:
    index = jax.process_index()
    load_checkpoint(f"{path}-{index}" if index else path, _small()[0], timeout=60)
    return {"loaded": True}


def load_on_initial(path: str, case: list[Any]) -> dict[str, Any]:
    """A load of some weights only: the parameters of which this process has a piece that is not as expected."""
    key = _case(case)
    plan, initial = runs.plan_of(*key), runs.fresh(*key)
    loaded = load_checkpoint(path, plan, strict=False, initial=initial, timeout=60)
    whole = {name: np.asarray(x) for name, x in parameter_leaves(runs.model(key.model)).items()}
    kept = [name.removeprefix("params/") for name in loaded.fresh]
    wrong = []
    for name, array in loaded.state.weights.items():
        for piece in plan.local_pieces(name, array):
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            expected = whole[piece.path][box] if piece.path in kept else np.cos(whole[piece.path] + 1)[box]
            if not np.array_equal(piece.values, expected):
                wrong.append(piece.path)
    for variable, value in initial.variables.items():
        loaded_value = loaded.state.variables[variable]
        data = [jax.random.key_data(x) if is_key(x) else x for x in (value, loaded_value)]
        if not np.array_equal(*(np.asarray(x.addressable_data(0)) for x in data)):
            wrong.append(variable)
    return {"wrong": wrong, "fresh": sorted(loaded.fresh)}


def fail_to_load(path: str, process: int) -> dict[str, Any]:
    def broken(*_: Any) -> Any:
        raise OSError("broken on purpose")

    original = OrbaxReader.read
    if jax.process_index() == process:
        OrbaxReader.read = broken  # type: ignore[method-assign]  # the fault under test
    try:
        return load(path)
    finally:
        OrbaxReader.read = original  # type: ignore[method-assign]  # puts the reader's own back


def die_in_a_save(path: str, process: int) -> dict[str, Any]:
    """``process`` kills itself while it writes."""
    if jax.process_index() == process:
        OrbaxPart.finish = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]  # the fault under test
    return save(path, timeout_of_save=5)


def _serve(port: int, processes: int, index: int, devices: int, descriptor: int) -> None:
    jax.distributed.initialize(f"localhost:{port}", processes, index)
    simulate_devices(devices)
    pipe = Connection(descriptor)
    while True:
        try:
            module, name, arguments = json.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = getattr(importlib.import_module(module), name)(**arguments)
        except BaseException as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        pipe.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
