"""What a backward that raised leaves behind, and when it is gone."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import torch_impl
from tests.support.ranks import on_ranks
from tests.support.torch_impl.pool_programs import WORLD, Stop, Tower, data, loss_of, others, stopping
from tests.support.torch_impl.toy import assert_at_rest, assert_same_gradients, seeded


def sharded() -> Tower:
    model = seeded(Tower)
    for block in model.blocks:
        torch_impl.fully_shard(block)
    torch_impl.fully_shard(model)
    return model


def raise_in_backward(model: Tower) -> None:
    with pytest.raises(Stop):
        loss_of(model, data(1)[dist.get_rank(), 0], stopping).backward()


@pytest.mark.parametrize("to_none", [True, False])
@on_ranks(WORLD)
def test_zero_grad_of_the_model_drops_gradients_kept_before_a_backward_that_raised(to_none: bool) -> None:
    model, reference = sharded(), seeded(Tower)
    model.set_requires_gradient_sync(False)
    loss_of(model, data(0)[dist.get_rank(), 0]).backward()
    raise_in_backward(model)
    model.zero_grad(set_to_none=to_none)
    assert_at_rest(model)
    model.set_requires_gradient_sync(True)
    loss_of(model, data(2)[dist.get_rank(), 0]).backward()
    for part in data(2)[:, 0]:
        (loss_of(reference, part) / WORLD).backward()
    assert_same_gradients(model, reference)


@on_ranks(WORLD)
def test_weights_that_a_raised_backward_used_are_freed_at_once() -> None:
    model = sharded()
    raise_in_backward(model)
    # No forward and no zero_grad is needed for that.
    assert_at_rest(model)
    loss_of(model, data(2)[dist.get_rank(), 0], others).backward()
    assert_at_rest(model)
