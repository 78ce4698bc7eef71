"""Steps of the decoder, compiled by XLA for GPUs and TPUs that are not there: their products against closed formulas
and XLA's own count, and times that follow from them.

Skipped where the ``compilers`` extra is not installed.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge.compiling.machines.hardware import HARDWARE, Machine
from bridge.compiling.timing.program import Done, Loop, Program, Start, Step, read_program
from bridge.compiling.timing.step_time import step_time
from bridge.core.hlo.collectives import COPY
from jax_impl.diagnostics.scheduled import read_collectives
from tests.support.compilers.setting import SHARD_MAP, SIZES, Setting
from tests.support.compilers.worker import Compiler, unavailable

Read = Callable[[Setting], tuple[Program, str, Any]]
H100 = Setting("h100:8", SHARD_MAP, "256", units=("embed", "layers/*", "lm_head"))


def _read(platform: str, folder: Path) -> Iterator[Read]:
    if reason := unavailable(platform):
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWINSHARD_DUMP", str(folder))
        compiler = Compiler(platform)

        def read(setting: Setting) -> tuple[Program, str, Any]:
            compiler.compile(setting)
            text = (folder / f"{setting}.hlo").read_text()
            return read_program(text), text, json.loads((folder / f"{setting}.costs.json").read_text())

        yield functools.cache(read)
        compiler.close()


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Read]:
    yield from _read("gpu", tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def tpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Read]:
    yield from _read("tpu", tmp_path_factory.mktemp("tpu"))


def closed_formula(setting: Setting) -> int:
    """6 operations for each weight of a product and token, and what attention adds, of which nothing is left out."""
    sizes = SIZES[setting.size]
    width, tokens = sizes["d_model"], setting.rows * setting.length
    heads = (2 * sizes["n_heads"] + 2 * sizes["n_kv_heads"]) * sizes["head_dim"]
    weights = sizes["n_layers"] * width * (heads + 3 * sizes["d_ff"]) + width * sizes["vocab_size"]
    scores = sizes["n_layers"] * sizes["n_heads"] * sizes["head_dim"] * setting.length * tokens
    return 6 * weights * tokens + 12 * scores


def assert_collectives_as_another_reader_finds_them(program: Program, text: str) -> None:
    nbytes: Counter[str] = Counter()
    for transfer, times in program.transfers:
        if transfer.kind != COPY:
            nbytes[transfer.kind] += times * transfer.bytes
    expected: Counter[str] = Counter()
    for collective in read_collectives(text):
        expected[collective.kind] += collective.bytes
    assert nbytes == expected


def without_overlap(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Every transfer is waited for where it begins."""
    serial: list[Step] = []
    for step in steps:
        if isinstance(step, Loop):
            serial.append(replace(step, steps=without_overlap(step.steps)))
        elif isinstance(step, Start) and step.transfer.kind != COPY:
            serial += [step, Done(step.key)]
        else:
            serial.append(step)
    return tuple(serial)


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "scanned"])
def test_products_on_gpus_are_those_of_the_closed_formula(gpu: Read, stacked: bool) -> None:
    setting = replace(H100, stacked=stacked)
    program, text, _ = gpu(setting)
    assert program.flops.keys() == {"f32_highest"}
    assert program.flops.total() == pytest.approx(closed_formula(setting), rel=0.02)
    assert_collectives_as_another_reader_finds_them(program, text)


@pytest.mark.slow
def test_overlap_on_gpus_makes_a_step_shorter_by_what_it_hides(gpu: Read) -> None:
    program, _, _ = gpu(H100)
    machine = Machine(HARDWARE["h100"], (8,))
    overlapped = step_time(program, machine)
    plain = step_time(Program(without_overlap(program.steps)), machine)
    assert plain.exposed == pytest.approx(plain.communication)
    assert overlapped.communication == pytest.approx(plain.communication)
    hidden = overlapped.communication - overlapped.exposed
    assert hidden > 0.2 * overlapped.communication
    assert plain.total - overlapped.total == pytest.approx(hidden)


@pytest.mark.slow
def test_products_on_tpus_are_those_of_the_closed_formula_and_of_xla(tpu: Read) -> None:
    setting = Setting("v5e:4x4", SHARD_MAP, "256", units=H100.units)
    program, text, costs = tpu(setting)
    assert program.flops.total() == pytest.approx(closed_formula(setting), rel=0.02)
    assert program.flops.total() == pytest.approx(costs["flops"], rel=0.02)
    assert_collectives_as_another_reader_finds_them(program, text)
