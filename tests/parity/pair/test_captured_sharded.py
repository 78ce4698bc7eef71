"""Sharded torch models captured on ranks: the trace of one process with all rows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from bridge.core.mapping import parse_mapping
from bridge.parity import capture_jax, capture_torch, compare_traces
from bridge.parity.recorded.distance import epsilon
from bridge.parity.recorded.recording import Leaves
from bridge.parity.recorded.trace import TraceSide
from tests.support.parity.sharded_captures import (
    ROWS,
    WIDTH,
    Net,
    capture,
    compared_directly,
    failing,
    model_of,
    refused,
    square_loss,
)
from tests.support.parity.small_twins import MAPPING, NAMES, JaxMLP, jax_loss
from tests.support.processes import importing_from
from tests.support.ranks import RankError, RankGroup

ROOT = Path(__file__).parents[3]
TABLE = parse_mapping(MAPPING, "small")


def near(leaves: Leaves, expected: Leaves, eps: float, what: str) -> None:
    assert list(leaves) == list(expected), what
    for name, array in expected.items():
        assert leaves[name].shape == array.shape, f"{what} {name}"
        assert leaves[name].dtype == array.dtype, f"{what} {name}"
        error = np.linalg.norm((leaves[name] - array).astype(np.float64))
        assert error <= 30 * eps * max(float(np.linalg.norm(array.astype(np.float64))), 1e-3), (
            f"{what} {name} {error}"
        )


def equal_traces(trace: TraceSide, expected: TraceSide, dtypes: tuple[str, ...]) -> None:
    for name, array in expected.weights().items():
        np.testing.assert_array_equal(trace.weights()[name], array)
    for name, array in expected.batch().items():
        np.testing.assert_array_equal(trace.batch()[name], array)
    for dtype in dtypes:
        eps = epsilon(dtype)
        mine, theirs = trace.record(None, dtype), expected.record(None, dtype)
        assert mine.loss == pytest.approx(theirs.loss, rel=30 * eps)
        near(mine.gradients, theirs.gradients, eps, f"{dtype} gradients")
        assert [(call.path, call.number, call.kind, call.parent) for call in mine.calls] == [
            (call.path, call.number, call.kind, call.parent) for call in theirs.calls
        ]
        for call, other in zip(mine.calls, theirs.calls, strict=True):
            near(call.inputs, other.inputs, eps, f"{dtype} {call.path} inputs")
            near(call.outputs, other.outputs, eps, f"{dtype} {call.path} outputs")
            near(call.gradients, other.gradients, eps, f"{dtype} {call.path} gradients")
        if expected.steps:
            trained, other_trained = trace.train([], dtype), expected.train([], dtype)
            assert trained.losses == pytest.approx(other_trained.losses, rel=100 * eps)
            near(trained.last, other_trained.last, 100 * eps, "trained")


@pytest.mark.fast_cases("tensor_parallel-None", "ours-None")
@pytest.mark.parametrize("loss", ["square", None])
@pytest.mark.parametrize("way", ["fsdp2", "ours", "tensor_parallel", "sharded_tensors", "two_axes"])
def test_a_sharded_model_is_captured_as_one_process_would(
    tmp_path: Path, ranks: RankGroup, way: str, loss: str | None
) -> None:
    world = 4 if way == "two_axes" else 2
    done = ranks.run(
        world, capture, way, str(tmp_path / "mine"), {"loss": loss, "reference": True, "steps": 2}
    )
    assert done == [(0, True)] * world
    capture_torch(model_of(way), ROWS, tmp_path / "plain", loss=square_loss if loss else None, steps=2)
    sharded, expected = TraceSide.read(tmp_path / "mine"), TraceSide.read(tmp_path / "plain")
    equal_traces(sharded, expected, ("float64", "float32"))
    assert len(sharded.notes) == 1, sharded.notes


def test_parts_that_ranks_give_each_other_outside_of_dtensors_are_noted(
    tmp_path: Path, ranks: RankGroup
) -> None:
    options = {"loss": "square", "reference": True, "steps": 0}
    ranks.run(2, capture, "local_shards", str(tmp_path / "mine"), options)
    stored = TraceSide.read(tmp_path / "mine")
    words = "the output of up differs between ranks 0 and 1, which have the same rows"
    assert any(words in note for note in stored.notes)
    capture_torch(model_of("local_shards"), ROWS, tmp_path / "plain", loss=square_loss, steps=0)
    mine, plain = (trace.record(None, "float64") for trace in (stored, TraceSide.read(tmp_path / "plain")))
    near(mine.gradients, plain.gradients, epsilon("float64"), "gradients")
    near(mine.calls[0].outputs, plain.calls[0].outputs, epsilon("float64"), "outputs")


@pytest.fixture(scope="module")
def jax_traces(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Of the same model in JAX, by dtype and steps of training."""
    folder = tmp_path_factory.mktemp("jax")
    traces = {}
    for dtype, steps in (("float32", 2), ("float32", 0), ("bfloat16", 0)):
        traces[dtype, steps] = folder / f"{dtype}-{steps}"
        capture_jax(jax_net(), ROWS, traces[dtype, steps], loss=jax_loss, dtype=dtype, steps=steps)
    return traces


def jax_net() -> JaxMLP:
    model = JaxMLP()
    for name, value in Net().state_dict().items():
        if name in NAMES:
            module, last = NAMES[name].split("/")
            getattr(getattr(model, module), last)[...] = jnp.asarray(value.numpy().T)
    return model


@pytest.mark.fast_cases("tensor_parallel-True", "ours-False")
@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("way", ["fsdp2", "ours", "tensor_parallel"])
def test_a_sharded_model_is_compared_with_jax(
    tmp_path: Path, ranks: RankGroup, jax_traces: dict[tuple[str, int], Path], way: str, reference: bool
) -> None:
    options = {"loss": "square", "reference": reference, "steps": 2}
    ranks.run(2, capture, way, str(tmp_path / "mine"), options)
    report = compare_traces(tmp_path / "mine", jax_traces["float32", 2], mapping=TABLE)
    assert report.same, [(row.stage, row.name, row.ratio) for row in report.rows if row.counts]
    assert {row.name for row in report.stage("forward")} == {"", "up", "norm", "down"}
    assert {row.stage for row in report.rows} >= {"gradients", "update", "steps", "backward", "loss"}
    assert any("torch ran in float32 only" in note for note in report.notes) is not reference
    assert f"torch ran sharded on 2 ranks, with {1 if way == 'tensor_parallel' else 2}" in report.notes[-1]
    assert list(report.remarks())[: len(report.notes)] == list(report.notes)


FAULTS = {
    "without_reduction": (
        "forward",
        "down",
        "the output of down differs between ranks 0 and 1, which have the same rows",
    ),
    "unreduced_gradients": (
        "gradients",
        "norm.weight",
        "the gradient of norm.weight, which is not sharded, differs between ranks 0 and 1",
    ),
    "another epsilon": ("forward", "norm", ""),
}


@pytest.mark.each_value
@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_sharded_run_is_named(
    tmp_path: Path, ranks: RankGroup, jax_traces: dict[tuple[str, int], Path], fault: str, reference: bool
) -> None:
    stage, name, note = FAULTS[fault]
    options = {"loss": "square", "reference": reference, "steps": 0}
    if fault == "another epsilon":
        options["eps"] = 1e-3
    way = "fsdp2" if fault == "another epsilon" else fault
    ranks.run(2, capture, way, str(tmp_path / "mine"), options)
    report = compare_traces(tmp_path / "mine", jax_traces["float32", 0], mapping=TABLE)
    assert not report.same
    differing = [(row.stage, row.name) for row in report.rows if row.counts]
    assert report.first_divergence is not None
    if stage == "gradients":
        assert sorted(differing) == [
            ("backward", "norm"),
            ("gradients", "norm.bias"),
            ("gradients", "norm.weight"),
        ]
    else:
        assert (report.first_divergence.stage, report.first_divergence.name) == (stage, name), differing
    assert any(note in line for line in report.notes)


@pytest.mark.parametrize("way", ["fsdp2", "ours"])
def test_a_sharded_model_in_bfloat16(
    tmp_path: Path, ranks: RankGroup, jax_traces: dict[tuple[str, int], Path], way: str
) -> None:
    options = {"loss": "square", "reference": True, "steps": 0, "dtype": "bfloat16"}
    ranks.run(2, capture, way, str(tmp_path / "mine"), options)
    report = compare_traces(tmp_path / "mine", jax_traces["bfloat16", 0], mapping=TABLE)
    assert report.same, report.summary()
    assert TraceSide.read(tmp_path / "mine").record(None, "bfloat16").calls[1].outputs[""].dtype == "bfloat16"


CANNOT = {
    "rows": "batch of rank 1: expected as many rows as rank 0 has, 3, got 2",
    "replicas": r"expected each batch on the same number of ranks, got \[2, 1\] ranks",
    "path": "expected no file or directory, found one",
    "plain reference": "reference: expected up.weight .* sharded as in the model, got .* not sharded",
    "float32 reference": "reference: expected float64, got up.weight in float32",
    "gradients": "model: up.weight has a gradient: call zero_grad",
    "loss": "expected a loss among",
    "dtype": "dtype: expected one of",
    "samples": "samples: expected between 1 and 5 positions of an axis of 6",
    "unused samples": "samples: expected the size of an axis that a module's array has, got 5",
}


@pytest.mark.parametrize("what", CANNOT)
def test_all_ranks_refuse_together(tmp_path: Path, ranks: RankGroup, what: str) -> None:
    path = tmp_path / "mine"
    if what == "path":
        path.mkdir()
    world = 3 if what == "replicas" else 2
    for rank, text in enumerate(ranks.run(world, refused, what, str(path))):
        assert re.search(CANNOT[what], text), f"rank {rank}: {text}"
    assert list(tmp_path.iterdir()) == ([path] if what == "path" else [])


def test_ranks_that_call_other_modules(tmp_path: Path, ranks: RankGroup) -> None:
    words = "expected the calls of rank 0, got another call at index 1: 'up' on rank 0, 'norm' on rank 1"
    with pytest.raises(RankError, match=words) as error:
        ranks.run(2, failing, "other calls", str(tmp_path / "mine"), timeout=60)
    assert "rank 0 of 2" in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "loss"])
def test_a_rank_that_fails_ends_the_others_and_leaves_no_trace(tmp_path: Path, where: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from tests.support.parity.sharded_captures import failing\n"
        "dist.init_process_group('gloo')\n"
        f"failing({where!r}, {str(tmp_path / 'mine')!r})\n"
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=importing_from(ROOT), capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert (
        f"rank 1: FSDPNet or its loss refused the batch (array float32 [3, {WIDTH}]): RuntimeError"
        in done.stderr
    )
    assert list(tmp_path.iterdir()) == [script]


def test_samples_of_a_sharded_model(tmp_path: Path, ranks: RankGroup) -> None:
    ranks.run(2, refused, "five rows", str(tmp_path / "mine"))
    whole = TraceSide.read(tmp_path / "mine")
    assert whole.record(None).calls[0].outputs[""].shape == (2, WIDTH)


def test_parity_sends_sharded_models_to_capture_torch(ranks: RankGroup) -> None:
    (text,) = ranks.run(1, compared_directly)
    assert "up.weight is sharded (a DTensor): call bridge.parity.capture_torch" in text
