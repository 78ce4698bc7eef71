"""The planned peak is within a tenth of what each runtime measures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_impl
from bridge.compiling.compiled import check_compiled
from bridge.planning import Workload, load_policy, make_plan, parse_policy, resolve_models
from tests.bench import torch_peaks
from tests.bench.peak_shapes import CONFIGS, DEVICES, Cell, model_named
from tests.bench.torch_memory import live_bytes
from tests.planning.test_plan_torch import assert_collectives
from tests.support.ranks import RankGroup
from torch_impl.models import Decoder, DecoderConfig, next_token_loss

WITHIN = 0.10


def policy(strategy: str, compute: str, recompute: bool) -> str:
    lines = [f'[precision]\ncompute = "{compute}"\nreduce = "float32"\n']
    lines += [
        f'[[unit]]\nmatch = "layers.*"\nstrategy = "{strategy}"\nrecompute = {str(recompute).lower()}\n'
    ]
    return "".join([*lines, f'[[unit]]\nmatch = ""\nstrategy = "{strategy}"\n'])


def sharded(text: str) -> tuple[Decoder, torch_impl.MainWeightAdamW]:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig())
    torch_impl.ShardingPolicy.parse(text, "test").apply(model)
    return model, torch_impl.MainWeightAdamW(model.parameters())


def measured(text: str, batch: int, length: int, microbatches: int) -> tuple[int, int]:
    """Bytes at rest without gradients, and at the peak."""

    def build() -> Callable[[], Any]:
        model, optimizer = sharded(text)
        tokens = torch.zeros(batch, length, dtype=torch.int64)

        def step() -> None:
            for k in range(microbatches):
                model.set_is_last_backward(k == microbatches - 1)
                loss = next_token_loss(model(tokens), tokens)
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()

        return step

    live = live_bytes(build, torch.device("cpu"))
    return live.rest, live.peak


@pytest.mark.fast_cases("optim_grads_params-float32-False-1")
@pytest.mark.parametrize(
    ("strategy", "compute", "recompute", "microbatches"),
    [
        pytest.param("no_shard", "float32", False, 1, marks=pytest.mark.slow),
        ("optim", "bfloat16", False, 2),
        pytest.param("optim_grads", "float32", True, 1, marks=pytest.mark.slow),
        ("optim_grads_params", "float32", False, 1),
        ("optim_grads_params", "bfloat16", True, 2),
    ],
)
def test_peak_of_the_decoder_in_torch(
    ranks: RankGroup, strategy: str, compute: str, recompute: bool, microbatches: int
) -> None:
    text = policy(strategy, compute, recompute)
    workload = Workload(8, 64, microbatches)
    plan = make_plan(
        resolve_models("decoder:default")["torch"], parse_policy(text, "test"), 2, "torch", workload
    )
    for rest, peak in ranks.run(2, measured, text, 8, 64, microbatches):
        kept = plan.at_rest.total - plan.at_rest.gradients.allocated
        assert rest == pytest.approx(kept, rel=0.01)
        assert plan.peak.total == pytest.approx(peak, rel=WITHIN)


@pytest.mark.slow
def test_peak_without_prefetch_in_torch(ranks: RankGroup) -> None:
    model = resolve_models("decoder:default")["torch"]
    planned, peaks = [], []
    # So few tokens that a layer's weights and gradients weigh more than its activations.
    for prefetch in (0, 1):
        text = f"[mesh]\nprefetch = {prefetch}\n{policy('optim_grads_params', 'float32', False)}"
        planned.append(make_plan(model, parse_policy(text, "test"), 2, "torch", Workload(1, 16)).peak.total)
        peaks.append(max(peak for _, peak in ranks.run(2, measured, text, 1, 16, 1)))
    # What gloo holds for a transfer varies by some percent.
    assert planned == pytest.approx(peaks, rel=0.08)
    # Else the test would also pass if neither knew of prefetch.
    assert planned[1] > 1.1 * planned[0]
    assert peaks[1] > peaks[0]


@pytest.mark.slow
def test_peak_of_units_inside_layers_in_torch(ranks: RankGroup) -> None:
    text = load_policy("mixture").to_toml()
    plan = make_plan(
        resolve_models("decoder:default")["torch"], parse_policy(text, "test"), 2, "torch", Workload(8, 64)
    )
    for _, peak in ranks.run(2, measured, text, 8, 64, 1):
        assert plan.peak.total == pytest.approx(peak, rel=WITHIN)


def one_step(text: str, microbatches: int) -> dict[str, Any]:
    model, optimizer = sharded(text)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(2):
        optimizer.zero_grad()
        with torch_impl.count_collectives(model) as count:
            for k in range(microbatches):
                model.set_is_last_backward(k == microbatches - 1)
                next_token_loss(model(tokens), tokens).backward()
        optimizer.step()
    calls, nbytes = dict(count.calls_of), dict(count.bytes_of)
    return {"memory": model.memory_report(optimizer), "calls": calls, "bytes": nbytes}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fsdp", "fsdp_bf16", "hfsdp", "hsdp", "mixture", "no_shard", "zero1", "zero2"]
)
def test_bytes_and_collectives_of_the_decoder_under_every_shipped_policy(ranks: RankGroup, name: str) -> None:
    chosen = load_policy(name)
    for rank, record in enumerate(ranks.run(4, one_step, chosen.to_toml(), 2)):
        model = resolve_models("decoder:default")["torch"]
        plan = make_plan(model, chosen, 4, "torch", Workload(1, 8, 2), device=rank)
        assert record["memory"].total == plan.at_rest.total
        assert record["memory"].moments == plan.at_rest.moments.allocated
        assert_collectives(plan, {**record, "groups": None})


@pytest.mark.fast_cases("no_shard-False-1")
@pytest.mark.parametrize(
    ("strategy", "recompute", "microbatches"),
    [
        ("optim_grads_params", True, 1),
        pytest.param("optim_grads_params", False, 2, marks=pytest.mark.slow),
        pytest.param("optim_grads", True, 1, marks=pytest.mark.slow),
        ("optim", False, 2),
        pytest.param("optim", True, 1, marks=pytest.mark.slow),
        ("no_shard", False, 1),
    ],
)
def test_the_plan_agrees_with_what_xla_compiles(strategy: str, recompute: bool, microbatches: int) -> None:
    chosen = parse_policy(policy(strategy, "float32", recompute), "test")
    check = check_compiled("decoder:default", chosen, 4, Workload(8, 64, microbatches))
    assert {line.what: (line.planned, line.compiled) for line in check.lines if line.agrees is False} == {}
    assert {line.what for line in check.lines if line.agrees} >= {"main weights", "all_reduce calls", "peak"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "recompute", "microbatches"),
    [
        ("optim_grads_params", False, 1),
        pytest.param("optim_grads_params", True, 2, marks=pytest.mark.slow),
        pytest.param("optim_grads", False, 2, marks=pytest.mark.slow),
        ("optim", True, 2),
        pytest.param("no_shard", False, 1, marks=pytest.mark.slow),
    ],
)
def test_the_plan_of_scanned_layers_agrees_with_what_xla_compiles(
    strategy: str, recompute: bool, microbatches: int
) -> None:
    chosen = parse_policy(policy(strategy, "float32", recompute), "test")
    check = check_compiled("decoder:default", chosen, 4, Workload(2, 64, microbatches), ("layers",))
    assert {line.what: (line.planned, line.compiled) for line in check.lines if line.agrees is False} == {}
    assert {line.what for line in check.lines if line.agrees} >= {"main weights", "all_reduce calls", "peak"}
    peak = next(line for line in check.lines if line.what == "peak")
    # The check is without prefetch.
    alike = replace(chosen, prefetch=0)
    unrolled = make_plan(
        resolve_models("decoder:default")["jax"], alike, 4, "jax", Workload(2, 64, microbatches)
    )
    # Else the test would also pass if the planner knew no loops.
    recomputed = strategy == "optim_grads_params" and recompute
    assert recomputed or abs(unrolled.peak.total - peak.compiled) > abs(peak.planned - peak.compiled)


@pytest.mark.slow
def test_the_plan_of_few_tokens_where_gradients_weigh_most_agrees_with_what_xla_compiles() -> None:
    chosen = parse_policy(policy("optim", "float32", False), "test")
    check = check_compiled("decoder:default", chosen, 8, Workload(1, 64, 2))
    assert {line.what: (line.planned, line.compiled) for line in check.lines if line.agrees is False} == {}


@pytest.mark.slow
def test_the_plan_of_units_inside_layers_agrees_with_what_xla_compiles() -> None:
    check = check_compiled("decoder:default", load_policy("mixture"), 4, Workload(4, 64))
    assert {line.what: (line.planned, line.compiled) for line in check.lines if line.agrees is False} == {}


@pytest.mark.slow
def test_a_plan_of_another_model_does_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: what is compiled is the quick decoder, what is planned the default one."""
    from bridge.compiling import compiled

    request = compiled.StepRequest
    monkeypatch.setattr(
        compiled, "StepRequest", lambda name, *rest, **more: request("decoder:quick", *rest, **more)
    )
    check = check_compiled("decoder:default", load_policy("fsdp"), 2, Workload(1, 8))
    assert not check.agrees
    assert "the plan differs from what XLA compiled" in check.summary()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "length", "recompute", "stacked", "strategy"),
    [
        ("decoder", 2048, True, True, "fsdp"),
        ("llama", 512, True, True, "zero1"),
        ("llama", 2048, True, False, "zero1"),
    ],
)
def test_peaks_of_long_sequences_are_those_that_xla_compiles(
    tmp_path: Path, model: str, length: int, recompute: bool, stacked: bool, strategy: str
) -> None:
    cell = Cell(model, length, 1, recompute, stacked, strategy)
    check = check_compiled(model_named(model, tmp_path), cell.policy(), DEVICES, cell.workload, cell.stacks)
    assert {line.what: (line.planned, line.compiled) for line in check.lines if line.agrees is False} == {}
    assert {line.what for line in check.lines if line.agrees} >= {"main weights", "all_reduce calls", "peak"}


# A part is as many cells as fit in the time of a test: XLA compiles one in 15 s, on a machine with nothing else to do.
@pytest.mark.slow
@pytest.mark.parametrize("scanned", ["yes", "no"])
@pytest.mark.parametrize(
    ("model", "strategy", "microbatches"),
    [
        *(
            (model, strategy, microbatches)
            for model in ("decoder", "llama")
            for strategy in ("fsdp", "zero1", "zero2")
            for microbatches in (1, 4)
        ),
        *(
            (model, strategy, 1)
            for model in CONFIGS
            if model not in ("llama", "gemma2")
            for strategy in ("fsdp", "zero1")
        ),
    ],
)
def test_planned_peaks_are_within_a_tenth_of_what_xla_compiles(
    model: str, strategy: str, microbatches: int, scanned: str
) -> None:
    """All lengths, with and without recomputation; of families but Llama two lengths.

    A recomputed layer of Gemma 2 is planned up to 17 % too high.
    """
    parts = ["--strategies", strategy, "--microbatches", str(microbatches), "--stacked", scanned]
    lengths = [] if model in ("decoder", "llama") else ["--lengths", "512,4096"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_plan_peak", "--models", model, *parts, *lengths],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert ", 0 beyond 10 %" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "length", "recompute"),
    [
        ("llama", 512, True),
        *(
            pytest.param(model, length, recompute, marks=pytest.mark.slow)
            for model in ("decoder", "llama", "llama-eager")
            for length in (64, 512, 2048)
            for recompute in (False, True)
            if (model, length, recompute) != ("llama", 512, True) and (model, length) != ("decoder", 2048)
        ),
    ],
)
def test_planned_peaks_are_within_a_tenth_of_what_torch_allocates(
    ranks: RankGroup, model: str, length: int, recompute: bool
) -> None:
    cell = Cell(model, length, 1, recompute, False, "fsdp")
    peaks = ranks.run(torch_peaks.RANKS, torch_peaks.measured, cell, timeout=600)
    assert torch_peaks.planned(cell)[0] == pytest.approx(max(peaks), rel=WITHIN)
