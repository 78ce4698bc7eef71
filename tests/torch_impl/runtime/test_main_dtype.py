"""Main weights in another dtype than float32, and frozen weights in the dtype in which they were given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import torch_impl
from bridge.core.formats import CheckpointError, open_checkpoint
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    Toy,
    batch,
    full_batch_loss,
    local_loss,
    mse,
    seeded,
    sharded_toy,
    whole,
)
from tests.support.torch_impl.zoo import named
from torch_impl import (
    MainWeightAdamW,
    MainWeightMuon,
    MainWeightSGD,
    MixedPrecisionPolicy,
    load_checkpoint,
    save_checkpoint,
)
from torch_impl.dtensor.local import local_of

HALF = torch.bfloat16
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
MIXED = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32)
KEPT = MixedPrecisionPolicy(reduce_dtype=torch.float32, main_dtype=None)


def narrow(main: torch.dtype = HALF) -> MixedPrecisionPolicy:
    """Forward, backward and gradients as exact as with float32 main weights: the update alone rounds."""
    return MixedPrecisionPolicy(torch.float32, torch.float32, grad_dtype=torch.float32, main_dtype=main)


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(5)) -> list[float]:
    """Of this rank's data; each step with clipping."""
    losses = []
    for step in steps:
        loss = local_loss(model, step)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Stack(nn.Module):
    """What stock FSDP2 can shard too: no scalars."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embed = nn.Embedding(9, 5)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2)
            )
            self.head = nn.Linear(5, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).squeeze(-1)


@pytest.mark.fast_cases("2")
@pytest.mark.parametrize("world", [2, 3])
@on_ranks("world")
def test_given_dtypes_train_bit_for_bit_as_in_stock_fsdp2() -> None:
    mesh, runs = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for shard, policy in (
        (torch_impl.fully_shard, KEPT),
        (fsdp.fully_shard, fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)),
    ):
        model = Stack().to(HALF)
        for part in (*model.layers, model):
            shard(part, mp_policy=policy, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        losses = losses_of(model, optimizer)
        assert all(param.dtype == HALF for param in model.parameters())
        assert all(state["exp_avg"].dtype == HALF for state in optimizer.state.values())
        runs.append((losses, [param.full_tensor().detach() for param in model.parameters()]))
    (losses, weights), (its_losses, its_weights) = runs
    assert losses == its_losses
    assert all(torch.equal(mine, other) for mine, other in zip(weights, its_weights, strict=True))
    assert not torch.equal(weights[0], Stack().to(HALF).embed.weight)


def floats() -> nn.Sequential:
    """Takes floats; ``frozen`` is a unit that is not trained."""
    return seeded(
        lambda: named(frozen=nn.Linear(5, 7).requires_grad_(False), tanh=nn.Tanh(), head=nn.Linear(7, 1)), 4
    )


@pytest.mark.parametrize("main", [HALF, torch.float16])
@on_ranks(2)
def test_inputs_are_cast_to_main_weights_of_two_bytes(main: torch.dtype) -> None:
    rows = torch.randn(dist.get_world_size(), 5, generator=torch.Generator().manual_seed(6))
    model = floats()
    for part in (model.frozen, model):
        torch_impl.fully_shard(part, mp_policy=MixedPrecisionPolicy(main_dtype=main))
    output = model(rows[dist.get_rank()])
    assert output.dtype == main
    assert torch.equal(output, floats().to(main)(rows.to(main))[dist.get_rank()])
    left = torch_impl.fully_shard(
        floats(), mp_policy=MixedPrecisionPolicy(main_dtype=main, cast_forward_inputs=False)
    )
    with pytest.raises(RuntimeError, match="same dtype"):
        left(rows)


@pytest.mark.parametrize(
    ("given", "main", "names"),
    [
        (torch.float32, HALF, ("bfloat16",) * 4),
        (torch.float32, torch.float16, ("float16",) * 4),
        (HALF, None, ("bfloat16",) * 4),
        (HALF, torch.float32, ("float32", "bfloat16", "bfloat16", "float32")),
        (torch.float64, None, ("float64",) * 4),
        (torch.float64, torch.float32, ("float64",) * 4),
    ],
)
@on_ranks(2)
def test_main_weights_have_the_chosen_dtype_and_take_its_bytes(
    given: torch.dtype, main: torch.dtype | None, names: tuple[str, ...]
) -> None:
    for strategy in STRATEGIES:
        model = sharded_toy(strategy=strategy, dtype=given, mp_policy=MixedPrecisionPolicy(main_dtype=main))
        groups = [group for unit in torch_impl.layout_report(model).units for group in unit.groups]
        for group in groups:
            assert (group.main_dtype, group.compute_dtype, group.reduce_dtype, group.grad_dtype) == names
        main_dtype = getattr(torch, names[0])
        expected = Toy().to(given).to(main_dtype)
        for param, want in zip(model.parameters(), expected.parameters(), strict=True):
            assert param.dtype == main_dtype
            assert torch.equal(whole(param), want.detach())
        padded = sum(group.padded_numel for group in groups)
        shards = 1 if strategy == "no_shard" else dist.get_world_size()
        assert model.memory_report().main_weights == padded // shards * main_dtype.itemsize


def full_batch_reference(make: Callable[[Any], torch.optim.Optimizer], main: torch.dtype, steps: int) -> Toy:
    """One process, all ranks' data, updates in float32 of weights that are rounded after each."""
    reference = Toy().to(main).float()
    optimizer = make(reference.parameters())
    for step in range(steps):
        mse(reference, *batch(step, dist.get_world_size(), 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for param in reference.parameters():
            param.data.copy_(param.data.to(main))
    return reference


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: MainWeightAdamW(params, lr=1e-2, weight_decay=0.1),
    "sgd": lambda params: MainWeightSGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "muon": lambda params: MainWeightMuon(params, lr=1e-2, adamw_lr=1e-2),
}


@pytest.mark.parametrize(
    ("name", "strategy", "main"),
    [
        *(("adamw", strategy, HALF) for strategy in STRATEGIES),
        ("adamw", "optim_grads_params", torch.float16),
        ("sgd", "optim", HALF),
        ("muon", "optim_grads_params", HALF),
    ],
)
@on_ranks(3)
def test_half_precision_main_weights_train_as_on_the_full_batch(
    name: str, strategy: str, main: torch.dtype
) -> None:
    model = sharded_toy(strategy=strategy, mp_policy=narrow(main))
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(4):
        local_loss(model, step).backward()
        assert all(local_of(param.grad).dtype == torch.float32 for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    reference = full_batch_reference(OPTIMIZERS[name], main, 4)
    for param, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert param.dtype == main
        # Sums of gradients in another order may round to the next number.
        spacing = torch.finfo(main).eps
        torch.testing.assert_close(whole(param).float(), want.detach(), rtol=spacing, atol=1e-6)
        moments = [value for key, value in optimizer.state[param].items() if key != "step"]
        assert moments
        assert all(moment.dtype == torch.float32 for moment in moments)


def test_matrices_in_bfloat16_are_updated_by_muon_in_float32_and_rounded_once() -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 48, dtype=HALF).view(6, 8))
    exact = nn.Parameter(weight.detach().float())
    mine = MainWeightMuon([weight], lr=0.1, weight_decay=0.3, momentum_dtype=HALF)
    other = torch.optim.Muon([exact], lr=0.1, weight_decay=0.3)
    for step in range(4):
        weight.grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).to(HALF)
        exact.grad = weight.grad.float()
        mine.step()
        other.step()
        assert torch.equal(weight.detach(), exact.detach().to(HALF))
        momentum = mine.state[weight]["momentum_buffer"]
        assert torch.equal(momentum, other.state[exact]["momentum_buffer"].to(HALF))
        other.state[exact]["momentum_buffer"].copy_(momentum)
        exact.data.copy_(weight.data)


class Adapted(nn.Module):
    """A frozen layer in half precision, and a trained one of low rank in float32 beside it."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.base = nn.Linear(columns, rows).to(HALF).requires_grad_(False)
        self.down, self.up = nn.Linear(columns, 2, bias=False), nn.Linear(2, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.up(self.down(x.to(self.down.weight.dtype)))
        return torch.tanh(self.base(x.to(self.base.weight.dtype)) + low)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(4)
            self.embed = nn.Embedding(9, 5).to(HALF).requires_grad_(False)
            self.layers = nn.ModuleList([Adapted(5, 7), Adapted(7, 5)])
            self.head = nn.Linear(5, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.to(self.head.weight.dtype)).squeeze(-1)


def sharded_lora(edit: Callable[[Lora], Any] = lambda _: None, **options: Any) -> Lora:
    """``edit``: what happens to the model before it is sharded."""
    model = Lora()
    edit(model)
    for part in (*model.layers, model):
        torch_impl.fully_shard(part, **{"mp_policy": MIXED, **options})
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_frozen_bfloat16_weights_take_two_bytes_an_element(strategy: str) -> None:
    model = sharded_lora(strategy=strategy)
    optimizer = MainWeightAdamW(model.parameters(), lr=1e-2)
    frozen_values = {
        name: param.detach() for name, param in Lora().named_parameters() if not param.requires_grad
    }
    losses_of(model, optimizer)
    groups = [group for unit in torch_impl.layout_report(model).units for group in unit.groups]
    shards = 1 if strategy == "no_shard" else dist.get_world_size()
    frozen = sum(group.padded_numel for group in groups if not group.trainable) // shards
    trained = sum(group.padded_numel for group in groups if group.trainable) // shards
    report = model.memory_report(optimizer)
    assert report.main_weights == 2 * frozen + 4 * trained
    if strategy == "no_shard":
        # The frozen weights are themselves what forward computes with.
        assert report.compute_weights == 2 * trained
    for name, param in model.named_parameters():
        assert param.dtype == (HALF if name in frozen_values else torch.float32)
        assert (param in optimizer.state) == (name not in frozen_values)
        if name in frozen_values:
            assert torch.equal(whole(param), frozen_values[name])
            assert param.grad is None


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(3)
def test_adapters_of_a_frozen_bfloat16_model_train_as_on_the_full_batch(strategy: str) -> None:
    # All compute in float32, so that the reference differs by the order of sums alone.
    model = sharded_lora(strategy=strategy, mp_policy=MixedPrecisionPolicy(torch.float32))
    optimizer = MainWeightAdamW(model.parameters(), lr=1e-2)
    reference = Lora().float()
    expected = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        local_loss(model, step).backward()
        full_batch_loss(reference, step).backward()
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()
    for param, want in zip(model.parameters(), reference.parameters(), strict=True):
        assert param.dtype == (torch.float32 if want.requires_grad else HALF)
        torch.testing.assert_close(whole(param).float(), want.detach(), rtol=1e-4, atol=1e-6)


def saved(path: str) -> list[float]:
    model = sharded_lora()
    optimizer = MainWeightAdamW(model.parameters(), lr=1e-2)
    losses_of(model, optimizer, range(2))
    save_checkpoint(path, model, optimizer)
    tokens, targets = batch(7, 4, 1)
    return [mse(model, tokens, targets).item(), *(step_on_all(model, optimizer))]


def loaded(path: str, strategy: str) -> list[float]:
    def other(model: Lora) -> None:
        for param in model.parameters():
            param.data.zero_()

    model = sharded_lora(other, strategy=strategy)
    optimizer = MainWeightAdamW(model.parameters(), lr=9.0)
    load_checkpoint(path, model, optimizer)
    assert all(param.dtype == HALF for param in model.parameters() if not param.requires_grad)
    tokens, targets = batch(7, 4, 1)
    return [mse(model, tokens, targets).item(), *(step_on_all(model, optimizer))]


def step_on_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The loss after a step in which all ranks have the same data, so that their number does not matter."""
    tokens, targets = batch(8, 4, 1)
    mse(model, tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    return [mse(model, tokens, targets).item()]


def refused(path: str) -> str:
    model = sharded_lora(lambda model: model.float())
    try:
        load_checkpoint(path, model)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_checkpoint_holds_frozen_weights_as_they_are_and_goes_on_on_other_ranks(
    ranks: RankGroup, tmp_path: Path
) -> None:
    path = str(tmp_path / "a")
    expected = ranks.run(4, saved, path)[0]
    stored = {name: info.dtype.name for name, info in open_checkpoint(path).tensors.items()}
    assert stored["model.layers.0.base.weight"] == "bfloat16"
    assert stored["model.layers.0.up.weight"] == "float32"
    assert "optimizer.state.layers.0.base.weight.exp_avg" not in stored
    for world, strategy in ((2, "optim"), (3, "optim_grads_params")):
        for losses in ranks.run(world, loaded, path, strategy):
            assert losses == pytest.approx(expected, rel=1e-2)
            # Before the step nothing depends on the number of ranks.
            assert losses[0] == expected[0]
    (text,) = set(ranks.run(2, refused, path))
    assert "another main_dtype?" in text
    assert "twinshard convert --cast" in text
    assert "model.layers.0.base.weight: expected float32 (7, 5), found bfloat16 (7, 5)" in text


def narrow_checkpoint(path: str) -> None:
    def made(seed: int, main: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
        policy = MixedPrecisionPolicy(torch.float32, main_dtype=main)
        model = sharded_toy(mp_policy=policy)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(seed)
        return model, MainWeightAdamW(model.parameters(), lr=1e-2)

    model, optimizer = made(1, HALF)
    losses_of(model, optimizer, range(2))
    save_checkpoint(path, model, optimizer)
    again, its_optimizer = made(3, HALF)
    load_checkpoint(path, again, its_optimizer)
    assert losses_of(again, its_optimizer, range(2, 4)) == losses_of(model, optimizer, range(2, 4))
    for param, want in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(local_of(param), local_of(want))
    with pytest.raises(CheckpointError, match=r"another main_dtype\?.*\n.*expected float32 .*found bfloat16"):
        load_checkpoint(path, *made(1, torch.float32))


def test_bfloat16_main_weights_are_saved_so_and_go_on_with_the_same_bits(
    ranks: RankGroup, tmp_path: Path
) -> None:
    ranks.run(2, narrow_checkpoint, str(tmp_path / "a"))


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks(2)
def test_a_half_precision_parameter_that_is_unfrozen_later_is_refused_by_name(strategy: str) -> None:
    model = sharded_lora(strategy=strategy)
    tokens, targets = (tensor[dist.get_rank()] for tensor in batch(0, dist.get_world_size(), 1))
    before = mse(model, tokens, targets).item()
    weight = model.layers[1].base.weight.requires_grad_(True)
    text = (
        "parameter 'base.weight' was frozen when fully_shard took it, and so kept torch.bfloat16: expected it to stay "
        "frozen, since trainable parameters have main weights in torch.float32, got requires_grad=True"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=re.escape(text)):
            model(tokens.view(-1))
    weight.requires_grad_(False)
    assert mse(model, tokens, targets).item() == before
    # Parameters that were given in float32, or are trained in the dtype in which they were given, may be unfrozen.
    for edit, policy in ((Lora.float, MIXED), (lambda _: None, KEPT)):
        if policy is KEPT:
            policy = MixedPrecisionPolicy(HALF, torch.float32, main_dtype=None)
        other = sharded_lora(edit, strategy=strategy, mp_policy=policy)
        weight = other.layers[1].base.weight.requires_grad_(True)
        mse(other, tokens, targets).backward()
        assert weight.grad.dtype == weight.dtype
        assert whole(weight.grad).any()


@on_ranks(2)
def test_frozen_weights_come_from_the_meta_device_in_their_dtype() -> None:
    with torch.device("meta"):
        model = Lora()
    for part in (*model.layers, model):
        torch_impl.fully_shard(part, mp_policy=MIXED)
    model.to_empty(device="cpu")
    model.load_state_dict(Lora().state_dict())
    expected = sharded_lora()
    tokens, targets = (tensor[dist.get_rank()] for tensor in batch(0, dist.get_world_size(), 1))
    assert mse(model, tokens, targets).item() == mse(expected, tokens, targets).item()
    for param, want in zip(model.parameters(), expected.parameters(), strict=True):
        assert param.dtype == want.dtype
        assert torch.equal(local_of(param), local_of(want))
    assert model.memory_report() == expected.memory_report()


@on_ranks(2)
def test_weights_in_host_memory_train_with_the_same_bits() -> None:
    for make in (sharded_lora, lambda **options: sharded_toy(mp_policy=narrow(), **options)):
        runs = []
        for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
            model = make(**options)
            losses = losses_of(model, MainWeightAdamW(model.parameters(), lr=1e-2))
            runs.append((losses, [local_of(param).detach() for param in model.parameters()]))
        (losses, weights), (its_losses, its_weights) = runs
        assert losses == its_losses
        assert all(
            torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(weights, its_weights, strict=True)
        )


@pytest.mark.fast_cases("mxfp8")
@pytest.mark.parametrize("gather", ["mxfp8", "float8_e4m3fn"])
@on_ranks(2)
def test_frozen_bfloat16_weights_are_quantized_as_their_float32_copies(gather: str) -> None:
    policy = MixedPrecisionPolicy(HALF, torch.float32, gather_dtype=gather)
    losses = []
    for edit in (lambda _: None, Lora.float):
        model = sharded_lora(edit, mp_policy=policy)
        losses.append(losses_of(model, MainWeightAdamW(model.parameters(), lr=1e-2)))
        groups = [group for unit in torch_impl.layout_report(model).units for group in unit.groups]
        assert {group.gather_dtype for group in groups if not group.trainable} == {gather, "bfloat16"}
    assert losses[0] == losses[1]


@on_ranks(1)
def test_what_needs_float32_main_weights_refuses_others() -> None:
    with pytest.raises(ValueError, match=r"main_dtype: expected torch.float32 .* got torch.bfloat16"):
        MixedPrecisionPolicy(gather_dtype="mxfp8", main_dtype=HALF)
    quantized = MixedPrecisionPolicy(gather_dtype="mxfp8", main_dtype=None)
    with pytest.raises(ValueError, match=r"weight: expected float32 main weights with gather_dtype='mxfp8'"):
        torch_impl.fully_shard(nn.Linear(3, 5).to(HALF), mp_policy=quantized)
    torch_impl.fully_shard(nn.Linear(3, 5), mp_policy=quantized)
    for main in (HALF, None):
        policy = MixedPrecisionPolicy(HALF, store_param_remainders=True, main_dtype=main)
        with pytest.raises(ValueError, match=r"weight: expected float32 main weights .* got torch.bfloat16"):
            torch_impl.fully_shard(nn.Linear(3, 5).to(HALF), strategy="optim", mp_policy=policy)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, "bfloat16"])
def test_what_is_no_dtype_of_main_weights_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"MixedPrecisionPolicy.main_dtype: expected a "):
        MixedPrecisionPolicy(main_dtype=dtype)


@on_ranks(2)
def test_frozen_bfloat16_weights_have_no_remainders() -> None:
    policy = MixedPrecisionPolicy(HALF, torch.float32, store_param_remainders=True)
    model = sharded_lora(strategy="optim", mp_policy=policy)
    plain = sharded_lora(strategy="optim")
    losses = [losses_of(module, MainWeightAdamW(module.parameters(), lr=1e-2)) for module in (model, plain)]
    assert losses[0] == losses[1]
    frozen = [
        group
        for m in model.modules()
        if hasattr(m, "_unit")
        for group in m._unit.groups
        if not group.params[0].requires_grad
    ]
    assert frozen
    assert all(group.weights.main.flat.dtype == HALF and not group.dtypes.remainders for group in frozen)


@on_ranks(2)
def test_a_policy_file_chooses_the_main_weights_dtype() -> None:
    text = '[precision]\nmain = "{}"\ncompute = "float32"\n[[unit]]\nmatch = ""\n'
    for main, dtype, expected in (
        ("bfloat16", torch.float32, HALF),
        ("given", HALF, HALF),
        ("given", torch.float64, torch.float64),
        ("float32", HALF, torch.float32),
    ):
        model = Toy().to(dtype)
        model.head.weight.requires_grad_(False)
        torch_impl.ShardingPolicy.parse(text.format(main), "f").apply(model)
        for name, param in model.named_parameters():
            assert param.dtype == (dtype if name == "head.weight" else expected)
        mse(model, *batch(0, 1, 1)).backward()
        assert {param.grad.dtype for param in model.parameters() if param.requires_grad} == {expected}
    with pytest.raises(
        torch_impl.PolicyError, match=r"expected torch.bfloat16 main weights, got embed.weight in"
    ):
        torch_impl.ShardingPolicy.parse(text.format("bfloat16"), "f").apply(Toy().double())
