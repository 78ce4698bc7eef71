"""``CPUOffloadPolicy`` on one GPU: pinned memory, the bits of no offload, and copies beside the computation."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.profiler import ProfilerActivity, profile

from tests.gpu.devices import ON_GPU, busy, needs_device, needs_gpu
from tests.gpu.networks import loss_of, network, rows, same_bits, sharded, train, values
from torch_impl import MainWeightAdamW, MixedPrecisionPolicy
from torch_impl.comm.streams import CudaStreams
from torch_impl.dtensor.local import local_of
from torch_impl.runtime.ground.host_memory import HostMemory, fetch

OFFLOAD: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
HALF = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}


def float8(gather: Any) -> dict[str, Any]:
    return {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, gather_dtype=gather)}


def of_powers(model: nn.Module) -> torch.optim.Optimizer:
    """One rounding an element, which the host's processor and the device do alike."""
    return torch.optim.SGD(model.parameters(), lr=2.0**-4)


@needs_device
@pytest.mark.parametrize(
    "options",
    [
        {},
        HALF,
        {**HALF, "strategy": "no_shard"},
        {**HALF, "strategy": "optim_grads"},
        {**HALF, "prefetch": 0},
        float8("mxfp8"),
        float8(torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_training_has_the_bits_of_no_offload(one_rank: None, options: dict[str, Any]) -> None:
    plain, model = sharded(**options), sharded(**options, **OFFLOAD)
    assert train(model, of_powers(model)) == train(plain, of_powers(plain))
    assert same_bits(values(model), values(plain))


@needs_device
def test_weights_and_gradients_are_pinned_and_updated_by_the_host(one_rank: None) -> None:
    model = sharded(**HALF, **OFFLOAD)
    optimizer = MainWeightAdamW(model.parameters(), lr=1e-2)
    loss_of(model, rows(0)).backward()
    for param in model.parameters():
        for tensor in (local_of(param), local_of(param.grad)):
            assert tensor.device.type == "cpu"
            assert tensor.is_pinned() == ON_GPU
    optimizer.step()
    for state in optimizer.state.values():
        assert {local_of(value).device.type for value in state.values()} == {"cpu"}
    report = model.memory_report(optimizer)
    assert (report.main_weights, report.gradients, report.moments) == (0, 0, 0)


@needs_device
def test_adamw_trains_as_on_the_device_but_for_roundings(one_rank: None) -> None:
    plain, model = sharded(), sharded(**OFFLOAD)
    expected = train(plain, MainWeightAdamW(plain.parameters(), lr=1e-2))
    assert train(model, MainWeightAdamW(model.parameters(), lr=1e-2)) == pytest.approx(expected, rel=1e-4)


@needs_device
def test_gradients_of_microbatches_wait_on_the_host(one_rank: None) -> None:
    plain, model = sharded(), sharded(**OFFLOAD)
    for module in (plain, model):
        for number in range(3):
            module.set_is_last_backward(number == 2)
            (loss_of(module, rows(number)) / 3).backward()
    for mine, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert local_of(mine.grad).device.type == "cpu"
        assert torch.equal(local_of(mine.grad), local_of(want.grad).cpu())


def at_once(start: Callable[[CudaStreams], Any], done: torch.cuda.Event) -> Any:
    """A transfer that ends while the computation, enqueued after it, still runs."""
    streams = CudaStreams(torch.device("cuda"))
    transfer = start(streams)
    busy(200)
    computed = torch.cuda.Event()
    computed.record()
    done.synchronize()
    assert not computed.query(), "the copy waited for work that was enqueued after it"
    return transfer


@needs_gpu
def test_a_fetch_runs_while_the_computation_is_busy() -> None:
    home, done = HostMemory(pinned=True).copy_of(torch.full((1 << 20,), 3.0)), torch.cuda.Event()
    steps, arrived = fetch(home, torch.bfloat16, torch.device("cuda"))

    def tell(async_op: bool) -> None:
        done.record()

    transfer = at_once(lambda streams: streams.start([*steps, ("gather", tell)]), done)
    transfer.finish()
    assert float(arrived.float().mean()) == 3.0


@needs_gpu
def test_what_was_sent_is_on_the_host_when_the_transfer_is_finished() -> None:
    values = torch.zeros(1 << 22, device="cuda")
    busy(50)
    values.fill_(5.0)
    step, home = HostMemory(pinned=True).send(values)
    streams = CudaStreams(torch.device("cuda"))
    streams.start([step]).finish()
    # Read by the host's processor, which asks no stream.
    assert float(home.mean()) == 5.0


def kernels(events: Any, named: Callable[[str], bool]) -> list[tuple[float, float]]:
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and named(event.name)
    ]


@needs_gpu
def test_weights_come_and_gradients_leave_beside_products(one_rank: None) -> None:
    """Of a profile of a whole step: copies in both directions that a product of another unit runs beside."""
    width = 2048
    model = sharded(network(width=width, layers=6), **OFFLOAD)
    for step in range(3):
        loss_of(model, rows(step, 4096, width)).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        loss_of(model, rows(3, 4096, width)).backward()
        torch.cuda.synchronize()
    products = kernels(profiler.events(), lambda name: "gemm" in name or "nvjet" in name or "cutlass" in name)
    assert products, sorted({event.name for event in profiler.events()})
    for direction in ("HtoD", "DtoH"):
        copies = kernels(profiler.events(), lambda name, which=direction: f"Memcpy {which}" in name)
        large = [copy for copy in copies if copy[1] - copy[0] > 200]
        beside = sum(any(start < copy[1] and copy[0] < end for start, end in products) for copy in large)
        print(f"{direction}: {beside} of {len(large)} large copies run beside products")
        assert len(large) >= 6
        assert beside >= len(large) // 2


@needs_gpu
def test_the_device_holds_a_few_units_of_weights_and_gradients(one_rank: None) -> None:
    gc.collect()
    before_all, width, layers = torch.cuda.memory_allocated(), 1024, 16
    model = sharded(network(width=width, layers=layers), **OFFLOAD)
    optimizer = MainWeightAdamW(model.parameters())
    whole = sum(local_of(param).nbytes for param in model.parameters())
    for step in range(3):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss_of(model, rows(step, 16, width)).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    print(f"{extra / whole:.2f} of the weights' bytes")
    # Fetched shards, gathered weights and gradients of two units each, and the root's.
    assert extra < 0.6 * whole
    # Nothing of the model stays there but workspaces of products.
    assert before - before_all < 0.1 * whole + 80 * 2**20
