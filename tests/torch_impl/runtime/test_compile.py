"""Compiled blocks: however ``torch.compile`` and ``fully_shard`` are combined, the compiler sees the forward only."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    Toy,
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    full_batch_loss,
    local_loss,
)
from tests.support.torch_impl.zoo import Headless


def compiled_and_sharded(how: str, strategy: str, backend: object) -> torch.nn.Module:
    model = Toy()
    for index, block in enumerate(model.blocks):
        if how == "method before":
            block.compile(backend=backend)
            torch_impl.fully_shard(block, strategy=strategy)
        elif how == "method after":
            torch_impl.fully_shard(block, strategy=strategy)
            block.compile(backend=backend)
        elif how == "function before":
            model.blocks[index] = torch.compile(block, backend=backend)
            torch_impl.fully_shard(model.blocks[index], strategy=strategy)
        else:
            torch_impl.fully_shard(block, strategy=strategy)
            model.blocks[index] = torch.compile(block, backend=backend)
    return torch_impl.fully_shard(model, strategy=strategy)


@pytest.mark.fast_cases("function before-optim_grads_params")
@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        ("method before", "optim_grads_params"),
        pytest.param("method after", "optim_grads_params", marks=pytest.mark.slow),
        ("function before", "optim_grads_params"),
        pytest.param("function after", "optim_grads_params", marks=pytest.mark.slow),
        pytest.param("method before", "optim", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_compiled_blocks_train_as_uncompiled_ones(how: str, strategy: str) -> None:
    torch._dynamo.reset()
    # The default backend differs in how it generates code, not in what it is given.
    graphs = CompileCounterWithBackend("aot_eager")
    model, reference = compiled_and_sharded(how, strategy, graphs), Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    compiled = []
    for step in range(3):
        local_loss(model, step).backward()
        full_batch_loss(reference, step).backward()
        names = {name.replace("_orig_mod.", ""): param for name, param in model.named_parameters()}
        assert list(names) == [name for name, _ in reference.named_parameters()]
        for (name, param), want in zip(names.items(), reference.parameters(), strict=True):
            torch.testing.assert_close(
                torch_impl.full_tensor(param.grad), want.grad, msg=lambda text, name=name: f"{name}: {text}"
            )
        compiled.append(graphs.frame_count)
        assert_at_rest(model.blocks)
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
        expected.zero_grad()
    # One graph serves all blocks and all steps: nothing of the runtime is traced or guarded.
    assert compiled == [1, 1, 1]
    torch._dynamo.reset()


@pytest.mark.slow
@on_ranks(2)
def test_a_whole_sharded_model_may_be_compiled() -> None:
    torch._dynamo.reset()
    model, reference = Toy(), Toy()
    for block in model.blocks:
        torch_impl.fully_shard(block)
    torch_impl.fully_shard(model)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        local_loss(compiled, step).backward()
        full_batch_loss(reference, step).backward()
        assert_same_gradients(model, reference)
    assert_same_weights(model, reference)
    torch._dynamo.reset()


def head_loss(head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(hidden @ head.weight.T + head.bias, targets)


def train_by_head_weight(backend: str) -> int:
    """How many graphs are compiled of a loss that reads shown weights; its steps are those without a compiler."""
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend(backend)
    trained = []
    for loss in (head_loss, torch.compile(head_loss, backend=graphs)):
        torch.manual_seed(0)
        model = Headless(torch.nn.Linear(4, 4), torch.nn.Linear(4, 6))
        torch_impl.fully_shard(model.body)
        torch_impl.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss(model.head, model(x), torch.arange(3)).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([torch_impl.full_tensor(param) for param in model.parameters()])
    torch.testing.assert_close(*trained)
    return graphs.frame_count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.each_value
def test_a_compiled_loss_reads_weights_that_a_forward_left(ranks: RankGroup, backend: str) -> None:
    assert ranks.run(2, train_by_head_weight, backend) == [1, 1]
