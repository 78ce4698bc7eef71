"""Programs that import FSDP2 themselves get ours while it is installed, and nothing else of torch changes."""

from __future__ import annotations

import sys
import textwrap
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

import torch_impl
from tests.support.ranks import RankGroup
from tests.support.torch_impl.toy import Toy, batch, mse

PROGRAM = textwrap.dedent(
    """
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
    from torch.distributed.fsdp import UnshardHandle, fully_shard, register_fsdp_forward_method

    def train(model, tokens, targets, offload):
        policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), offload_policy=policy)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(), offload_policy=policy)
        assert all(isinstance(one, FSDPModule) for one in [model, *model.blocks])
        register_fsdp_forward_method(model, "predict")
        assert isinstance(model.unshard(async_op=True), UnshardHandle)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        losses = []
        for step in range(4):
            loss = (model.predict(tokens[step]) - targets[step]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    """
)
NAMES = ("fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method", "share_comm_ctx")


class Predicting(Toy):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            # FSDP2 shards no scalars.
            block.gain = nn.Parameter(block.gain.detach().reshape(1))

    def predict(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.forward(tokens)


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    yield
    torch_impl.uninstall()


def program() -> dict[str, Any]:
    """The program's names after it was imported."""
    names: dict[str, Any] = {"__name__": "program"}
    exec(PROGRAM, names)
    return names


def names_of_torch() -> dict[str, int]:
    """What every name of every module of torch stands for now."""
    return {
        f"{path}.{name}": id(value)
        for path, module in list(sys.modules.items())
        if path.split(".")[0] == "torch" and isinstance(module, ModuleType)
        for name, value in vars(module).items()
        if not name.startswith("__")
    }


def install_quietly() -> torch_impl.Installation:
    """This test's own modules hold torch's names, of which ``install`` warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch_impl.install()


def both_programs(offload: bool) -> tuple[list[float], list[float], list[bool]]:
    tokens, targets = batch(0, dist.get_world_size(), 4)
    mine = tokens[dist.get_rank()], targets[dist.get_rank()]
    theirs = program()["train"](Predicting(), *mine, offload)
    model = Predicting()
    with install_quietly():
        ours = program()["train"](model, *mine, offload)
    tests = [isinstance(model, torch_impl.FSDPModule), isinstance(model, fsdp.FSDPModule)]
    # A model that was sharded meanwhile trains on.
    mse(model, *mine).backward()
    return theirs, ours, tests


@pytest.mark.parametrize("offload", [False, True])
def test_a_program_that_imports_fsdp2_after_install_trains_with_ours(ranks: RankGroup, offload: bool) -> None:
    per_rank = ranks.run(2, both_programs, offload)
    for theirs, ours, tests in per_rank:
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert tests == [True, False]
    assert per_rank[0][0] != per_rank[1][0], "ranks have different data"


def test_five_names_are_replaced_and_nothing_else_of_torch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        # Loads what it needs of torch, and what uninstall leaves.
        torch_impl.install()
    torch_impl.uninstall()
    before = names_of_torch()
    with install_quietly() as installation:
        during = names_of_torch()
        changed = {path for path in before.keys() | during.keys() if before.get(path) != during.get(path)}
        assert changed == set(installation.replaced)
        assert {f"torch.distributed.fsdp.{name}" for name in NAMES} <= changed
        assert {path.split(".")[-1] for path in changed} == set(NAMES)
        for path in ("torch.distributed._composable.fsdp", "torch.distributed._composable.fsdp.fully_shard"):
            if path in sys.modules:
                assert sys.modules[path].fully_shard is torch_impl.fully_shard
                assert sys.modules[path].FSDPModule is torch_impl.FSDPModule
        assert all(getattr(fsdp, name) is getattr(torch_impl, name) for name in NAMES)
    assert names_of_torch() == before


def test_pipelines_of_torch_keep_torch_s_names_whenever_they_are_imported() -> None:
    install_quietly()
    from torch.distributed.pipelining import stage

    assert stage.FSDPModule is not torch_impl.FSDPModule
    torch_impl.uninstall()
    assert stage.FSDPModule is fsdp.FSDPModule


def test_an_exception_undoes_it_too() -> None:
    stock = fsdp.fully_shard
    with pytest.raises(KeyError), install_quietly():
        raise KeyError
    assert fsdp.fully_shard is stock


def test_a_second_install_changes_nothing_and_undoes_nothing() -> None:
    stock = fsdp.fully_shard
    with install_quietly():
        with install_quietly() as inner:
            assert inner.replaced == ()
        assert fsdp.fully_shard is torch_impl.fully_shard
    assert fsdp.fully_shard is stock
    torch_impl.uninstall()
    assert fsdp.fully_shard is stock


def test_a_name_that_someone_else_replaced_meanwhile_is_left_alone() -> None:
    stock = fsdp.fully_shard
    install_quietly()
    mine = object()
    fsdp.fully_shard = mine
    torch_impl.uninstall()
    assert fsdp.fully_shard is mine
    fsdp.fully_shard = stock


def test_a_module_that_imported_it_before_is_named_and_keeps_torch_s() -> None:
    early = ModuleType("early_program")
    exec("from torch.distributed.fsdp import FSDPModule, fully_shard as shard", vars(early))
    sys.modules["early_program"] = early
    try:
        with pytest.warns(UserWarning, match=r"early_program\.FSDPModule, early_program\.shard") as caught:
            installation = torch_impl.install()
        assert caught[0].filename == __file__
        assert {"early_program.FSDPModule", "early_program.shard"} <= set(installation.bound_before)
        assert early.shard is not torch_impl.fully_shard
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch_impl.install()
    finally:
        del sys.modules["early_program"]


def test_a_plain_module_is_refused_alike_while_installed() -> None:
    with install_quietly(), pytest.raises(ValueError, match="no process group"):
        program()["fully_shard"](nn.Linear(2, 2))
