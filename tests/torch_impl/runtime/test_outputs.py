"""What a unit returns: computed tensors, its weights, its inputs, an inner unit's outputs, tensor subclasses."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import assert_at_rest, assert_same_gradients, rank_inputs, seeded, whole
from torch_impl.dtensor.tensor import RowDTensor

WORLD = 2
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Positions(nn.Module):
    """Returns its parameter itself, a view of it, or views in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(20.0).view(4, 5))

    def forward(self, name: str) -> object:
        outputs: dict[str, object] = {
            "whole": self.table,
            "view": self.table[1:3],
            "detached": self.table.detach(),
            "nested": {"rows": [self.table[:2], self.table.sum()]},
            "opaque": Wrapped(self.table[:2]),
        }
        return outputs[name]


@dataclass
class Wrapped:
    rows: torch.Tensor


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_a_unit_may_return_its_weights(strategy: str, keep: bool) -> None:
    model = torch_impl.fully_shard(Positions(), strategy=strategy, reshard_after_forward=not keep)
    table = torch.arange(20.0).view(4, 5)
    scale = dist.get_rank() + 1.0
    mean = sum(range(1, dist.get_world_size() + 1)) / dist.get_world_size()
    for name, rows in (("whole", slice(0, 4)), ("view", slice(1, 3)), ("nested", slice(0, 2))):
        output = model(name)
        tensor = output["rows"][0] if name == "nested" else output
        assert torch.equal(tensor, table[rows])
        (tensor * scale).sum().backward()
        expected = torch.zeros(4, 5)
        expected[rows] = mean
        assert torch.equal(whole(model.table.grad), expected)
        model.zero_grad()
        assert_at_rest(model)
        assert torch.equal(tensor, table[rows])
    with torch.no_grad():
        for name in ("whole", "detached"):
            tensor = model(name)
            assert torch.equal(tensor, table)
    if strategy == "optim_grads_params":
        with pytest.raises(RuntimeError, match="FSDPPositions: an output shares memory with the sharded"):
            model("opaque")
        model("whole")


class Wraps(nn.Module):
    """Returns subclasses of tensors, of its weights or of others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(20.0).view(4, 5))
        self.inner = torch_impl.fully_shard(nn.Linear(5, 3, bias=False))

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "inner weight":
            return self.inner.weight
        if name == "jagged":
            return torch.nested.nested_tensor_from_jagged(x @ self.table, torch.tensor([0, 1, 4]))
        if name == "sparse":
            return (x @ self.table.detach()).to_sparse()
        local = self.table.detach() if name == "distributed weight" else x.detach()
        return DTensor.from_local(local, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_a_unit_may_return_tensor_subclasses(strategy: str) -> None:
    model = torch_impl.fully_shard(Wraps(), strategy=strategy, reshard_after_forward=True)
    x = rank_inputs()[dist.get_rank()][:, :4]
    table = torch.arange(20.0).view(4, 5)
    assert isinstance(model("inner weight", x), RowDTensor)
    jagged = model("jagged", x)
    torch.testing.assert_close(jagged.values(), x @ table)
    jagged.values().sum().backward()
    assert whole(model.table.grad).count_nonzero() == 20
    torch.testing.assert_close(model("sparse", x).to_dense(), x @ table)
    assert torch.equal(model("distributed", x).to_local(), x)
    assert torch.equal(model("distributed weight", x).to_local(), table)
    assert_at_rest(model)


class Outer(nn.Module):
    """Returns its inner unit's output itself, or something computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, computes: bool, how: str) -> torch.Tensor:
        output = self.inner(torch.tanh(self.before(x)))
        if how == "in place":
            output.mul_(1.5)
        return output * 2 if computes else output


@pytest.mark.parametrize("how", ["as it is", "in place"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3)
def test_a_unit_may_return_an_inner_units_output_on_some_ranks(strategy: str, how: str) -> None:
    model, reference = seeded(Outer), seeded(Outer)
    torch_impl.fully_shard(model.inner, strategy=strategy)
    torch_impl.fully_shard(model, strategy=strategy)
    inputs = rank_inputs()
    for _ in range(2):
        # The odd ranks return the inner unit's output, the others do not.
        calls = [(x, rank % 2 == 0, how) for rank, x in enumerate(inputs)]
        model(*calls[dist.get_rank()]).square().mean().backward()
        for call in calls:
            (reference(*call).square().mean() / len(inputs)).backward()
        assert_same_gradients(model, reference)
        assert_at_rest(model)


class Residual(nn.Module):
    """Returns its input, which it may change, beside what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, how: str) -> object:
        if how == "in place":
            x.add_(1.0)
        output = torch.tanh(self.linear(x))
        return {"tuple": (output, x), "in place": (output, x), "list": [x, output]}[how]


def passed_on_inputs(strategy: str) -> None:
    model, reference = seeded(Residual), seeded(Residual)
    torch_impl.fully_shard(model, strategy=strategy)
    inputs = rank_inputs()

    def backward(module: nn.Module, x: torch.Tensor, how: str, scale: float) -> torch.Tensor:
        x = x.clone().requires_grad_()
        passed = x * 3
        outputs = module(passed, how)
        if how != "in place":
            assert any(output is passed for output in outputs)
        (sum(output.square().mean() for output in outputs) * scale).backward()
        return x.grad

    for how in ("tuple", "list", "in place"):
        grad = backward(model, inputs[dist.get_rank()], how, 1.0)
        expected = [backward(reference, x, how, 1 / len(inputs)) for x in inputs]
        torch.testing.assert_close(grad, expected[dist.get_rank()] * len(inputs))
        assert_same_gradients(model, reference)
        assert_at_rest(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inputs_that_a_unit_passes_on_are_the_callers_own(ranks: RankGroup, strategy: str) -> None:
    ranks.run(WORLD, passed_on_inputs, strategy)


class Held:
    """Lives as long as the graph that it was put into."""


@on_ranks(1)
def test_a_dropped_graph_frees_its_activations_without_the_garbage_collector() -> None:
    unit, nested = torch_impl.fully_shard(seeded(Residual)), seeded(Outer)
    torch_impl.fully_shard(nested.inner)
    torch_impl.fully_shard(nested)
    programs = {
        "input passed on": lambda x: unit(x, "list"),
        "input changed": lambda x: unit(x, "in place"),
        "output passed on": lambda x: nested(x, False, ""),
        "output computed": lambda x: nested(x, True, ""),
    }
    for name, program in programs.items():
        program(torch.ones(2, 5))  # what is made once is made now
        gc.collect()
        gc.disable()
        try:
            for backwards in (False, True):
                activation, held = torch.ones(2, 5, requires_grad=True) * 2, Held()
                activation.register_hook(lambda _, held=held: None)
                graph = weakref.ref(held)
                outputs = program(activation)
                del activation, held
                assert graph() is not None, name
                if backwards:
                    torch.cat(
                        [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
                    ).sum().backward()
                del outputs
                assert graph() is None, name
        finally:
            gc.enable()


class Shift(nn.Module):
    """Saves nothing for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


@on_ranks(1)
def test_inputs_that_backward_does_not_need_are_not_kept() -> None:
    unit = torch_impl.fully_shard(Shift())
    x = torch.ones(2, 5, requires_grad=True) * 2
    held = weakref.ref(x)
    output = unit(x)
    del x
    assert held() is None
    output.sum().backward()


@on_ranks(WORLD)
def test_a_forward_method_may_be_a_function_that_is_no_method_of_the_model() -> None:
    """It gets its arguments alone, and the weights are gathered meanwhile."""
    model = torch_impl.fully_shard(Positions())
    model.rows = lambda first, last: model.table[first:last] * 2
    torch_impl.register_fsdp_forward_method(model, "rows")
    rows = model.rows(1, 3)
    assert torch.equal(rows, 2 * torch.arange(20.0).view(4, 5)[1:3])
    rows.sum().backward()
    assert_at_rest(model)
