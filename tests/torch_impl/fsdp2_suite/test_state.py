"""PyTorch's test_fully_shard_state.py, where it reads no private state: classes, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from tests.support.ranks import RankGroup
from tests.support.torch_impl.engines import Case, Engine, agree, name_of
from tests.torch_impl.fsdp2_suite.models import MLP, Stack


def classes(engine: Engine) -> list[Any]:
    """A sharded module is of its own class and of FSDPModule; modules below are what they were."""
    model = Stack(1)
    assert engine.shard(model) is model
    again = engine.shard(Stack(1))
    assert type(again) is type(model)
    package = engine.package.FSDPModule
    kinds = (type(model), package)
    return [
        isinstance(model, Stack),
        isinstance(model, package),
        isinstance(model.head, package),
        issubclass(type(model), kinds),
        type(model.blocks[0]) is MLP,
        type(model).__name__.endswith("Stack"),
    ]


def twice(engine: Engine) -> bool:
    """A module is sharded once."""
    model = engine.shard(MLP())
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        engine.shard(model)
    return True


def without_forward(engine: Engine) -> bool:
    """Containers that are never called have no forward to hook."""
    for container in (nn.ModuleList([MLP()]), nn.ModuleDict({"one": MLP()})):
        with pytest.raises(ValueError, match=type(container).__name__):
            engine.shard(container)
    return True


def copied(engine: Engine) -> bool:
    """A sharded module has no copy; its parts of parameters do."""
    model = engine.shard(MLP())
    with pytest.raises((AssertionError, TypeError)):
        copy.deepcopy(model)
    return True


CASES: list[Any] = [(classes, (), 2), (twice, (), 2), (without_forward, (), 2), (copied, (), 2)]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_state(ranks: RankGroup, case: Case) -> None:
    agree(ranks, case)
