"""Units with shards of whole tiles train, save and load like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_impl
from bridge.core.sharding import ShardingPolicy
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import assert_same_gradients, assert_same_weights, seeded
from tests.torch_impl.runtime.test_buffers import data, one_step, pair


def sharded(align: Any, strategy: str = "optim_grads_params") -> nn.Sequential:
    model = seeded(pair)
    for unit in (model.first, model.second):
        torch_impl.fully_shard(unit, strategy=strategy, align=align)
        (group,) = unit._unit.groups
        assert group.layout.align == align or align == "auto"
        assert not any(size % group.layout.align for size in group.layout.shard_sizes)
    return torch_impl.fully_shard(model, strategy=strategy, align=align)


@pytest.mark.fast_cases("auto-2-no_shard", "128-2-optim_grads_params", "24-3-optim_grads_params")
@pytest.mark.parametrize(
    ("align", "world", "strategy"),
    [
        (128, 2, "optim_grads_params"),
        (128, 3, "optim_grads"),
        (128, 4, "optim"),
        (24, 3, "optim_grads_params"),
        ("auto", 4, "optim_grads_params"),
        ("auto", 2, "no_shard"),
    ],
)
@on_ranks("world")
def test_training_equals_the_full_batch_on_one_process(align: Any, strategy: str) -> None:
    model, reference = sharded(align, strategy), seeded(pair)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        inputs = data(step, 2)
        for k, own in enumerate(inputs[dist.get_rank()]):
            model.set_is_last_backward(k == 1)
            (model(own).square().mean() / 2).backward()
        reference(inputs.flatten(0, 2)).square().mean().backward()
        assert_same_gradients(model, reference, 1e-5, 1e-7)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
        assert_same_weights(model, reference)


def save(align: Any, path: str) -> None:
    model = sharded(align)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    one_step(model, optimizer, 0)
    torch_impl.save_checkpoint(path, model, optimizer, {"step": 1})


def load_and_go_on(align: Any, path: str) -> None:
    model, reference = sharded(align), seeded(pair)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    torch_impl.load_checkpoint(path, model, optimizer)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(3):
        rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        reference(rows).square().mean().backward()
        expected.step()
        expected.zero_grad()
        if step > 0:
            one_step(model, optimizer, step)
        assert_same_weights(model, reference)


@pytest.mark.fast_cases("3-128-2-1")
@pytest.mark.parametrize(
    ("saver", "saved", "loader", "loaded"), [(2, 1, 3, 128), (3, 128, 2, 1), (2, "auto", 4, 128)]
)
def test_a_checkpoint_moves_between_alignments(
    ranks: RankGroup, tmp_path: Any, saver: int, saved: Any, loader: int, loaded: Any
) -> None:
    path = str(tmp_path / "saved")
    ranks.run(saver, save, saved, path)
    ranks.run(loader, load_and_go_on, loaded, path)


@on_ranks(2)
def test_alignments_that_are_none_or_unlike_on_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match='align: expected an int >= 1 or "auto", got 0'):
        torch_impl.fully_shard(nn.Linear(3, 5), align=0)
    with pytest.raises(ValueError, match="align: rank 0 has 'auto', rank 1 has 128"):
        torch_impl.fully_shard(nn.Linear(3, 5), align=128 if dist.get_rank() else "auto")


POLICY = """
[mesh]
align = 16
[[unit]]
match = "first"
align = 128
[[unit]]
match = "second"
[[unit]]
match = ""
"""


def by_policy() -> list[tuple[int, tuple[int, ...]]]:
    model = torch_impl.ShardingPolicy.parse(POLICY).apply(seeded(pair))
    layouts = [unit._unit.groups[0].layout for unit in (model.first, model.second)]
    return [(layout.align, layout.shard_sizes) for layout in layouts]


def test_a_policy_aligns_all_units_or_one(ranks: RankGroup) -> None:
    shapes = {name: tuple(param.shape) for name, param in pair().first.named_parameters()}
    expected = [(align, torch_impl.plan_layout(shapes, 3, align=align).shard_sizes) for align in (128, 16)]
    assert ranks.run(3, by_policy) == [expected] * 3
    policy = ShardingPolicy.parse(POLICY)
    assert [policy.align_of(unit) for unit in policy.units] == [128, 16, 16]
