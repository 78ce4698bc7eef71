"""Models of ``transformers`` train sharded as they train unsharded on the batches of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torch_impl
from tests.support.ranks import RankGroup
from tests.support.torch_impl.real_models import ADAMW, MODELS, STEPS, full_batch_run, rank_batch
from tests.support.torch_impl.toy import assert_at_rest, mean_over_ranks, whole

# Strategy and the shape of the mesh that it runs on.
PLACEMENTS: list[tuple[str, tuple[int, ...]]] = [
    ("optim_grads_params", (3,)),
    ("optim_grads_params", (2,)),
    ("optim_grads", (3,)),
    ("optim_grads", (2,)),
    ("optim", (3,)),
    ("optim", (2,)),
    ("no_shard", (3,)),
    ("no_shard", (2,)),
    ("hsdp", (2, 2)),
    ("hsdp", (2, 1)),
    ("hfsdp", (2, 2)),
    ("hfsdp", (1, 2)),
    ("hfsdp", (2, 1)),
    ("no_shard", (2, 2)),
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, foreach=True, **ADAMW),
    "MainWeightAdamW": lambda params: torch_impl.MainWeightAdamW(params, **ADAMW),
}


# What the usual run tries of the models in turn.
USUAL = [
    ("optim_grads_params", (3,), "AdamW"),
    ("optim", (2,), "MainWeightAdamW"),
    ("hfsdp", (2, 2), "MainWeightAdamW"),
]


def cases() -> list[Any]:
    """Every model with every placement and optimizer; all but one of each model are slow."""
    combinations = []
    for name, usual in zip(MODELS, itertools.cycle(USUAL), strict=False):
        for strategy, shape in PLACEMENTS:
            for optimizer in OPTIMIZERS:
                marks = () if (strategy, shape, optimizer) == usual else pytest.mark.slow
                label = f"{name}-{strategy}-{'x'.join(map(str, shape))}-{optimizer}"
                combinations.append(pytest.param(name, strategy, shape, optimizer, marks=marks, id=label))
    return combinations


def sharded_run(
    name: str, strategy: str, shape: tuple[int, ...], optimizer_name: str, recompute: dict[str, bool] | None
) -> tuple[list[float], dict[str, Tensor], int]:
    """Mean losses over the ranks of ``STEPS`` steps, the last weights, whole, and how often the first layer ran."""
    model = MODELS[name].seeded()
    if recompute is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=recompute)
    mesh = init_device_mesh("cpu", shape)
    for unit in MODELS[name].units(model):
        assert torch_impl.fully_shard(unit, mesh=mesh, strategy=strategy) is unit
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    calls: list[None] = []
    part, *_ = MODELS[name].units(model)[0].children()
    part.register_forward_pre_hook(lambda *_: calls.append(None))
    losses = []
    for step in range(STEPS):
        loss = model(**rank_batch(name, step, dist.get_rank(), dist.get_world_size())).loss
        loss.backward()
        assert_at_rest(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss).item())
    return losses, {key: whole(param) for key, param in model.named_parameters()}, len(calls)


def assert_as_unsharded(name: str, world: int, losses: list[float], weights: dict[str, Tensor]) -> None:
    expected_losses, expected = full_batch_run(name, world)
    assert expected_losses[0] - expected_losses[-1] > 0.5, "nothing was learned"
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert list(weights) == list(expected)
    for key, weight in weights.items():
        # A key's bias moves by rounding alone, since softmax ignores it: 1.4e-5 was seen, a step is 1e-2.
        atol = 1e-4 if key.endswith("k_proj.bias") else 1e-5
        torch.testing.assert_close(
            weight, expected[key], rtol=1e-4, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.fast_cases("gpt2-optim-2-MainWeightAdamW", "vit-optim-2-MainWeightAdamW")
@pytest.mark.parametrize(("name", "strategy", "shape", "optimizer"), cases())
def test_ten_steps_equal_those_of_the_unsharded_model(
    ranks: RankGroup, name: str, strategy: str, shape: tuple[int, ...], optimizer: str
) -> None:
    world = torch.Size(shape).numel()
    for losses, weights, _ in ranks.run(world, sharded_run, name, strategy, shape, optimizer, None):
        assert_as_unsharded(name, world, losses, weights)


@pytest.mark.fast_cases("optim_grads_params-True")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("strategy", ["optim_grads_params", pytest.param("optim", marks=pytest.mark.slow)])
def test_gradient_checkpointing_of_a_llama_changes_nothing(
    ranks: RankGroup, strategy: str, use_reentrant: bool
) -> None:
    recompute = {"use_reentrant": use_reentrant}
    for losses, weights, calls in ranks.run(2, sharded_run, "llama", strategy, (2,), "AdamW", recompute):
        assert calls == 2 * STEPS
        assert_as_unsharded("llama", 2, losses, weights)
