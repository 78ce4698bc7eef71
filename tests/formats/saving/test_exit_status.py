"""A program whose last asynchronous save failed ends with a status other than 0, and says why, in both halves."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.core.formats.saving import pending

# A limit on the size of files stands for a full disk, which takes rights to make.
LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
"""
LIMIT = "resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))\n"

TORCH = """
from torch import nn
from torch_impl import CheckpointManager, save_checkpoint, save_checkpoint_async
args = (nn.Linear(600, 500),)
"""
JAX = """
import optax
from flax import nnx
from jax_impl import CheckpointManager, fully_shard, init_state, save_checkpoint, save_checkpoint_async
import jax
model = nnx.Linear(600, 500, rngs=nnx.Rngs(0))
plan, weights = fully_shard(model, jax.make_mesh((1,), ("dp",)), units=[])
args = (plan, init_state(plan, weights, optax.sgd(0.1)))
"""
WAYS = {
    "async": "save_checkpoint_async(PATH, *args)",
    "manager": "CheckpointManager(PATH).save(1, *args)",
    "told": "try:\n    save_checkpoint_async(PATH, *args).wait()\nexcept Exception as error:\n    print(error)",
    "closed": "with CheckpointManager(PATH) as manager:\n    manager.save(1, *args)",
    "sync": "save_checkpoint(PATH, *args)",
}


def run(half: str, way: str, path: Path, limit: int) -> subprocess.CompletedProcess[str]:
    program = LIMITED + half + f"PATH = {str(path)!r}\n" + LIMIT.format(limit=limit) + WAYS[way]
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)


@pytest.mark.fast_cases("torch-async")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("half", [pytest.param(TORCH, id="torch"), pytest.param(JAX, id="jax")])
def test_the_status_and_the_cause(half: str, way: str, tmp_path: Path) -> None:
    done = run(half, way, tmp_path / "a", 100_000)
    assert "File too large" in (done.stdout if way == "told" else done.stderr), done.stderr
    assert "enforce fail" not in done.stderr.splitlines()[-1] if done.stderr else True
    assert (done.returncode == 0) == (way == "told"), done
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.slow
@pytest.mark.parametrize("half", [pytest.param(TORCH, id="torch"), pytest.param(JAX, id="jax")])
def test_a_save_that_succeeds_ends_with_0(half: str, tmp_path: Path) -> None:
    done = run(half, "async", tmp_path / "a", 100_000_000)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a").is_dir()


def test_what_a_program_writes_after_the_report_arrives_when_it_flushes() -> None:
    arrived = io.BytesIO()
    stream = pending._FailsAtExit(io.TextIOWrapper(arrived, write_through=False))
    print("a last word", file=stream, end="")
    assert arrived.getvalue() == b""
    stream.flush()
    assert arrived.getvalue() == b"a last word"
