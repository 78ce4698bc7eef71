"""Measure bytes of low-precision and offloaded optimizer states, and seconds of asynchronous saves, in both runtimes.

python -m tests.bench.bench_states

For each element of the model, the table shows the bytes of main weights, moments and float32 gradients at rest, and the
extra bytes during an update. There is one rank, or one simulated device, which owns every element.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist
from flax import nnx
from torch import nn

import jax_impl
import torch_impl
from jax_impl.checkpoint.contents import Contents
from tests.bench.torch_memory import live_bytes
from tests.support.jax_impl.checkpoint_runs import host_bytes

WIDTH, LAYERS = 1024, 8
ELEMENTS = LAYERS * (WIDTH * WIDTH + WIDTH)
FORMATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def torch_model() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        torch_impl.fully_shard(layer)
    return torch_impl.fully_shard(model)


def in_torch(moments: str, offload: float) -> tuple[int, int, int]:
    """Bytes at rest, on the host, and at the peak of an update."""
    dtype, on_host = getattr(torch, moments), 0

    def build() -> Callable[[], Any]:
        nonlocal on_host
        model = torch_model()
        optimizer = torch_impl.MainWeightAdamW(
            model.parameters(), exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype, offload_fraction=offload
        )
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        on_host = model.memory_report(optimizer).host
        return optimizer.step

    live = live_bytes(build, torch.device("cpu"))
    return live.rest, on_host, live.peak


class JaxModel(nnx.Module):
    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def in_jax(moments: str, offload: float) -> tuple[int, int, int]:
    """The same for JAX. Gradients (4 bytes) live only in a step; the peak adds the update's temporary memory."""
    mesh = jax_impl.data_parallel_mesh(1)
    plan, weights = jax_impl.fully_shard(JaxModel(), mesh)
    optimizer = jax_impl.main_weight_adamw(1e-3, mu_dtype=moments, nu_dtype=moments)
    state = jax_impl.init_state(plan, weights, optimizer, offload=jax_impl.Offload(moments=offload))
    step = jax_impl.make_train_step(plan, lambda model, x: jnp.mean(model(x)), optimizer)
    _, update = step.lower_programs(
        jax_impl.abstract_state(plan, optimizer, offload=jax_impl.Offload(moments=offload)),
        jax.ShapeDtypeStruct((2, WIDTH), jnp.float32),
    )
    report = jax_impl.memory_report(plan, state).devices[0]
    rest = report.total + report.host + 4 * ELEMENTS
    return rest, report.host, rest + update.compile().memory_analysis().temp_size_in_bytes


def saves_in_torch(folder: Path) -> tuple[float, float, int, int]:
    """Seconds of a save, seconds of the call of an asynchronous save, steps during that save, bytes of its snapshot."""
    model = torch_model()
    optimizer = torch_impl.MainWeightAdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    started = time.perf_counter()
    torch_impl.save_checkpoint(folder / "torch", model, optimizer)
    alone = time.perf_counter() - started
    started = time.perf_counter()
    pending = torch_impl.save_checkpoint_async(folder / "torch-async", model, optimizer)
    called, steps = time.perf_counter() - started, 0
    while not pending.done():
        step()
        steps += 1
    pending.wait()
    return alone, called, steps, 12 * ELEMENTS


def saves_in_jax(folder: Path) -> tuple[float, float, int, int]:
    plan, weights = jax_impl.fully_shard(JaxModel(), jax_impl.data_parallel_mesh(1))
    optimizer = jax_impl.main_weight_adamw(1e-3)
    state = jax_impl.init_state(plan, weights, optimizer)
    step = jax_impl.make_train_step(plan, lambda model, x: jnp.mean(model(x)), optimizer)
    batch = jnp.ones((2, WIDTH))
    state, _ = step(state, batch)
    snapshot = host_bytes(Contents.of(plan, state).on_host(first=True))
    started = time.perf_counter()
    jax_impl.save_checkpoint(folder / "jax", plan, state)
    alone = time.perf_counter() - started
    started = time.perf_counter()
    pending = jax_impl.save_checkpoint_async(folder / "jax-async", plan, state)
    called, steps = time.perf_counter() - started, 0
    while not pending.done():
        state, _ = step(state, batch)
        steps += 1
    pending.wait()
    return alone, called, steps, snapshot


def main() -> None:
    jax_impl.simulate_devices(1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax"))
    print(f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {versions}")
    print(f"{ELEMENTS / 1e6:.1f} M elements\n")
    print("| moments | offload | torch: rest | host | update | jax: rest | host | update |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for moments in FORMATS:
        for offload in (0.0, 0.5, 1.0) if moments in ("float32", "float8_e4m3fn") else (0.0,):
            cells = []
            for measure in (in_torch, in_jax):
                rest, host, peak = measure(moments, offload)
                cells += [
                    f"{rest / ELEMENTS:.2f}",
                    f"{host / ELEMENTS:.2f}",
                    f"+{(peak - rest) / ELEMENTS:.2f}",
                ]
            print(f"| {moments} | {offload:.0%} | {' | '.join(cells)} |", flush=True)
    print(
        "\n| save | seconds | call of an asynchronous save, s | steps meanwhile | snapshot, bytes an element |"
    )
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as scratch:
        for name, measure_saves in (("torch", saves_in_torch), ("jax", saves_in_jax)):
            alone, called, steps, snapshot = measure_saves(Path(scratch))
            print(
                f"| {name} | {alone:.2f} | {called:.2f} | {steps} | {snapshot / ELEMENTS:.2f} |", flush=True
            )


if __name__ == "__main__":
    main()
