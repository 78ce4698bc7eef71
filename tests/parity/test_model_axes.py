"""The shipped policy with a tensor-parallel axis in both runtimes: the same losses, checkpoints that fit each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jax_impl
import torch_impl
from bridge.checkpoints.convert.conversion import convert
from bridge.relay.config import DataConfig, RelayConfig
from jax_impl.models import decoder as jax_decoder
from tests.support.parity.policy_job import batch, cut_losses
from tests.support.ranks import RankGroup
from torch_impl.models import decoder as torch_decoder

MODEL = replace(RelayConfig.load("quick").model, d_model=20, d_ff=24)
DATA = DataConfig(seed=20, batch=8, length=12)
ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def policy(tp: int) -> str:
    """The shipped one on four devices."""
    shipped = torch_impl.ShardingPolicy.load("fsdp_tp")
    return replace(shipped, mesh={"dp": 4 // tp, "tp": tp}).to_toml()


def reference(folder: Path, steps: range) -> list[float]:
    """Losses of one process on the whole batch, and its first state as a checkpoint."""
    model = torch_decoder.Decoder(torch_decoder.DecoderConfig(**vars(MODEL)))
    model.init_weights(DATA.seed)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    losses = []
    for step in range(steps.stop):
        if step == steps.start:
            train = {"step": step, "model": MODEL.as_train_state()}
            torch_impl.save_checkpoint(folder / "start", model, optimizer, train)
        rows = torch.from_numpy(batch(DATA, step)).long()
        loss = torch_decoder.next_token_loss(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[steps.start :]


def losses_in_jax(tp: int, source: Path, destination: Path, steps: range) -> list[float]:
    """The twin of ``policy_job.cut_losses``."""

    def loss(model: Any, rows: jax.Array) -> jax.Array:
        return jax_decoder.next_token_loss(model(rows[:, :-1]), rows[:, 1:])

    config = jax_decoder.DecoderConfig(**vars(MODEL))
    built = nnx.eval_shape(lambda: jax_decoder.Decoder(config, rngs=nnx.Rngs(0)))
    read = jax_impl.ShardingPolicy.parse(policy(tp))
    mesh = jax_impl.data_parallel_mesh(read.mesh_sizes(4))
    plan = jax_impl.plan_sharding(built, mesh, read)
    options = dict(ADAMW)
    optimizer = jax_impl.main_weight_adamw(options.pop("lr"), *options.pop("betas"), **options)
    loaded = jax_impl.load_checkpoint(source, plan, optimizer)
    state = loaded.state
    step_fn = jax_impl.make_train_step(plan, loss, optimizer)
    losses = []
    for step in steps:
        state, measured = step_fn(state, jnp.asarray(batch(DATA, step)))
        losses.append(float(measured["loss"]))
    train = {**loaded.train, "step": steps.stop}
    jax_impl.save_checkpoint(destination, plan, state, train, objects=loaded.objects)
    return losses


# How many devices of the axis each of the three legs has, PyTorch, JAX, PyTorch.
@pytest.mark.slow
@pytest.mark.parametrize("axis", [(2, 2, 1), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_one_policy_from_framework_to_framework_has_the_losses_of_one_process(
    ranks: RankGroup, tmp_path: Path, axis: tuple[int, int, int]
) -> None:
    legs = [range(2, 5), range(5, 8), range(8, 11)]
    want = reference(tmp_path, range(2, 11))
    common = (MODEL, DATA, ADAMW)
    (losses, *others) = ranks.run(
        4, cut_losses, policy(axis[0]), tmp_path / "start", tmp_path / "one", *common, legs[0]
    )
    assert all(other == losses for other in others)
    convert(tmp_path / "one", tmp_path / "jax", mapping="decoder")
    losses += losses_in_jax(axis[1], tmp_path / "jax", tmp_path / "two", legs[1])
    convert(tmp_path / "two", tmp_path / "torch", mapping="decoder")
    losses += ranks.run(
        4, cut_losses, policy(axis[2]), tmp_path / "torch", tmp_path / "three", *common, legs[2]
    )[0]
    np.testing.assert_allclose(losses, want, rtol=1e-5)
