"""Main weights are built exactly, compute weights follow them, and both take the bytes that they should."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    Block,
    Toy,
    assert_same_gradients,
    assert_same_weights,
    batch,
    local_loss,
    mse,
    sharded_toy,
    whole,
)
from torch_impl.dtensor.local import local_of

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
WORLD = 3
BFLOAT16 = torch_impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def step_of_sgd(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def step_of_adamw(model: nn.Module, **options: bool) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.AdamW(model.parameters(), lr=0.5, **options).step()


def step_of_main_weight_adamw(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    torch_impl.MainWeightAdamW(model.parameters(), lr=0.5).step()


def edit_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


def edit_through_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.add_(1)


def edit_local_rows(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().mul_(3)


def edit_unseen_and_count(model: nn.Module) -> None:
    for param in model.parameters():
        rows = param.detach().to_local()
        rows.numpy()[...] += 1
        torch.autograd.graph.increment_version(rows)


def load_whole_tensors(model: nn.Module) -> None:
    model.load_state_dict(Toy(seed=5).state_dict())


def load_sharded_tensors(model: nn.Module) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


UPDATES: dict[str, Callable[[nn.Module], None]] = {
    "SGD": step_of_sgd,
    "AdamW for-loop": lambda model: step_of_adamw(model, foreach=False),
    "AdamW foreach": lambda model: step_of_adamw(model, foreach=True),
    "AdamW fused": lambda model: step_of_adamw(model, fused=True),
    "MainWeightAdamW": step_of_main_weight_adamw,
    "in place": edit_in_place,
    ".data": edit_through_data,
    "to_local": edit_local_rows,
    "NumPy, counted": edit_unseen_and_count,
    "load_state_dict, whole": load_whole_tensors,
    "load_state_dict, sharded": load_sharded_tensors,
}


def forward_after_every_update(strategy: str, keep: bool, low: bool) -> None:
    policy = BFLOAT16 if low else torch_impl.MixedPrecisionPolicy()
    model = sharded_toy(strategy=strategy, reshard_after_forward=not keep, mp_policy=policy)
    tokens, _ = batch(0, dist.get_world_size(), 1)
    mine = tokens[dist.get_rank()].view(-1)
    before = model(mine).detach()
    for name, update in UPDATES.items():
        # Weights that are kept are shown: a state dict shows the sharded ones, and leaves those in memory.
        model.state_dict()
        update(model)
        reference = Toy()
        for param, current in zip(reference.parameters(), model.parameters(), strict=True):
            param.data.copy_(whole(current))
        want = reference.to(torch.bfloat16 if low else torch.float32)(mine).detach()
        got = model(mine).detach()
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
        assert not torch.equal(got, before), f"{name} changed nothing"
        before = got


@pytest.mark.fast_cases("no_shard", "optim")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_next_forward_sees_the_weights_whoever_updated_them(ranks: RankGroup, strategy: str) -> None:
    for low in (False, True):
        ranks.run(WORLD, forward_after_every_update, strategy, False, low)
    if strategy == "optim_grads_params":
        ranks.run(WORLD, forward_after_every_update, strategy, True, False)


def backward_through_older_weights(strategy: str) -> str:
    model = sharded_toy(strategy=strategy)
    tokens, targets = batch(0, dist.get_world_size(), 1)
    mine = tokens[dist.get_rank()], targets[dist.get_rank()]
    loss = mse(model, *mine)
    edit_in_place(model)
    mse(model, *mine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_through_weights_that_were_replaced_is_an_error(ranks: RankGroup, strategy: str) -> None:
    ranks.run(2, backward_through_older_weights, strategy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@on_ranks(2)
def test_main_weights_are_the_given_values_not_a_rounded_copy(dtype: torch.dtype) -> None:
    for strategy in STRATEGIES:
        model, reference = sharded_toy(strategy=strategy, dtype=dtype, mp_policy=BFLOAT16), Toy().to(dtype)
        main = torch.float64 if dtype == torch.float64 else torch.float32
        for param, original in zip(model.parameters(), reference.parameters(), strict=True):
            assert param.dtype == main
            assert torch.equal(whole(param), original.to(main))
        loss = local_loss(model)
        loss.backward()
        assert all(param.grad.dtype == main for param in model.parameters())


@on_ranks(WORLD)
def test_float64_parameters_train_in_float64() -> None:
    strategy = "optim_grads_params"
    model, reference = sharded_toy(strategy=strategy, dtype=torch.float64), Toy().double()
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.1)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for step in range(3):
        tokens, targets = batch(step, dist.get_world_size(), 1)
        targets = targets.double()
        mse(model, tokens[dist.get_rank()], targets[dist.get_rank()]).backward()
        mse(reference, tokens, targets).backward()
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()
    assert_same_weights(model, reference, rtol=1e-7, atol=1e-8)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(5, 3).bfloat16()
        self.high = nn.Linear(3, 5)
        self.table = nn.Parameter(torch.arange(7), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(x.bfloat16()).float()) * self.table.sum() + self.none.sum()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_a_unit_may_hold_several_dtypes_empty_and_integer_parameters(strategy: str) -> None:
    torch.manual_seed(0)
    model, reference = Mixed(), Mixed()
    reference.load_state_dict(model.state_dict())
    torch_impl.fully_shard(model, strategy=strategy)
    assert sorted(str(g.dtypes.compute) for g in model._unit.groups) == [
        "torch.bfloat16",
        "torch.float32",
        "torch.int64",
    ]
    x = torch.randn(dist.get_world_size(), 4, 5)
    model(x[dist.get_rank()]).mean().backward()
    reference(x).mean().backward()
    assert_same_gradients(model, reference.float(), rtol=2e-2, atol=1e-2)


def reduced_in(reduce: torch.dtype, grad: torch.dtype | None) -> tuple[float, torch.dtype]:
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    policy = torch_impl.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce, grad_dtype=grad)
    model = torch_impl.fully_shard(Weight(), mp_policy=policy)
    # 1 and 2**-8 are exact in bfloat16, their sum is not: it needs one bit more.
    model(torch.full((5,), 1.0 if dist.get_rank() == 0 else 2.0**-8)).backward()
    gradient = model.weight.grad
    torch_impl.MainWeightAdamW(model.parameters()).step()
    return whole(gradient)[0].item(), gradient.dtype


def test_gradients_are_reduced_in_reduce_dtype_and_kept_in_grad_dtype(ranks: RankGroup) -> None:
    exact = (1 + 2.0**-8) / 2
    assert ranks.run(2, reduced_in, torch.float32, None) == [(exact, torch.float32)] * 2
    assert ranks.run(2, reduced_in, torch.bfloat16, None) == [(0.5, torch.float32)] * 2
    assert ranks.run(2, reduced_in, torch.float32, torch.bfloat16) == [(0.5, torch.bfloat16)] * 2


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Every storage behind a live tensor, by address, found without asking the runtime."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = local_of(thing).untyped_storage()
            try:
                address = storage.data_ptr()
            except RuntimeError:  # tensors that the compiler pretends with have no memory
                continue
            if storage.nbytes():
                storages[address] = storage
    return storages


def assert_live_bytes(expected: int, before: dict[int, torch.UntypedStorage]) -> None:
    """All storages but those of ``before`` (held, so that their addresses cannot be used again) sum to ``expected``.

    gloo's thread drops a finished collective's tensors when it next gets the interpreter lock, which on a busy machine
    comes after the collective has returned: what is still there after ten seconds is ours.
    """
    deadline = time.monotonic() + 10
    while True:
        live = {address: s.nbytes() for address, s in live_storages().items() if address not in before}
        if sum(live.values()) == expected:
            return
        assert time.monotonic() < deadline, (
            f"expected {expected} live bytes, got storages of {sorted(live.values())}"
        )
        time.sleep(0.01)


def bytes_at_rest(strategy: str, low: bool) -> None:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    before = live_storages()
    model = sharded_toy(
        strategy=strategy, mesh=mesh, mp_policy=BFLOAT16 if low else torch_impl.MixedPrecisionPolicy()
    )
    optimizer = torch_impl.MainWeightAdamW(model.parameters())
    layouts = [group.layout for m in model.modules() if hasattr(m, "_unit") for group in m._unit.groups]
    padded = sum(layout.padded_size for layout in layouts)
    rows = sum(local_of(param).numel() for param in model.parameters())
    replicated = strategy == "no_shard"
    shards = 1 if replicated else world
    c = 2 if low else 4

    def check(gradients: int, compute: int, moments: int) -> None:
        report = model.memory_report(optimizer)
        main = 4 * padded // shards
        assert report.main_weights == main
        assert report.padding == main - 4 * rows
        assert (report.gradients, report.compute_weights, report.moments) == (gradients, compute, moments)
        steps = 4 * len(optimizer.state)
        assert_live_bytes(report.total + steps, before)

    def backward(step: int) -> None:
        local_loss(model, step).backward()

    kept = {"no_shard": c * padded if low else 0, "optim_grads_params": 0}.get(strategy, c * padded)
    # With a flag for each parameter, and of whole gradients for each shard.
    flags = sum(len(layout.slots) for layout in layouts)
    whole_gradients, reduced = 4 * (padded + shards * flags), 4 * (padded // shards + flags)
    check(gradients=0, compute=0, moments=0)
    with model.no_sync():
        backward(0)
        check(whole_gradients if strategy in ("optim", "no_shard") else reduced, kept, 0)
    backward(1)
    check(reduced, kept, 0)
    optimizer.step()
    optimizer.zero_grad()
    check(0, kept, 8 * rows)
    backward(2)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    check(reduced, kept, 8 * rows)


@pytest.mark.fast_cases("optim_grads_params-False")
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(3)
def test_bytes_at_rest_are_exactly_those_of_the_strategy(strategy: str, low: bool) -> None:
    # What is there before, a million objects of the frameworks, is not searched again and again.
    gc.collect()
    gc.freeze()
    try:
        bytes_at_rest(strategy, low)
    finally:
        gc.unfreeze()


@on_ranks(1)
def test_attributes_set_on_parameters_survive() -> None:
    model = Block()
    model.gain.learning_rate_scale = 3
    torch_impl.fully_shard(model)
    assert model.gain.learning_rate_scale == 3
    model.unshard()
    assert model.gain.learning_rate_scale == 3


@on_ranks(2)
def test_a_block_is_freed_before_the_next_one_is_gathered() -> None:
    model = sharded_toy(blocks=3)
    seen: list[list[bool]] = []
    for block in model.blocks:
        block.register_forward_hook(
            lambda *_: seen.append([b._unit.groups[0].weights.compute.allocated for b in model.blocks])
        )
    local_loss(model).backward()
    # A user's hook runs after ours: all blocks are freed by then.
    assert seen == [[False, False, False]] * 3


def one_row(optimizer_name: str) -> list[float]:
    torch.manual_seed(0)
    model = torch_impl.fully_shard(nn.Linear(3, 1, bias=False), strategy="optim")
    optimizer = {"MainWeightAdamW": torch_impl.MainWeightAdamW, "AdamW": torch.optim.AdamW}[optimizer_name](
        model.parameters(), lr=0.1
    )
    outputs = []
    for _ in range(3):
        output = model(torch.ones(1, 3))
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output.item())
    return outputs


@pytest.mark.parametrize("optimizer_name", ["MainWeightAdamW", "AdamW"])
def test_ranks_that_hold_no_row_of_a_unit_gather_updated_weights_with_the_others(
    ranks: RankGroup, optimizer_name: str
) -> None:
    outputs = ranks.run(3, one_row, optimizer_name, timeout=60)
    assert outputs == [outputs[0]] * 3
    assert len(set(outputs[0])) == 3
