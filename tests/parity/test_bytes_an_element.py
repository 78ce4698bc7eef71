"""Bytes of weights, gradients and moments an element that a rank owns, the same in both halves: no second copy."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from flax import nnx
from torch import nn

import jax_impl
import torch_impl
from tests.support.ranks import RankGroup
from torch_impl.dtensor.local import local_of

WIDTH, LAYERS = 256, 3
# dtypes of gradients and moments; float8 moments have a float32 scale for each of their rows of 256.
CASES = [
    ("float32", "float32", 16.0),
    ("bfloat16", "float32", 14.0),
    ("bfloat16", "bfloat16", 10.0),
    ("bfloat16", "float8_e4m3fn", 8 + 2 * 4 / WIDTH),
]


def held_in_torch(grads: str, moments: str) -> tuple[float, float]:
    """By what the report says, and by the storages of weights, gradients and state."""
    policy = torch_impl.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, grad_dtype=getattr(torch, grads)
    )
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        torch_impl.fully_shard(layer, mp_policy=policy)
    torch_impl.fully_shard(model, mp_policy=policy)
    dtype = getattr(torch, moments)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
    params = list(model.parameters())
    state = [value for param_state in optimizer.state.values() for value in param_state.values()]
    tensors = [*params, *(param.grad for param in params), *(x for x in state if x.numel() > 1)]
    storages = {x.data_ptr(): x.nbytes() for x in (local_of(tensor).untyped_storage() for tensor in tensors)}
    own = sum(local_of(param).numel() for param in params)
    return model.memory_report(optimizer).total / own, sum(storages.values()) / own


@pytest.mark.parametrize(("grads", "moments", "expected"), CASES)
def test_torch(ranks: RankGroup, grads: str, moments: str, expected: float) -> None:
    # A matrix, half of which each rank owns, has a flag that says whether a rank used it.
    flag = getattr(torch, grads).itemsize / (WIDTH * WIDTH / 2)
    assert ranks.run(2, held_in_torch, grads, moments) == [(expected + flag, expected + flag)] * 2


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model: Model, rows: jax.Array) -> jax.Array:
    return jnp.square(model(rows)).mean()


@pytest.mark.fast_cases("bfloat16-float8_e4m3fn-8.03125")
@pytest.mark.parametrize(("grads", "moments", "expected"), CASES)
def test_jax(grads: str, moments: str, expected: float) -> None:
    mesh = jax_impl.data_parallel_mesh(2)
    plan, weights = jax_impl.fully_shard(
        Model(), mesh, param_dtype="bfloat16", reduce_dtype="float32", grad_dtype=grads
    )
    optimizer = jax_impl.main_weight_adamw(1e-3, mu_dtype=moments, nu_dtype=moments)
    state = jax_impl.init_state(plan, weights, optimizer)
    rows = np.random.default_rng(0).standard_normal((16, WIDTH)).astype(np.float32)
    state, _ = jax_impl.make_train_step(plan, loss, optimizer)(state, rows)
    program = jax.jit(jax_impl.make_gradients(plan, loss))
    _, gradients, _ = program(state.weights, jax_impl.shard_batch(plan, rows))
    own = LAYERS * WIDTH * WIDTH / 2
    for device, report in zip(mesh.devices.flat, jax_impl.memory_report(plan, state).devices, strict=True):
        arrays: list[Any] = jax.tree.leaves((state.weights, state.opt_state, gradients))
        shards = itertools.chain.from_iterable(array.addressable_shards for array in arrays)
        held = sum(shard.data.nbytes for shard in shards if shard.device == device and shard.data.size > 1)
        assert held / own == expected
        assert report.total == held - own * jnp.dtype(grads).itemsize + 4  # and the number of steps
