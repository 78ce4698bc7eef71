"""Tests that the PyTorch benchmark computes its tables correctly. They do not judge speed."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.bench import torch_memory
from tests.bench.bench_torch import (
    LIMITS,
    WARM_STEPS,
    Measured,
    broken_promises,
    measure,
    overheads,
    print_overheads,
    print_steps,
    weigh,
)
from tests.bench.costs import Cost, ratio
from tests.bench.torch_engines import ENGINES, TINY, Training, build_step, prototype
from tests.bench.torch_memory import LiveBytes, from_events, live_bytes
from tests.bench.torch_rounds import interleaved, over_ranks, unequal_losses
from tests.support.ranks import RankGroup
from torch_impl.models.decoder import DecoderConfig

KB = 1024
CPU = torch.device("cpu")
MEDIUM = DecoderConfig(8000, 128, 12, 4, 4, 32, 352)
"""With 64 tokens a rank all buffers have a sixteenth of the size that they have in the benchmark."""


def known_program() -> Callable[[], None]:
    kept = torch.zeros(64 * KB, dtype=torch.uint8)

    def step() -> None:
        first = torch.empty(100 * KB, dtype=torch.uint8)
        first.untyped_storage().resize_(0)
        second = torch.empty(200 * KB, dtype=torch.uint8)
        first.untyped_storage().resize_(300 * KB)
        del second
        kept.add_(1)

    return step


def test_live_bytes_of_a_known_program_are_exact_and_see_resized_storages() -> None:
    assert live_bytes(known_program, CPU) == LiveBytes(64 * KB, (64 + 200 + 300) * KB, 0)


@pytest.mark.slow
def test_live_bytes_see_what_a_warm_step_leaves_behind() -> None:
    def build() -> Callable[[], None]:
        kept: list[torch.Tensor] = []
        return lambda: kept.append(torch.empty(10 * KB, dtype=torch.uint8))

    assert live_bytes(build, CPU, warm=3) == LiveBytes(30 * KB, 40 * KB, 0)


def reduce_scattered() -> LiveBytes:
    def build() -> Callable[[], None]:
        shard = torch.zeros(500 * KB)
        return lambda: dist.reduce_scatter_tensor(shard, torch.ones(1000 * KB))

    return live_bytes(build, CPU)


def test_live_bytes_see_the_memory_of_gloo_threads_come_and_go(ranks: RankGroup) -> None:
    for live in ranks.run(2, reduce_scattered):
        # gloo reduces a copy of the input (4000 KB), in addition to the input and the shard (2000 KB).
        assert live.rest == 2000 * KB
        assert 10_000 * KB <= live.peak <= 10_001 * KB
        assert live.left < KB


def test_what_cuda_hands_back_late_is_neither_there_before_nor_left(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bytes of the process at each look: of something before, at rest, of a step's end, after its deletion.
    looks = iter([900, 500, 500, 700, 800, 650, 510, 510])
    monkeypatch.setattr(torch_memory, "_LOOK_SECONDS", 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(looks))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 950)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    assert live_bytes(lambda: lambda: None, torch.device("cuda", 0)) == LiveBytes(200, 450, 10)


def weighed(training: Training, engine: str) -> int:
    return weigh(training, engine).peak


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_the_peak_is_not_above_that_of_fsdp2(ranks: RankGroup, world: int) -> None:
    training = Training(MEDIUM, length=32)
    ours, theirs = (max(ranks.run(world, weighed, training, engine)) for engine in ("ours", "fsdp2"))
    assert ours <= theirs


def event(ts: float, address: int, size: int) -> dict[str, Any]:
    return {"name": "[memory]", "ts": ts, "args": {"Addr": address, "Bytes": size}}


def test_events_count_by_their_time_and_addresses_that_return_were_released() -> None:
    step = {"name": "twinshard: measured step", "ts": 10.0, "dur": 10.0}
    seen = [event(11, 2, 7), event(1, 1, 5), step, event(12, 2, -7), event(13, 3, 4), event(30, 4, 100)]
    assert from_events(seen) == LiveBytes(5, 12, 109)
    # Address 1 is allocated again without a release.
    assert from_events([*seen, event(2, 1, 6)]) == LiveBytes(6, 13, 110)
    with pytest.raises(RuntimeError, match="memory events"):
        from_events([step])


def test_engines_take_turns_in_every_round() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        costs = interleaved(calls, rounds=2, repeat=2, device="cpu")
    finally:
        dist.destroy_process_group()
    assert "".join(order) == "aabbccaabbcc"
    assert {name: len(per_round) for name, per_round in costs.items()} == {"a": 2, "b": 2, "c": 2}


def test_costs_are_those_of_one_call_and_cpu_seconds_count_all_threads() -> None:
    def threaded() -> None:
        worker = threading.Thread(target=lambda: sum(range(300_000)))
        worker.start()
        worker.join()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        once = interleaved({"a": threaded}, rounds=1, repeat=1, device="cpu")["a"][0]
        many = interleaved({"a": threaded}, rounds=1, repeat=20, device="cpu")["a"][0]
    finally:
        dist.destroy_process_group()
    assert once.cpu > 1e-3
    assert many.cpu < 10 * once.cpu


def test_the_slowest_rank_is_the_wall_time_and_cpu_seconds_are_the_mean() -> None:
    first = {"ours": [Cost(1.0, 2.0), Cost(5.0, 1.0)]}
    second = {"ours": [Cost(3.0, 4.0), Cost(4.0, 2.0)]}
    assert over_ranks([first, second]) == {"ours": [Cost(3.0, 3.0), Cost(5.0, 1.5)]}


def test_a_ratio_is_taken_within_each_round() -> None:
    spread = ratio([1.0, 9.0, 4.0], [2.0, 3.0, 4.0])
    assert (spread.least, spread.median, spread.most) == (0.5, 1.0, 3.0)
    assert str(spread) == "1.00 (0.50-3.00)"
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize("wrong", [1.00002, math.nan, math.inf])
def test_losses_that_differ_on_one_rank_in_one_step_are_named(wrong: float) -> None:
    losses = {"fsdp2": [[2.0, 1.0], [3.0, 1.0]], "ours": [[2.0, 1.0], [3.0, 1.0]]}
    assert unequal_losses(losses, {"ours": 1e-5}, "fsdp2") == []
    losses["ours"][1][1] = wrong
    (sentence,) = unequal_losses(losses, {"ours": 1e-5}, "fsdp2")
    assert sentence.startswith("ours, rank 1, step 2: expected the loss of fsdp2, 1.0000000, within 1e-05")


@pytest.mark.slow
@pytest.mark.fast_cases("dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_benchmark_in_small(
    ranks: RankGroup, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(TINY, dtype, batch=2, length=8)
    measurement = measure(ranks.run, 2, training, rounds=2, repeat=2)
    assert broken_promises([measurement]) == []
    assert measurement.tokens == 2 * 2 * 8
    for name in ENGINES:
        assert len(measurement.costs[name]) == 2
        assert all(cost.wall > 0 and cost.cpu > 0 for cost in measurement.costs[name])
        assert [len(steps) for steps in measurement.losses[name]] == [WARM_STEPS + 2 * 2] * 2
        # Each rank has tokens of its own, and every engine trains.
        assert measurement.losses[name][0] != measurement.losses[name][1]
        assert all(steps[-1] < steps[0] for steps in measurement.losses[name])
    parameters = sum(param.numel() for param in prototype(training).parameters())
    assert measurement.memory["ddp"].rest >= 4 * 4 * parameters
    for name in ("ours", "fsdp2"):
        assert 3 * 4 * parameters / 2 <= measurement.memory[name].rest < 3 * 4 * parameters / 2 + 16 * KB
        assert measurement.memory[name].peak > measurement.memory[name].rest
    print_steps([measurement])
    assert capsys.readouterr().out.count("| 2 |") == len(ENGINES) + len(ENGINES) - 1


def test_an_engine_that_trains_something_else_is_reported() -> None:
    costs = {name: [Cost(1.0, 1.0)] for name in ENGINES}
    memory = {name: LiveBytes(1, 2, 0) for name in ENGINES}
    losses = {name: [[3.0, 2.0]] for name in ENGINES}
    right = Measured(1, "float32", 1, costs, memory, losses)
    assert broken_promises([right]) == []
    other = dataclasses.replace(
        right, losses={**losses, "ours": [[3.0, 2.0 + 4 * LIMITS[torch.float32]["ours"]]]}
    )
    leaking = dataclasses.replace(right, memory={**memory, "ddp": LiveBytes(1, 2, 10**6)})
    assert [len(broken_promises([measurement])) for measurement in (other, leaking)] == [1, 1]
    assert broken_promises([leaking], ("ours", "fsdp2")) == []
    leaking = dataclasses.replace(right, memory={**memory, "ours": LiveBytes(1, 2, 10**6)})
    assert len(broken_promises([leaking], ("ours", "fsdp2"))) == 1


def test_hooks_are_counted_per_unit_beyond_the_plain_module(
    ranks: RankGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = overheads(ranks.run, 1, 3, "cpu", 2, 2)
    assert [overhead.what for overhead in rows] == ["forward and backward", "optimizer step"]
    for overhead in rows:
        assert {name: len(values) for name, values in overhead.cpu.items()} == {"ours": 2, "fsdp2": 2}
    print_overheads(rows, 3)
    assert "| 1 | forward and backward |" in capsys.readouterr().out


def test_overhead_is_the_difference_in_microseconds_over_the_units() -> None:
    def launch(world: int, *_: Any) -> list[Any]:
        part = {"plain": [Cost(1.0, 2.0)], "ours": [Cost(1.5, 2.2)], "fsdp2": [Cost(2.0, 2.4)]}
        return [[part, part]] * world

    overhead = overheads(launch, 2, 100, "cpu", 1, 1)[0]
    assert overhead.wall == {"ours": [pytest.approx(5000)], "fsdp2": [pytest.approx(10_000)]}
    assert overhead.cpu == {"ours": [pytest.approx(2000)], "fsdp2": [pytest.approx(4000)]}


def test_unknown_engines_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of ours, fsdp2, ddp, plain, got 'fsdp'"):
        build_step("fsdp", Training(TINY), prototype(Training(TINY)))
