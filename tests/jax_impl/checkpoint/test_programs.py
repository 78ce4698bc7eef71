"""Checkpoints in programs of their own: 64-bit weights, and the memory that a save and a load take."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from flax import nnx

from bridge.core.formats import CheckpointError
from jax_impl import (
    data_parallel_mesh,
    load_checkpoint,
    plan_sharding,
)
from tests.support.jax_impl import checkpoint_runs as runs
from tests.support.jax_impl.tiny import CONFIG, decoder

X64_PROGRAM = """
import sys
from jax_impl import simulate_devices
simulate_devices(3)
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_enable_x64", True)
from jax_impl import data_parallel_mesh, fully_shard, init_state, load_checkpoint, main_weight_adamw, save_checkpoint
from tests.support.jax_impl.checkpoint_runs import assert_same_bits, logical
from tests.support.jax_impl.tiny import decoder

optimizer = main_weight_adamw(1e-2)
plan, weights = fully_shard(decoder(dtype=jnp.float64), data_parallel_mesh(3))
state = init_state(plan, weights, optimizer)
assert state.weights[""].dtype == np.float64
save_checkpoint(sys.argv[1], plan, state, {"seed": 2**40})
two, _ = fully_shard(decoder(dtype=jnp.float64), data_parallel_mesh(2), strategy="optim")
loaded = load_checkpoint(sys.argv[1], two, optimizer)
assert_same_bits(logical(two, loaded.state), logical(plan, state))
assert loaded.train == {"seed": 2**40}
"""


@pytest.mark.slow
def test_float64_weights_stay_float64(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", X64_PROGRAM, str(tmp_path / "c")], check=True, timeout=300)
    with pytest.raises(CheckpointError, match=r"another dtype .*expected float32, got float64"):
        load_checkpoint(
            tmp_path / "c",
            plan_sharding(nnx.eval_shape(lambda: decoder(CONFIG)), data_parallel_mesh(1)),
            runs.OPTIMIZER,
        )


MEMORY_PROGRAM = """
import sys
from jax_impl import simulate_devices
simulate_devices(4)
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax_impl import data_parallel_mesh, init_state, load_checkpoint, main_weight_adamw, plan_sharding, save_checkpoint
from jax_impl import shard_weights, stack_layers
from tests.support.process_memory import AnonymousPeak

path, variant = sys.argv[1:]

class Block(nnx.Module):
    def __init__(self):
        # Of the first, pjit cuts the columns: every slab of its rows is on all devices.
        self.kernel = nnx.Param(jnp.zeros((2001, 3000) if variant == "pjit" else (2001, 3001), jnp.float32))
        self.stack = nnx.Param(jnp.zeros((3, 501, 2001), jnp.float32))

class Big(nnx.Module):
    def __init__(self):
        layers = [Block() for _ in range(4)]
        self.layers = stack_layers(layers) if variant == "stacked" else nnx.List(layers)

options = {"stacked": ["layers"]} if variant == "stacked" else {"engine": "pjit"} if variant == "pjit" else {}
plan = plan_sharding(nnx.eval_shape(Big), data_parallel_mesh(4), **options)
rng = np.random.default_rng(0)
optimizer = main_weight_adamw(1e-3)
weights = {path: rng.random(info.shape, np.float32) for path, info in plan.parameters.items()}
state = jax.block_until_ready(init_state(plan, shard_weights(plan, weights), optimizer))
sums = {path: value.sum() for path, value in weights.items()}
del weights
with AnonymousPeak() as saving:
    save_checkpoint(path, plan, state)
size = sum(shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards)
del state
with AnonymousPeak() as loading:
    state = load_checkpoint(path, plan, optimizer).state
for key, array in state.weights.items():
    for piece in plan.local_pieces(key, array):
        sums[piece.path] -= piece.values.sum()
assert all(abs(rest) < 400 for rest in sums.values()), sums
print(size >> 20, saving.above >> 20, (loading.above - size) >> 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["units", "stacked", "pjit"])
def test_saving_and_loading_take_memory_for_a_unit_not_for_a_copy(tmp_path: Path, variant: str) -> None:
    command = [sys.executable, "-c", MEMORY_PROGRAM, str(tmp_path / "c"), variant]
    result = subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    size, saving, loading = map(int, re.findall(r"-?\d+", result.stdout))
    print(f"state {size} MiB, extra while saving {saving} MiB, while loading {loading} MiB")
    assert size > 400
    assert saving < 200
    assert loading < 150
