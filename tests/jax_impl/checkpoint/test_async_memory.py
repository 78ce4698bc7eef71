"""Host memory of an asynchronous save: the bytes of this process's rows, and little beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys, jax, jax.numpy as jnp, numpy as np
from tests.support.process_memory import AnonymousPeak
import jax_impl as ji
ji.simulate_devices(2)
size = 2048
weights = {f"w{k}": np.full((size, size), 0.01, np.float32) for k in range(8)}
plan, arrays = ji.fully_shard(weights, ji.data_parallel_mesh(2), units=[])
optimizer = ji.main_weight_adamw(1e-3)
state = ji.init_state(plan, arrays, optimizer)
ji.save_checkpoint_async(sys.argv[1] + "/0", plan, state).wait()
step = ji.make_train_step(plan, lambda w, x: jnp.mean((x @ w["w0"]) ** 2), optimizer)
state, _ = step(state, np.ones((4, size), np.float32))
jax.block_until_ready(state)
with AnonymousPeak() as peak:
    ji.save_checkpoint_async(sys.argv[1] + "/1", plan, state).wait()
print(peak.above / sum(array.nbytes for array in jax.tree.leaves(state)))
state = ji.load_checkpoint(sys.argv[1] + "/1", plan, optimizer).state
step(state, np.ones((4, size), np.float32))
"""


@pytest.mark.slow
def test_a_save_takes_the_bytes_of_the_rows_and_at_most_a_third_more(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # 400 MB of rows; up to 64 MiB of boxes wait for the rest of their chunks.
    assert 0.9 < float(done.stdout) < 1.33, done.stdout
