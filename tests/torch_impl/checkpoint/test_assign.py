"""``distribute_tensor``, ``DTensor.from_local`` and ``load_state_dict(assign=True)`` with sharded parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_impl
from tests.support.ranks import on_ranks
from tests.support.torch_impl.dtensor_cuts import FEW, placed
from tests.support.torch_impl.toy import (
    Toy,
    assert_same_weights,
    batch,
    mse,
    sharded_toy,
    whole,
)
from torch_impl.dtensor.construction import rebind
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.placement import RowShard
from torch_impl.dtensor.tensor import RowDTensor


class Net(nn.Module):
    """Rows of 5, 7 and 3 elements, a stack and a tie, but no scalar, which FSDP2 refuses."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(9, 5)
            self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
            self.stack = nn.Parameter(torch.randn(2, 3, 5))
            self.head = nn.Linear(5, 9, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("scale", torch.full((5,), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.up(x))) * self.scale * self.stack.mean((0, 1))
        return self.head(x).sum(-1)


def sharded(fully_shard: Callable[..., Any], device: str, **options: Any) -> Net:
    with torch.device(device):
        model = Net(seed=4)
    # Buffers have no sharded form, and whole tensors do not load by assignment.
    model.scale = torch.full((5,), 0.5)
    for layer in (model.up, model.down):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def assigned_by(model: nn.Module, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As the FSDP2 tutorial does it; only the first rank has the values, as with accelerate."""
    state = {}
    for name, param in model.state_dict().items():
        value = values[name].clone() if dist.get_rank() == 0 else torch.full_like(values[name], torch.nan)
        if isinstance(param, DTensor):
            value = nn.Parameter(distribute_tensor(value, param.device_mesh, param.placements))
        else:
            value = values[name].clone()
        state[name] = value
    return state


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, full_batch: bool) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        tokens, targets = batch(step, world, 1)
        part = slice(None) if full_batch else rank
        optimizer.zero_grad()
        mse(model, tokens[part], targets[part]).backward()
        optimizer.step()


@pytest.mark.each_value
@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("theirs", "world", "shape", "strategy"),
    [
        (True, 3, (3,), None),
        (False, 3, (3,), None),
        (False, 4, (2, 2), "hsdp"),
        (False, 4, (2, 2), "hfsdp"),
        (False, 3, (3,), "no_shard"),
        (False, 2, (2,), "optim"),
    ],
)
@on_ranks("world")
def test_training_after_an_assigning_load_is_that_of_one_process(
    theirs: bool, shape: tuple[int, ...], strategy: str | None, device: str
) -> None:
    mesh = init_device_mesh("cpu", shape)
    options = {"mesh": mesh} if strategy is None else {"mesh": mesh, "strategy": strategy}
    model = sharded(fsdp.fully_shard if theirs else torch_impl.fully_shard, device, **options)
    before = list(model.parameters())
    reference = Net()
    state = assigned_by(model, reference.state_dict())
    missing, unexpected = model.load_state_dict(state, assign=True)
    assert (missing, unexpected) == ([], [])
    if theirs:
        # Torch's load breaks ties; programs tie again.
        model.head.weight = model.embed.weight
    else:
        # An optimizer may hold them already, and what was given belongs to the program.
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        for value in state.values():
            if isinstance(value, DTensor):
                value.detach().zero_()
    assert model.head.weight is model.embed.weight
    for (name, param), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        if not theirs:
            assert torch.equal(whole(param), want), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.05)
    steps(model, optimizer, full_batch=False)
    steps(reference, expected, full_batch=True)
    for (name, param), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        got, grad = param.full_tensor(), param.grad.full_tensor()
        torch.testing.assert_close(
            grad, want.grad, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
        torch.testing.assert_close(
            got, want.detach(), rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


@on_ranks(3)
def test_an_optimizer_built_before_the_load_trains_what_was_loaded() -> None:
    """The optimizer of a model on the meta device, an own state dict assigned to itself, and values in other dtypes."""
    model, reference = sharded(torch_impl.fully_shard, "meta"), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    values = {name: value.double() for name, value in reference.state_dict().items()}
    values["scale"] = reference.scale
    model.load_state_dict(assigned_by(model, values), assign=True)
    model.load_state_dict(model.state_dict(), assign=True)
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    steps(model, optimizer, full_batch=False)
    steps(reference, torch.optim.AdamW(reference.parameters(), lr=0.05), full_batch=True)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@on_ranks(3)
def test_what_does_not_fit_is_refused_at_the_load_and_changes_nothing(device: str) -> None:
    with torch.device(device):
        model = sharded_toy()
    values = Toy(seed=5).state_dict()
    good = {
        name: distribute_tensor(values[name], param.device_mesh, param.placements)
        for name, param in model.state_dict().items()
    }
    name = "blocks.1.stack"
    param, value = model.get_parameter(name), values[name]
    mesh, other = param.device_mesh, init_device_mesh("cpu", (1, 3))
    here = {} if device == "meta" else {key: whole(tensor) for key, tensor in model.state_dict().items()}
    elsewhere = RowShard((0, 0, 1, 6), 1, (2, 3, 7))
    for wrong, message in (
        (
            value,
            r"a plain Tensor of shape \(2, 3, 7\); make it a DTensor with .*distribute_tensor\(whole, param",
        ),
        ("text", "a plain str;"),
        (
            DTensor.from_local(value, mesh, [Replicate()]),
            r"a DTensor placed as \(Replicate\(\),\), not as \(RowShard",
        ),
        (
            distribute_tensor(value, mesh, [Shard(0)]),
            r"a DTensor placed as \(Shard\(dim=0\),\), not as \(RowShard",
        ),
        (
            distribute_tensor(value, mesh, [elsewhere]),
            r"a DTensor placed as \(RowShard\(\(0, 0, 1, 6\)\),\), not as",
        ),
        (distribute_tensor(value, other, [Replicate(), param.placements[0]]), "a DTensor on .*, not on"),
        (
            distribute_tensor(value[0], mesh, [RowShard((0, 1, 1, 3))]),
            r"a DTensor of shape \(3, 7\)",
        ),
        *(
            []
            if device == "meta"
            else [(good[name].to("meta"), "a DTensor on the meta device, which has no")]
        ),
    ):
        expected = rf"load_state_dict\(assign=True\): {name}: expected a DTensor of shape \(2, 3, 7\) .* got {message}"
        with pytest.raises(RuntimeError, match=expected):
            model.load_state_dict({**good, name: wrong}, assign=True)
        if device == "meta":
            assert all(tensor.is_meta for tensor in model.parameters())
        else:
            assert all(torch.equal(whole(tensor), here[key]) for key, tensor in model.state_dict().items())
    if device == "meta":
        del good[name]
        with pytest.raises(
            RuntimeError, match=r"parameter 'stack' is on the meta device: .* call model\.to_empty"
        ):
            model.load_state_dict(good, strict=False, assign=True)
        assert all(tensor.is_meta for tensor in model.parameters())
        # A unit of which nothing is given stays there, and says so when it is used.
        kept = {key: tensor for key, tensor in good.items() if not key.startswith("blocks.1")}
        model.load_state_dict(kept, strict=False, assign=True)
        assert [key for key, tensor in model.state_dict().items() if tensor.is_meta] == [
            key for key in values if key.startswith("blocks.1")
        ]
        with pytest.raises(RuntimeError, match="is on the meta device"):
            model(torch.arange(4))
    else:
        model(torch.arange(4)).sum().backward()


@on_ranks(2)
def test_a_unit_below_a_plain_module_is_loaded_with_it() -> None:
    outer = nn.Sequential(nn.Linear(5, 5), Toy(blocks=1).blocks[0])
    torch_impl.fully_shard(outer[1])
    inner = Toy(blocks=1, seed=8).blocks[0].state_dict()
    state = {f"1.{name}": value for name, value in assigned_by(outer[1], inner).items()}
    state |= {"0.weight": torch.ones(5, 5), "0.bias": torch.zeros(5)}
    outer.load_state_dict(state, assign=True)
    assert torch.equal(outer[0].weight, torch.ones(5, 5))
    assert all(torch.equal(whole(param), inner[name]) for name, param in outer[1].named_parameters())
    with pytest.raises(RuntimeError, match=r"assign=True\): 1\.up\.weight: expected"):
        outer.load_state_dict({**state, "1.up.weight": torch.ones(7, 5)}, assign=True)
    outer(torch.ones(2, 5)).sum().backward()


@FEW
@on_ranks(4)
def test_distribute_tensor_takes_the_rows_of_the_first_ranks_tensor(few: bool) -> None:
    torch_impl.fully_shard(nn.Linear(1, 1))
    for cut, full, tensor in placed(few=few):
        mesh, placements = tensor.device_mesh, tensor.placements
        if not cut.axes and not any(type(placement).__name__ == "FusedShard" for placement in placements):
            continue
        mine = full if dist.get_rank() == 0 else torch.full_like(full, torch.nan)
        for made in (
            distribute_tensor(mine, mesh, placements),
            distribute_tensor(full, mesh, list(placements), src_data_rank=None),
            distribute_tensor(nn.Parameter(mine), mesh, placements),
        ):
            assert type(made) is RowDTensor
            assert made.is_leaf
            assert (made.placements, made.shape) == (tensor.placements, full.shape)
            assert torch.equal(local_of(made), local_of(tensor)), cut
            assert torch.equal(made.full_tensor(), full), cut
            if full.numel():
                assert local_of(made).untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
        assert made.requires_grad
        assert distribute_tensor(tensor, mesh, placements) is tensor
        assert distribute_tensor(full.to("meta"), mesh, placements).is_meta
        with pytest.raises(RuntimeError, match="expected a leaf tensor"):
            distribute_tensor(nn.Parameter(full) * 2, mesh, placements)
        with pytest.raises(ValueError, match="expected a plain tensor or one placed as"):
            distribute_tensor(DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim), mesh, placements)
    mesh = init_device_mesh("cpu", (4,))
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64):
        values = (torch.arange(12.0).view(4, 3) - 6).to(dtype)
        mine = values if dist.get_rank() == 0 else torch.zeros_like(values)
        made = distribute_tensor(mine, mesh, [RowShard((0, 1, 1, 3, 4))])
        assert torch.equal(made.full_tensor().double(), values.double()), dtype
    stack = distribute_tensor(torch.ones(2, 3, 4), mesh, [RowShard((0, 1, 1, 3, 6))])
    assert DTensor.from_local(stack.to_local(), mesh, stack.placements).shape == (2, 3, 4)
    with pytest.raises(ValueError, match="distribute_tensor: expected a tensor of"):
        distribute_tensor(torch.ones(3, 3), mesh, [RowShard((0, 1, 1, 3, 4))])


@FEW
@on_ranks(4)
def test_from_local_is_the_inverse_of_to_local(few: bool) -> None:
    torch_impl.fully_shard(nn.Linear(1, 1))
    for cut, full, tensor in placed(few=few):
        mesh, placements = tensor.device_mesh, tensor.placements
        param = nn.Parameter(tensor)
        made = DTensor.from_local(param.to_local().detach(), mesh, placements)
        if type(made) is not RowDTensor:
            assert not any(isinstance(placement, RowShard) for placement in placements)
            continue
        assert (made.placements, made.shape) == (tensor.placements, full.shape)
        assert torch.equal(made.full_tensor(), full), cut
        with torch.no_grad():
            made.mul_(2)
        assert torch.equal(tensor.full_tensor(), full * 2), cut
        # Gradients go both ways: from the DTensor to local rows, and from local rows to the parameter.
        local = local_of(tensor).clone().requires_grad_()
        (DTensor.from_local(local, mesh, placements) * tensor.detach()).to_local().sum().backward()
        assert torch.equal(local.grad, local_of(tensor)), cut
        around = DTensor.from_local(param.to_local(), mesh, placements)
        (around.to_local() ** 2).sum().backward()
        assert torch.equal(param.grad.full_tensor(), full * 4), cut
        if full.numel():
            shape, stride = full.shape, full.stride()
            by_shape = DTensor.from_local(local_of(tensor), mesh, placements, shape=shape, stride=stride)
            assert torch.equal(by_shape.full_tensor(), full * 2)
            if any(isinstance(placement, RowShard) for placement in placements):
                with pytest.raises(ValueError, match="expected shape"):
                    DTensor.from_local(torch.ones(31, 3), mesh, placements)
    mesh = init_device_mesh("cpu", (4,))
    rows = RowShard((0, 1, 1, 3, 4))
    assert DTensor.from_local(torch.ones((1, 0, 2, 1)[dist.get_rank()], 3), mesh, [rows]).shape == (4, 3)
    for attempt, message in (
        (
            lambda: DTensor.from_local(torch.ones(()), mesh, [rows]),
            "expected shape= and stride= of the whole",
        ),
        (
            lambda: DTensor.from_local(tensor, tensor.device_mesh, tensor.placements),
            "expected a plain local tensor",
        ),
        (
            lambda: DTensor.from_local(torch.ones(1, 3), mesh, [rows], grad_placements=[Replicate()]),
            "leave grad_placements out",
        ),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            attempt()


def test_names_are_bound_anew_in_modules_and_in_functions_that_have_other_globals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As multiprocessing makes the main module of a process that it spawns: a copy of what it ran."""

    def old() -> None: ...
    def new() -> None: ...

    ran: dict[str, Any] = {"__name__": "spawned", "made": old, "other": old}
    exec("def main(): return made", ran)
    module = ModuleType("spawned")
    vars(module).update(ran)
    monkeypatch.setitem(sys.modules, "another name", module)
    monkeypatch.setitem(sys.modules, "spawned", module)
    rebind("made", old, new)
    assert (module.made, module.main()) == (new, new)
    assert (module.other, ran["other"]) == (old, old)


@on_ranks(2)
def test_other_placements_go_to_torch() -> None:
    torch_impl.fully_shard(nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(6.0).view(3, 2)
    for made in (
        distribute_tensor(full, mesh, [Shard(0)]),
        distribute_tensor(full, mesh),
        DTensor.from_local(full, mesh, [Replicate()]),
        DTensor.from_local(full[: 2 - dist.get_rank()], mesh, [Shard(0)], shape=full.shape, stride=(2, 1)),
    ):
        assert type(made) is DTensor
