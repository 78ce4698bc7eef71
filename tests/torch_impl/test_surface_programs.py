"""What FSDP2's less common calls do: handles, forward methods, slices, lists of modules, shared streams."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torch_impl
from tests.support.ranks import on_ranks
from tests.support.torch_impl.toy import (
    Block,
    Toy,
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    batch,
    counted,
    full_batch_loss,
    local_loss,
    mse,
    rank_inputs,
    seeded,
    sharded_toy,
)


@on_ranks(2)
def test_an_asynchronous_unshard_is_waited_for_by_its_handle_or_by_the_forward() -> None:
    model, reference = sharded_toy(), Toy()
    block = model.blocks[0]
    handle = block.unshard(async_op=True)
    assert isinstance(handle, torch_impl.UnshardHandle)
    handle.wait()
    assert torch.equal(block.stack, reference.blocks[0].stack)
    handle.wait()
    block.reshard()
    handle = block.unshard(async_op=True)
    with counted() as counts:
        local_loss(model).backward()
    full_batch_loss(reference).backward()
    assert_same_gradients(model, reference)
    assert handle is not None
    assert counts["all_gather"] == 4
    with counted() as counts:
        handle.wait()
    assert counts["all_gather"] == 0, "the forward has used the weights, and backward has freed them"
    assert_at_rest(model)


def test_an_fsdp_module_cannot_be_constructed() -> None:
    with pytest.raises(TypeError, match=r"call torch_impl\.fully_shard"):
        torch_impl.FSDPModule()


@on_ranks(1)
def test_slices_of_a_sharded_sequential_are_plain() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5)))
    for layer in (model[0], model[2]):
        torch_impl.fully_shard(layer)
    torch_impl.fully_shard(model)
    part = model[:2]
    assert type(part) is nn.Sequential
    assert part[0] is model[0]
    assert torch.equal(part(torch.ones(2, 5)), model[1](model[0](torch.ones(2, 5))))
    assert type(type(model)()) is nn.Sequential
    assert isinstance(model, torch_impl.FSDPModule)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 3)
        self.down = nn.Linear(3, 5)

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Half of a forward."""
        if scale == 0:
            raise ZeroDivisionError
        return torch.tanh(self.up(x)) / scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.encode(x))


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_a_registered_method_is_a_forward(strategy: str) -> None:
    model, reference = seeded(Encoder), seeded(Encoder)
    torch_impl.register_fsdp_forward_method(model, "encode")
    assert "encode" not in vars(model)
    torch_impl.fully_shard(model, strategy=strategy, reshard_after_forward=True)
    with pytest.raises(ValueError, match="expected a method of FSDPEncoder, got 'decode'"):
        torch_impl.register_fsdp_forward_method(model, "decode")
    torch_impl.register_fsdp_forward_method(model, "encode")
    assert model.encode.__doc__ == "Half of a forward."
    inputs, rank = rank_inputs(), dist.get_rank()
    with pytest.raises(ZeroDivisionError):
        model.encode(inputs[rank], scale=0)
    assert_at_rest(model)
    model.encode(inputs[rank], scale=2.0).sum().backward()
    assert_at_rest(model)
    for x in inputs:
        (reference.encode(x, scale=2.0).sum() / len(inputs)).backward()
    assert_same_gradients(model, reference)
    # Within the forward of the module itself it is a nested call.
    model(inputs[rank]).sum().backward()
    for x in inputs:
        (reference(x).sum() / len(inputs)).backward()
    assert_same_gradients(model, reference)
    assert_at_rest(model)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor, chunks: int = 1) -> torch.Tensor:
        x = self.norm(torch.tanh(self.body(x)))
        return torch.cat([self.head(part) for part in x.chunk(chunks)])


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@on_ranks(2)
def test_a_list_of_modules_is_one_unit(strategy: str) -> None:
    model, reference = seeded(Tail), seeded(Tail)
    names = [name for name, _ in model.named_parameters()]
    listed = [model.norm, model.head]
    assert torch_impl.fully_shard(listed, strategy=strategy) is listed
    torch_impl.fully_shard(model, strategy=strategy)
    assert model.norm._unit is model.head._unit
    assert isinstance(model.norm, nn.LayerNorm)
    assert sorted(model.norm._unit.groups[0].names) == ["0.bias", "0.weight", "1.weight"]
    assert [name for name, _ in model.named_parameters()] == names
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.01)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.01)
    inputs, rank = rank_inputs(), dist.get_rank()
    for chunks in (1, 2, 1):
        model(inputs[rank], chunks).square().sum().backward()
        for x in inputs:
            (reference(x).square().sum() / len(inputs)).backward()
        assert_same_gradients(model, reference)
        assert_at_rest(model)
        optimizer.step()
        expected.step()
        model.zero_grad()
        reference.zero_grad()
    assert_same_weights(model, reference)
    report = model.memory_report()
    numel = sum(
        group.weights.main.flat.numel() for unit in {model._unit, model.norm._unit} for group in unit.groups
    )
    assert report.main_weights == 4 * numel


@on_ranks(1)
def test_lists_are_checked_and_inner_modules_belong_to_outer_ones() -> None:
    block = Block()
    with pytest.raises(ValueError, match="expected one or more modules, got an empty sequence"):
        torch_impl.fully_shard([])
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module or a list of them, got str"):
        torch_impl.fully_shard([block, "block"])
    assert type(block) is Block
    # A module inside another one of the list belongs to that.
    torch_impl.fully_shard([block.up, block, block])
    assert isinstance(block, torch_impl.FSDPModule)
    assert type(block.up) is nn.Linear
    block(torch.ones(2, 5)).sum().backward()


@on_ranks(2)
def test_reset_iter_state_drops_gradients_and_what_an_exception_left() -> None:
    model, reference = sharded_toy(strategy="optim"), Toy()
    world, rank = dist.get_world_size(), dist.get_rank()
    tokens, targets = batch(0, world, 2)
    model.set_is_last_backward(False)
    mse(model, tokens[rank, 0], targets[rank, 0]).backward()
    hook = model.blocks[0].register_full_backward_hook(fails)
    with pytest.raises(ZeroDivisionError):
        mse(model, tokens[rank, 1], targets[rank, 1]).backward()
    hook.remove()
    model.reset_iter_state()
    assert_at_rest(model)
    assert all(param.grad is None for param in model.parameters())
    model.set_is_last_backward(True)
    mse(model, tokens[rank], targets[rank]).backward()
    mse(reference, tokens, targets).backward()
    assert_same_gradients(model, reference)


def fails(*_: Any) -> None:
    raise ZeroDivisionError


@on_ranks(2)
def test_models_may_share_their_streams() -> None:
    models = [sharded_toy(), sharded_toy()]
    torch_impl.share_comm_ctx(models)
    torch_impl.share_comm_ctx([])
    with pytest.raises(ValueError, match="share_comm_ctx: expected sharded modules, got Linear"):
        torch_impl.share_comm_ctx([models[0], nn.Linear(1, 1)])
    reference = Toy()
    full_batch_loss(reference).backward()
    for model in models:
        local_loss(model).backward()
        assert_same_gradients(model, reference)


@on_ranks(2)
def test_a_wrapper_that_shows_the_attributes_of_a_sharded_module_is_sharded_too() -> None:
    """As accelerate does with activation checkpointing."""
    model, reference = Toy(), Toy()
    for index, block in enumerate(model.blocks):
        torch_impl.fully_shard(block)
        model.blocks[index] = checkpoint_wrapper(block)
        torch_impl.fully_shard(model.blocks[index])
    torch_impl.fully_shard(model)
    local_loss(model).backward()
    full_batch_loss(reference).backward()
    for block, plain in zip(model.blocks, reference.blocks, strict=True):
        assert isinstance(block, torch_impl.FSDPModule)
        assert_same_gradients(block._checkpoint_wrapped_module, plain)
