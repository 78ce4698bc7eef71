"""Irregular programs: units that are skipped, called twice, interrupted, frozen, tied, recomputed, deleted."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
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
    sharded_toy,
    whole,
)

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
WORLD = 3


def inputs(step: int, like: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block inputs of this rank, and of all ranks."""
    everyone = torch.randn(dist.get_world_size(), like, 5, generator=torch.Generator().manual_seed(50 + step))
    return everyone[dist.get_rank()], everyone, everyone.view(-1, 5)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def blocks_skipped_and_repeated(strategy: str) -> None:
    model, reference = sharded_toy(strategy=strategy), Toy()

    def run(target: nn.Module, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = target.blocks[index](x)
        return x

    class Program(nn.Module):
        def __init__(self, toy: nn.Module) -> None:
            super().__init__()
            self.toy = toy

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            return run(self.toy, x, order)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step, order in enumerate([[0], [0, 0], [1, 0, 1], [], [0, 1]]):
        mine, _, everyone = inputs(step)
        optimizer.zero_grad()
        expected.zero_grad()
        mine.requires_grad_(True)
        loss_of(run(model, mine, order)).backward()
        loss_of(run(reference, everyone.requires_grad_(True), order)).backward()
        assert_same_gradients(model, reference)
        for index in {0, 1} - set(order):
            assert all(p.grad is None for p in model.blocks[index].parameters())
        assert_at_rest(model)
        optimizer.step()
        expected.step()
        assert_same_weights(model, reference)


@pytest.mark.fast_cases("optim", "optim_grads_params")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_units_may_be_skipped_repeated_and_reordered(ranks: RankGroup, strategy: str) -> None:
    ranks.run(WORLD, blocks_skipped_and_repeated, strategy)


class Fault(Exception):
    pass


class Failing(Toy):
    """Raises inside a block or after all blocks, as told."""

    fail_at: int | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if self.fail_at == index:
                block(x[:, :2])
            x = block(x)
        if self.fail_at == len(self.blocks):
            raise Fault
        return self.head(x).squeeze(-1)


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise Fault


@pytest.mark.fast_cases("optim", "optim_grads_params")
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_a_forward_that_raised_can_be_tried_again(strategy: str) -> None:
    model, reference = Failing(), Toy()
    for block in model.blocks:
        torch_impl.fully_shard(block, strategy=strategy)
    torch_impl.fully_shard(model, strategy=strategy)
    full_batch_loss(reference).backward()
    for fail_at in (0, 1, 2):
        model.fail_at = fail_at
        with pytest.raises((Fault, RuntimeError)):
            local_loss(model)
        assert_at_rest(model)
        model.fail_at = None
        local_loss(model).backward()
        assert_same_gradients(model, reference)
        assert_at_rest(model)
        model.zero_grad()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_a_backward_that_raised_leaves_later_ones_right(strategy: str) -> None:
    model, reference = sharded_toy(strategy=strategy), Toy()
    full_batch_loss(reference).backward()
    kept = local_loss(model)
    x = model.blocks[0](torch.ones(2, 5, requires_grad=True))
    with pytest.raises(Fault):
        loss_of(model.blocks[1](FailInBackward.apply(x))).backward()
    model.zero_grad()
    kept.backward()
    assert_same_gradients(model, reference)
    model.zero_grad()
    local_loss(model).backward()
    assert_same_gradients(model, reference)
    assert_at_rest(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_evaluation_and_forwards_in_advance_do_not_disturb_microbatches(strategy: str) -> None:
    model, reference = sharded_toy(strategy=strategy), Toy()
    world, rank = dist.get_world_size(), dist.get_rank()
    tokens, targets = batch(0, world, 2)
    (mse(reference, tokens, targets)).backward()

    def evaluate() -> None:
        with torch.no_grad():
            mse(model, tokens[rank, 0], targets[rank, 0])
        with torch.inference_mode():
            mse(model, tokens[rank, 1], targets[rank, 1])

    evaluate()
    first = mse(model, tokens[rank, 0], targets[rank, 0]) / 2
    evaluate()
    second = mse(model, tokens[rank, 1], targets[rank, 1]) / 2
    mse(model, tokens[rank, 1], targets[rank, 1])  # dropped
    with model.no_sync():
        first.backward()
    evaluate()
    second.backward()
    assert_same_gradients(model, reference)
    assert_at_rest(model)


class Recomputed(Toy):
    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return checkpoint(self.head, x, use_reentrant=self.reentrant).squeeze(-1)


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(WORLD)
def test_activation_checkpointing_of_both_kinds_gives_the_same_gradients(
    strategy: str, reentrant: bool
) -> None:
    model, reference = Recomputed(), Toy()
    model.reentrant = reentrant
    for block in model.blocks:
        torch_impl.fully_shard(block, strategy=strategy)
    torch_impl.fully_shard(model, strategy=strategy)
    for step in range(2):
        full_batch_loss(reference, step).backward()
        local_loss(model, step).backward()
        assert_same_gradients(model, reference)
        assert_at_rest(model)


class Adapted(nn.Module):
    """A frozen matrix with a trainable low-rank path, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.base = nn.Linear(5, 5)
            self.a, self.b = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x)) + self.b(self.a(x))


@pytest.mark.fast_cases("no_shard", "optim_grads_params")
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(WORLD)
def test_frozen_parameters_get_no_gradient_whenever_they_were_frozen(strategy: str) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(Adapted(), Adapted(), nn.Linear(5, 5).requires_grad_(False), Adapted())
    reference = copy.deepcopy(model)
    for child in model:
        torch_impl.fully_shard(child, strategy=strategy)
    torch_impl.fully_shard(model, strategy=strategy)
    for step in range(4):
        if step == 2:  # freeze and thaw after sharding
            for target in (model, reference):
                target[0].a.requires_grad_(False)
                target[3].base.requires_grad_(True)
        mine, _, everyone = inputs(step)
        model.zero_grad()
        reference.zero_grad()
        mine.requires_grad_(True)
        loss_of(model(mine)).backward()
        loss_of(reference(everyone.requires_grad_(True))).backward()
        for (name, param), (_, want) in zip(
            model.named_parameters(), reference.named_parameters(), strict=True
        ):
            assert (param.grad is None) == (want.grad is None), name
        assert_same_gradients(model, reference)
        rank = dist.get_rank()
        expected = everyone.grad.view(dist.get_world_size(), -1, 5)[rank] * dist.get_world_size()
        torch.testing.assert_close(mine.grad, expected)
        assert_at_rest(model)


class Tied(Toy):
    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.output = nn.Linear(5, 9, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(x)[:, 0]


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks(WORLD)
def test_a_tie_inside_a_unit_is_one_parameter(strategy: str) -> None:
    model, reference = Tied(), Tied()
    for block in model.blocks:
        torch_impl.fully_shard(block, strategy=strategy)
    torch_impl.fully_shard(model, strategy=strategy)
    assert model.output.weight is model.embed.weight
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.01)
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in range(3):
        full_batch_loss(reference, step).backward()
        local_loss(model, step).backward()
        assert_same_gradients(model, reference)
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()
        assert_same_weights(model, reference)


class Untouched(Block):
    """Never uses ``gain``; rank 0 does not use ``down`` either."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        mixed = torch.einsum("bi,eoi->bo", hidden, self.stack)
        return x + (mixed.sum(1, keepdim=True) if self.rank == 0 else torch.tanh(self.down(mixed)))


def unused_parameters(strategy: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()

    def build() -> nn.Sequential:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return nn.Sequential(Untouched(), Untouched())

    model, reference = build(), build()
    for child in model:
        child.rank = rank
        torch_impl.fully_shard(child, strategy=strategy)
    for step in range(2):
        mine, everyone, _ = inputs(step)
        loss_of(model(mine)).backward()
        for k in range(world):
            for child in reference:
                child.rank = k
            (loss_of(reference(everyone[k])) / world).backward()
        assert_same_gradients(model, reference)
        assert_at_rest(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_may_be_unused_on_some_or_all_ranks(ranks: RankGroup, strategy: str) -> None:
    ranks.run(WORLD, unused_parameters, strategy)


@dataclass
class Output:
    hidden: torch.Tensor
    name: str = "output"


class Structured(Block):
    def forward(self, x: torch.Tensor, *, scale: dict[str, torch.Tensor]) -> dict[str, Output]:
        return {"out": Output(super().forward(x * scale["by"]))}


class Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Hidden(Block):
    def forward(self, x: torch.Tensor) -> Opaque:
        return Opaque(super().forward(x))


class InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2))


def structured(strategy: str) -> None:
    def build(module_class: type[nn.Module]) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(2)
            return module_class()

    mine, _, everyone = inputs(0)
    for module_class, call in (
        (Structured, lambda m, x: m(x, scale={"by": x[:1]})["out"].hidden),
        (Hidden, lambda m, x: m(x).value),
        (InPlace, lambda m, x: m(x * 1.5)),
    ):
        model, reference = torch_impl.fully_shard(build(module_class), strategy=strategy), build(module_class)
        for _ in range(2):
            loss_of(call(model, mine.clone().requires_grad_(True))).backward()
            world = dist.get_world_size()
            for part in everyone.view(world, -1, 5):
                (loss_of(call(reference, part.clone().requires_grad_(True))) / world).backward()
            assert_same_gradients(model, reference)
            assert_at_rest(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inputs_and_outputs_may_be_structured_opaque_or_changed_in_place(
    ranks: RankGroup, strategy: str
) -> None:
    ranks.run(2, structured, strategy)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@on_ranks(WORLD)
def test_modules_that_cache_their_weights_use_the_gathered_ones(strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(5, 3, batch_first=True)
    reference = copy.deepcopy(model)
    torch_impl.fully_shard(model, strategy=strategy)
    optimizer, expected = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    for step in range(2):
        mine, everyone, _ = inputs(step)
        loss_of(model(mine[None])[0]).backward()
        loss_of(reference(everyone)[0]).backward()
        assert_same_gradients(model, reference)
        for opt in (optimizer, expected):
            opt.step()
            opt.zero_grad()


def train_and_delete(strategy: str) -> list[weakref.ref[object]]:
    model = sharded_toy(strategy=strategy)
    local_loss(model).backward()
    local_loss(model)
    units = [m._unit for m in model.modules() if isinstance(m, torch_impl.FSDPModule)]
    kept: list[object] = [
        b.flat for u in units for g in u.groups for b in (g.weights.main, g.weights.compute)
    ]
    kept += [p.grad for u in units for g in u.groups for p in g.params]
    return [weakref.ref(watched) for watched in (*kept, *units)]


@pytest.mark.fast_cases("optim", "optim_grads_params")
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_deleted_model_frees_its_memory_without_the_garbage_collector(strategy: str) -> None:
    # The first model of a process group meets an exception inside torch whose traceback keeps our frames.
    train_and_delete(strategy)
    gc.collect()
    gc.disable()
    try:
        refs = train_and_delete(strategy)
        # gloo's own thread lets go of the last collective's tensors a moment after its end.
        deadline = time.monotonic() + 10
        while any(ref() is not None for ref in refs) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [ref() for ref in refs if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.fast_cases("no_shard", "optim_grads_params")
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_graph_does_not_keep_a_deleted_model_alive(strategy: str) -> None:
    model = sharded_toy(strategy=strategy)
    loss = local_loss(model)
    units = [weakref.ref(m._unit) for m in model.modules() if isinstance(m, torch_impl.FSDPModule)]
    gc.collect()
    gc.disable()
    try:
        del model
        assert loss.requires_grad
        assert [ref() for ref in units if ref() is not None] == []
    finally:
        gc.enable()


@on_ranks(2)
def test_a_parent_without_parameters_of_its_own_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Tanh(), nn.Sequential(Block(), nn.Tanh()))
    reference = copy.deepcopy(model)
    torch_impl.fully_shard(model[1])
    torch_impl.fully_shard(model)
    assert [len(m._unit.groups) for m in (model, model[1])] == [0, 1]
    mine, _, everyone = inputs(0)
    loss_of(model(mine)).backward()
    loss_of(reference(everyone)).backward()
    assert_same_gradients(model, reference)


def marked_microbatches(strategy: str, microbatches: int) -> tuple[int, dict[str, int], dict[str, int]]:
    model = sharded_toy(strategy=strategy, reshard_after_forward=True)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=0.1)
    world, rank = dist.get_world_size(), dist.get_rank()
    tokens, targets = batch(0, world, microbatches)

    def step(set_to_none: bool) -> dict[str, int]:
        with counted() as counts:
            for k in range(microbatches):
                if k < microbatches - 1:
                    with model.no_sync():
                        mse(model, tokens[rank, k], targets[rank, k]).backward()
                else:
                    mse(model, tokens[rank, k], targets[rank, k]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return counts

    step(True)
    step(False)
    return sum(len(m._unit.groups) for m in model.modules() if hasattr(m, "_unit")), step(True), step(True)


@pytest.mark.fast_cases("3")
@pytest.mark.parametrize("microbatches", [1, 3])
def test_collectives_per_step_are_exactly_those_of_the_strategy(ranks: RankGroup, microbatches: int) -> None:
    k = microbatches
    for strategy, gathers, scatters, reduces in (
        ("optim_grads_params", 2 * k, k, 0),
        ("optim_grads", 1, k, 0),
        ("optim", 1, 1, 0),
        ("no_shard", 0, 0, 1),
    ):
        for n, *steps in ranks.run(2, marked_microbatches, strategy, k):
            assert n == 3
            expected = {"all_gather": gathers * n, "reduce_scatter": scatters * n, "all_reduce": reduces * n}
            assert steps == [expected, expected], strategy


def keeping_weights_after_forward() -> list[int]:
    model = sharded_toy(reshard_after_forward=False)
    gathers = []
    for keep in (True, False):
        model.set_reshard_after_forward(not keep)
        with counted() as counts:
            local_loss(model).backward()
        assert_at_rest(model)
        gathers.append(counts["all_gather"])
    return gathers


def test_weights_kept_after_forward_are_gathered_once(ranks: RankGroup) -> None:
    assert ranks.run(2, keeping_weights_after_forward) == [[3, 6], [3, 6]]


@on_ranks(2)
def test_unshard_shows_whole_weights_until_reshard_and_state_dicts_stay_sharded() -> None:
    model, reference = sharded_toy(), Toy()
    model.unshard()
    assert torch.equal(model.head.weight, reference.head.weight)
    assert type(model.head.weight) is nn.Parameter
    state = model.state_dict()
    assert all(isinstance(value, torch_impl.dtensor.tensor.RowDTensor) for value in state.values())
    model.unshard()
    model.reshard()
    assert_at_rest(model)
    assert torch.equal(whole(model.head.weight), reference.head.weight.detach())


def parallel_calls(strategy: str) -> list[int]:
    torch.manual_seed(5)
    model, trained = Block().requires_grad_(False), Block()
    references = copy.deepcopy(model), copy.deepcopy(trained)
    for unit in (model, trained):
        torch_impl.fully_shard(unit, strategy=strategy, reshard_after_forward=True)
    gathers = []
    for call, reference in ((model, references[0]), (trained, references[1])):
        mine, everyone, _ = inputs(0)
        left, right = mine.clone().requires_grad_(True), (2 * mine).requires_grad_(True)
        with counted() as counts:
            loss_of(call(left) * call(right)).backward()
        gathers.append(counts["all_gather"])
        for k, part in enumerate(everyone):
            a, b = part.clone().requires_grad_(True), (2 * part).requires_grad_(True)
            (loss_of(reference(a) * reference(b)) / len(everyone)).backward()
            if k == dist.get_rank():
                torch.testing.assert_close(
                    (left.grad, right.grad), (a.grad * len(everyone), b.grad * len(everyone))
                )
        assert_same_gradients(call, reference)
        assert_at_rest(call)
    return gathers


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_called_twice_side_by_side_has_the_right_gradients(ranks: RankGroup, strategy: str) -> None:
    gathers = {"no_shard": [0, 0], "optim_grads_params": [3, 3]}.get(strategy, [1, 1])
    assert ranks.run(2, parallel_calls, strategy) == [gathers] * 2


@on_ranks(2)
def test_hooks_from_before_the_sharding_see_whole_weights() -> None:
    torch.manual_seed(0)
    layer, seen = nn.Linear(5, 4), list[torch.Tensor]()
    expected = layer.weight.detach().clone()

    def look(module: nn.Module, *_: object) -> None:
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        seen.append(weight.detach().clone())

    layer.register_forward_pre_hook(look)
    layer.register_forward_hook(look)
    torch_impl.fully_shard(layer)(torch.ones(2, 5)).sum().backward()
    assert len(seen) == 2
    assert all(torch.equal(weight, expected) for weight in seen)
