"""Sharded tensors are initialized with the values that a single process would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import init

from tests.support.ranks import on_ranks
from tests.support.torch_impl.dtensor_cuts import CUTS, FEW, Cut, distribute, placed
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.tensor import RowDTensor

IN_PLACE: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t.uniform_(-2, 3),
    lambda t: t.normal_(1.0, 0.5),
    lambda t: t.bernoulli_(0.3),
    lambda t: t.exponential_(2.0),
    lambda t: t.cauchy_(),
    lambda t: t.log_normal_(),
    lambda t: t.geometric_(0.4),
    lambda t: t.random_(),
    lambda t: t.random_(9),
    lambda t: t.random_(3, 9),
    lambda t: init.trunc_normal_(t, std=2.0),
    lambda t: init.constant_(t, 4.0),
]
OF_MATRICES = [init.kaiming_uniform_, init.kaiming_normal_, init.xavier_uniform_, init.xavier_normal_]


@FEW
@on_ranks(4)
def test_every_rank_holds_its_rows_of_what_a_single_process_draws(few: bool) -> None:
    for index, fill in enumerate(IN_PLACE + OF_MATRICES):
        for cut, full, tensor in placed(cuts=CUTS if index == 0 else CUTS[2:3], few=few):
            if fill in OF_MATRICES and (full.ndim < 2 or not full.numel()):
                continue
            torch.manual_seed(3)
            want = fill(full.clone())
            after = torch.get_rng_state()
            torch.manual_seed(3)
            version = local_of(tensor)._version
            assert fill(tensor) is tensor
            assert local_of(tensor)._version > version or not full.numel()
            assert torch.equal(torch.get_rng_state(), after), cut
            assert torch.equal(tensor.full_tensor(), want), cut


@on_ranks(4)
def test_values_come_from_the_first_rank_and_otherwise_seeded_ranks_keep_their_generator() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for axes in (0, 1, 2):
        full = torch.zeros(7, 3)
        tensor = distribute(full, Cut((2, 2), axes=axes), mesh)
        torch.manual_seed(5)
        want = [full.clone().normal_(), full.clone().uniform_()]
        last = torch.get_rng_state()
        # Ranks 0 and 2 are seeded alike, 1 and 3 each otherwise.
        torch.manual_seed(5 + dist.get_rank() % 2 * dist.get_rank())
        before = torch.get_rng_state()
        for fill, values in zip((tensor.normal_, tensor.uniform_), want, strict=True):
            fill()
            assert torch.equal(tensor.full_tensor(), values)
            copies = [torch.empty(7, 3) for _ in range(4)]
            dist.all_gather(copies, tensor.full_tensor())
            assert all(torch.equal(copy, values) for copy in copies)
        kept = last if dist.get_rank() % 2 == 0 else before
        assert torch.equal(torch.get_rng_state(), kept)
        torch.manual_seed(6)
        dropped = torch.dropout(tensor, 0.5, True).full_tensor()
        torch.manual_seed(6)
        assert torch.equal(dropped, torch.dropout(values, 0.5, True))


@on_ranks(4)
def test_a_generator_given_by_the_caller_is_used() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.zeros(7, 3)
    tensor = distribute(full, Cut((2, 2), axes=2), mesh)
    default = torch.get_rng_state()
    generator = torch.Generator().manual_seed(8)
    for fill in (lambda t, g: t.normal_(generator=g), lambda t, g: init.trunc_normal_(t, generator=g)):
        reference = torch.Generator()
        reference.set_state(generator.get_state())
        fill(tensor, generator)
        assert torch.equal(tensor.full_tensor(), fill(full.clone(), reference))
        assert torch.equal(generator.get_state(), reference.get_state())
    assert torch.equal(torch.get_rng_state(), default)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7),
        nn.Embedding(6, 5),
        nn.Embedding(6, 5, padding_idx=2),
        nn.LayerNorm(5),
        nn.Conv2d(2, 3, 2),
        nn.MultiheadAttention(4, 2),
        nn.LSTM(3, 4),
    )


@on_ranks(4)
def test_reset_parameters_of_torch_modules_draws_what_it_draws_unsharded() -> None:
    for cut in (Cut((2, 2), axes=1), Cut((2, 2), axes=2), Cut((2, 2), axes=0)):
        mesh = cut.mesh()
        whole, sharded = build(), build()
        for module in sharded.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(distribute(torch.zeros(param.shape), cut, mesh)))
        for model in (whole, sharded):
            torch.manual_seed(21)
            for module in model.modules():
                for reset in ("reset_parameters", "_reset_parameters"):
                    if hasattr(module, reset):
                        getattr(module, reset)()
        for (name, param), reference in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            assert isinstance(param.data, RowDTensor)
            assert torch.equal(param.full_tensor(), reference), (cut, name)


@on_ranks(4)
def test_initializers_that_need_the_whole_tensor_say_what_to_do() -> None:
    tensor = distribute(torch.ones(8, 3), Cut((4,)), init_device_mesh("cpu", (4,)))
    stack = distribute(torch.ones(3, 3, 3), Cut((4,)), init_device_mesh("cpu", (4,)))
    assert torch.equal(init.dirac_(stack).full_tensor(), init.dirac_(torch.empty(3, 3, 3)))
    for fill in (
        lambda: init.orthogonal_(tensor),
        lambda: init.sparse_(tensor, 0.5),
        lambda: init.eye_(tensor),
        lambda: tensor.bernoulli_(tensor),
        lambda: torch.rand_like(tensor),
        lambda: torch.normal(tensor, 1.0),
    ):
        with pytest.raises(
            RuntimeError, match=r"to set all values, copy_\(\) a whole tensor, or set them before"
        ):
            fill()
