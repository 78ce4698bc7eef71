"""Models built on the meta device: sharded without memory, materialized by ``to_empty``, initialized in place."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import distribute_tensor

import torch_impl
from tests.support.ranks import on_ranks
from tests.support.torch_impl.toy import (
    Toy,
    assert_at_rest,
    assert_same_weights,
    batch,
    local_loss,
    mse,
    whole,
)
from tests.support.torch_impl.zoo import Adapted
from torch_impl.checkpoint.full_state_dict import materializing

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
PLACED = [
    *((2, (2,), strategy) for strategy in STRATEGIES),
    (3, (3,), "optim_grads_params"),
    (4, (2, 2), "hsdp"),
    (4, (2, 2), "hfsdp"),
]


class Net(nn.Module):
    """Linear, embedding and norm layers, bare parameters, a tie, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.gain = nn.Parameter(torch.empty(2, 3, 6))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def init_weights(self) -> None:
        self.embed.reset_parameters()
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight, std=0.3)
            nn.init.zeros_(layer.bias)
        self.norm.reset_parameters()
        nn.init.normal_(self.gain, mean=1.0, std=0.1)
        self.frozen.reset_parameters()
        self.scale.fill_(0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale
        x = self.norm(x) * self.gain.mean((0, 1))
        return self.head(x).sum(-1) + self.frozen(x).sum(-1)


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def sharded(model: Net, **options: object) -> Net:
    for layer in model.layers:
        torch_impl.fully_shard(layer, **options)
    return torch_impl.fully_shard(model, **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, full_batch: bool) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        tokens, targets = batch(step, world, 1)
        part = slice(None) if full_batch else rank
        mse(model, tokens[part], targets[part]).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("world", "shape", "strategy"), PLACED)
@on_ranks("world")
def test_all_ranks_get_the_weights_of_a_single_process_bit_for_bit(
    shape: tuple[int, ...], strategy: str
) -> None:
    reference = Net()
    torch.manual_seed(7)
    reference.init_weights()
    expected_next = torch.rand(3)

    model = on_meta()
    model.gain.note = "kept"
    sharded(model, mesh=init_device_mesh("cpu", shape), strategy=strategy)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    # Ranks of data-parallel replicas may be seeded differently; the first rank's seed decides.
    torch.manual_seed(7 + dist.get_rank())
    before = torch.get_rng_state()
    model.init_weights()
    assert_at_rest(model)
    for (name, param), (wanted_name, want) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert name == wanted_name
        assert torch.equal(whole(param), want), name
        assert param.requires_grad == want.requires_grad
    if dist.get_rank():
        assert torch.equal(torch.get_rng_state(), before)
    else:
        assert torch.equal(torch.rand(3), expected_next)
    assert model.head.weight is model.embed.weight
    assert model.gain.note == "kept"

    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.05, weight_decay=0.01)
    steps(model, optimizer, full_batch=False)
    steps(reference, torch.optim.AdamW(reference.parameters(), lr=0.05, weight_decay=0.01), full_batch=True)
    assert_same_weights(model, reference)
    assert_at_rest(model)


@on_ranks(2)
def test_a_state_dict_may_be_loaded_instead() -> None:
    reference = Net()
    reference.init_weights()
    for value in (*reference.parameters(), *reference.buffers()):
        dist.broadcast(value.detach(), 0)
    model = sharded(on_meta())
    model.to_empty(device="cpu")
    model.load_state_dict(reference.state_dict())
    assert_same_weights(model, reference, rtol=0, atol=0)
    tokens, _ = batch(0, 1, 1)
    torch.testing.assert_close(model(tokens.view(-1)), reference(tokens.view(-1)))


@on_ranks(1)
def test_a_load_of_optimizer_state_alone_materializes_nothing() -> None:
    model = sharded(on_meta())
    info = SimpleNamespace(handle_model=False, full_state_dict=True, broadcast_from_rank0=True, strict=True)
    assert materializing(lambda *_: "loaded")(model, {}, info) == "loaded"
    assert all(param.is_meta for param in model.parameters())


@on_ranks(2)
def test_wrong_use_of_the_meta_device_is_named() -> None:
    model = sharded(on_meta())
    tokens, _ = batch(0, 1, 1)
    for attempt in (lambda: model(tokens.view(-1)), lambda: model.layers[1].unshard()):
        with pytest.raises(RuntimeError, match=r"is on the meta device: call model.to_empty\(device=...\)"):
            attempt()
    with pytest.raises(
        TypeError, match=r"a sharded parameter stays torch\.float32 .*conversion to torch\.bfloat16"
    ):
        model.bfloat16()
    assert all(param.is_meta for param in model.parameters())
    half = Toy()
    half.blocks[0].to("meta")
    with pytest.raises(ValueError, match=r"blocks\.0\.stack: expected .* all on the meta device or none"):
        torch_impl.fully_shard(half)
    assert type(half) is Toy
    # Values that are there stay there.
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    values = [whole(param) for param in model.parameters()]
    model.to_empty(device="cpu")
    for param, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(whole(param), value)


@on_ranks(2)
def test_sharded_modules_below_a_plain_one_are_materialized() -> None:
    with torch.device("meta"):
        outer = nn.Sequential(nn.Linear(9, 6, bias=False), nn.Linear(6, 6), nn.Linear(6, 2))
    ignored = outer[2].bias
    torch_impl.fully_shard(outer[1])
    torch_impl.fully_shard(outer[2], ignored_params=[ignored])
    outer.to_empty(device="cpu")
    assert {param.device.type for param in outer.parameters()} == {"cpu"}
    assert type(outer[2].bias) is nn.Parameter
    for layer in outer:
        nn.init.ones_(layer.weight)
    for layer in outer[1:]:
        nn.init.zeros_(layer.bias)
    assert torch.equal(outer(torch.ones(1, 9)), torch.full((1, 2), 9.0 * 6 * 6))


@on_ranks(1)
def test_a_materialized_model_is_freed_with_its_last_reference() -> None:
    gc.collect()
    model = sharded(on_meta())
    model.to_empty(device="cpu")
    storages = [group.weights.main.flat.untyped_storage() for group in model._unit.groups]
    pointers = [torch.UntypedStorage._weak_ref(storage) for storage in storages]
    del storages
    gc.disable()
    try:
        del model
        assert all(torch.UntypedStorage._expired(pointer) for pointer in pointers)
    finally:
        gc.enable()


def adapted() -> Adapted:
    """A frozen base and adapters beside it: two groups of one unit, of plain modules."""
    return Adapted(nn.Linear(5, 7), 5, 7)


def initialized(model: Adapted, *names: str) -> None:
    """Each module draws as it would in one process, whatever else has memory by then."""
    for name in names:
        module = model.get_submodule(name)
        if module.weight.is_meta:
            module.to_empty(device="cpu")
        torch.manual_seed(len(name))
        module.reset_parameters()


def part(model: nn.Module, like: nn.Module, *names: str) -> dict[str, torch.Tensor]:
    values = {key: value for key, value in like.state_dict().items() if key.startswith(names)}
    shown = model.state_dict()
    return {
        key: distribute_tensor(value, shown[key].device_mesh, shown[key].placements)
        for key, value in values.items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "optim_grads_params"},
        {"strategy": "optim"},
        {"strategy": "no_shard"},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["optim_grads_params", "optim", "no_shard", "offloaded"],
)
@pytest.mark.parametrize(
    "way", ["modules", "adapters, then a load", "a load, then another", "adapters, then all", "whole"]
)
@on_ranks(2)
def test_modules_inside_a_unit_may_get_memory_one_after_the_other(
    way: str, options: dict[str, object]
) -> None:
    reference = adapted()
    initialized(reference, "base", "down", "up")
    with torch.device("meta"):
        model = adapted()
    torch_impl.fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = torch.ones(1, 5)
    if way == "modules":
        initialized(model, "base", "down")
        with pytest.raises(RuntimeError, match=r"'down\.weight' is on the meta device"):
            model(x)
        initialized(model, "up")
        model.unshard()
        assert torch.equal(model.down.weight, reference.down.weight)
        model.reshard()
    elif way == "adapters, then a load":
        initialized(model, "down", "up")
        model.load_state_dict(part(model, reference, "base"), strict=False, assign=True)
    elif way == "a load, then another":
        model.load_state_dict(part(model, reference, "down", "up"), strict=False, assign=True)
        with pytest.raises(RuntimeError, match=r"'base\.weight' is on the meta device"):
            model(x)
        model.load_state_dict(part(model, reference, "base"), strict=False, assign=True)
    elif way == "adapters, then all":
        initialized(model, "down")
        model.to_empty(device="cpu")
        initialized(model, "base", "up")
    else:
        initialized(model, "base", "down", "up")
        whole_state = {key: value for key, value in reference.state_dict().items() if "down" not in key}
        set_model_state_dict(model, whole_state, options=StateDictOptions(full_state_dict=True, strict=False))
    for (name, param), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(whole(param), want), name
    expected = torch.optim.AdamW(reference.parameters(), lr=0.05)
    inputs = torch.randn(dist.get_world_size(), 3, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model(inputs[dist.get_rank()]).square().mean().backward()
        reference(inputs).square().mean().backward()
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()
    assert_same_weights(model, reference)
    assert_at_rest(model)


@on_ranks(2)
def test_what_is_set_before_to_empty_stays_set() -> None:
    """Every setter that has a value, on a model without memory; torchtitan calls some of them then."""
    scaled, plain = sharded(on_meta()), sharded(on_meta())
    for module in (scaled, *scaled.layers):
        module.set_gradient_divide_factor(1.0)
    scaled.set_requires_gradient_sync(False)
    scaled.set_reshard_after_forward(False)
    scaled.set_reshard_after_backward(False)
    scaled.set_main_gradients(True)
    scaled.set_buffer_pool(False)
    for model in (scaled, plain):
        model.to_empty(device="cpu")
        torch.manual_seed(7)
        model.init_weights()
    for model in (scaled, plain):
        local_loss(model).backward()
    assert scaled._unit.groups[0].weights.compute.allocated
    with pytest.raises(RuntimeError, match="Partial"):
        whole(scaled.norm.weight.grad)
    scaled.zero_grad()
    scaled.set_requires_gradient_sync(True)
    local_loss(scaled).backward()
    for ours, mean in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (mean.grad is None)
        if mean.grad is not None:
            torch.testing.assert_close(whole(ours.grad), whole(mean.grad) * dist.get_world_size())


@on_ranks(2)
def test_an_optimizer_built_before_to_empty_trains_the_model() -> None:
    reference = Net()
    torch.manual_seed(7)
    reference.init_weights()
    model = sharded(on_meta())
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.05)
    model.to_empty(device="cpu")
    torch.manual_seed(7)
    model.init_weights()
    steps(model, optimizer, full_batch=False)
    steps(reference, torch.optim.AdamW(reference.parameters(), lr=0.05, weight_decay=0.01), full_batch=True)
    assert_same_weights(model, reference)
