"""Optimizers built before sharding."""

from __future__ import annotations

import pytest
import torch

import torch_impl
from tests.ranks import RankGroup
from tests.torch_impl.toy import Toy

KINDS = ("AdamW", "SGD", "Adafactor", "RMSprop", "NAdam")


def stock_optimizers_built_before_sharding() -> None:
    model = Toy()
    optimizers = [getattr(torch.optim, kind)(model.parameters()) for kind in KINDS]
    early = list(model.parameters())
    torch_impl.fully_shard(model)
    late = torch.optim.SGD(early)
    for optimizer in (*optimizers, late):
        for method in (optimizer.step, optimizer.zero_grad):
            with pytest.raises(
                RuntimeError, match=r"shape \(9, 5\) was collected before fully_shard took it into a Toy"
            ):
                method()
    model(torch.tensor([1, 2])).sum().backward()
    sharded = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded.step()
    sharded.zero_grad()


def test_a_stock_optimizer_built_before_sharding_raises_and_does_not_train_nothing(ranks: RankGroup) -> None:
    ranks.run(2, stock_optimizers_built_before_sharding)
