"""Streams, memory and profiler ranges on one GPU; skipped where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torch_impl import MainWeightAdamW, MixedPrecisionPolicy, fully_shard
from torch_impl.comm.streams import CudaStreams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDTH, LAYERS = 1024, 6
UNIT = 4 * (WIDTH * WIDTH + WIDTH)
SLACK = 16 * 2**20  # workspaces of matrix products, and the allocator's blocks


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def sharded(**options: Any) -> nn.Sequential:
    model = layers().cuda()
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def busy(milliseconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1_000_000))


def copy(target: torch.Tensor, source: torch.Tensor, async_op: bool) -> None:
    target.copy_(source)


def test_a_transfer_runs_while_the_computation_is_busy_and_finish_orders_them() -> None:
    streams = CudaStreams(torch.device("cuda"))
    source, target = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    ready = torch.cuda.Event()

    def copy_and_tell(async_op: bool) -> None:
        target.copy_(source)
        ready.record()

    transfer = streams.start([("gather", copy_and_tell)])
    busy(200)
    computed = torch.cuda.Event()
    computed.record()
    ready.synchronize()
    assert not computed.query(), "the transfer waited for work that was enqueued after it"
    transfer.finish()
    assert float(target.sum()) == 1 << 20


def test_a_transfer_starts_after_what_the_computation_wrote_before() -> None:
    streams = CudaStreams(torch.device("cuda"))
    source, middle, target = (torch.zeros(1 << 20, device="cuda") for _ in range(3))
    busy(100)
    source.fill_(3.0)
    steps = [("reduce", partial(copy, middle, source)), ("outer", partial(copy, target, middle))]
    streams.start(steps).finish()
    assert float(target.mean()) == 3.0


def test_peak_memory_is_that_at_rest_and_three_units(nccl: None) -> None:
    model = sharded()
    optimizer = MainWeightAdamW(model.parameters())
    x = torch.randn(2, WIDTH, device="cuda")
    for _ in range(3):
        torch.cuda.synchronize()
        rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() < rest + 3 * 2 * UNIT + SLACK
    before = torch.cuda.memory_allocated()
    del model, optimizer
    assert before - torch.cuda.memory_allocated() > 4 * UNIT * LAYERS


def test_memory_that_is_reused_under_pressure_never_changes_a_result(nccl: None) -> None:
    """Allocations of the computation's stream between all steps would land in memory that a lane still reads."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    losses = []
    for pressure in (False, True):
        model = sharded(mp_policy=policy)
        optimizer = MainWeightAdamW(model.parameters(), lr=1e-2)
        run = []
        for step in range(20):
            x = torch.randn(64, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            if pressure:
                _ = [torch.full((WIDTH, WIDTH), float("nan"), device="cuda") for _ in range(8)]
            loss = model(x).float().square().mean()
            if pressure:
                _ = [torch.full((WIDTH, WIDTH), float("nan"), device="cuda") for _ in range(8)]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.append(loss.item())
        losses.append(run)
    assert losses[0] == losses[1]


def test_profiler_ranges_name_the_unit(nccl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    @contextlib.contextmanager
    def recording(name: str) -> Iterator[None]:
        names.append(name)
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", recording)
    model = sharded()
    model(torch.randn(2, WIDTH, device="cuda")).sum().backward()
    assert {f"{k} all-gather" for k in range(LAYERS)} <= set(names)
    assert {f"{k} reduce" for k in range(LAYERS)} <= set(names)


def test_a_module_built_on_the_cpu_moves_to_the_gpu_of_the_mesh(nccl: None) -> None:
    model = fully_shard(layers())
    assert {param.device.type for param in model.parameters()} == {"cuda"}
    got = model(torch.ones(1, WIDTH, device="cuda"))
    torch.testing.assert_close(got.cpu(), layers()(torch.ones(1, WIDTH)), rtol=1e-3, atol=1e-4)
