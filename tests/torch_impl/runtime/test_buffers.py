"""Units whose parameters lie in two or three flat buffers train, save and fail like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import (
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    counted,
    seeded,
)
from tests.support.torch_impl.zoo import named
from torch_impl.comm import collectives

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
# What no shard boundary cuts, and how many buffers that makes of a ``Wide`` on 2, 3 and 4 ranks.
GRAINS: dict[str, tuple[Any, list[int]]] = {
    "row": ("row", [3, 3, 2]),
    "block": ("block(32)", [3, 1, 1]),
    "tensor": ("tensor", [1, 1, 1]),
    "mapping": ({"mid.weight": "block(4)", "gain": "tensor", "up.bias": "row"}, [3, 1, 2]),
}


class Wide(nn.Module):
    """Rows of 6, 45 and 56 elements, which share no small multiple: ``[B, 6] -> [B, 6]``."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 45)
        self.mid = nn.Linear(45, 56, bias=False)
        self.down = nn.Linear(56, 6, bias=False)
        self.gain = nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * self.down(torch.tanh(self.mid(torch.tanh(self.up(x)))))


def pair() -> nn.Sequential:
    return named(first=Wide(), second=Wide())


def sharded_pair(strategy: str, grain: str, **options: Any) -> nn.Sequential:
    """Without alignment, for which small units have one buffer."""
    model = seeded(pair)
    options["align"] = 1
    granularity, buffers = GRAINS[grain]
    for unit in (model.first, model.second):
        torch_impl.fully_shard(unit, strategy=strategy, granularity=granularity, **options)
        (group,) = unit._unit.groups
        expected = 1 if strategy == "no_shard" else buffers[dist.get_world_size() - 2]
        assert len(group.layout.shard_sizes) == expected, group.layout
    return torch_impl.fully_shard(model, strategy=strategy, **options)


def data(step: int, microbatches: int) -> torch.Tensor:
    """``[world, microbatches, 3, 6]``, different on every rank."""
    random = torch.Generator().manual_seed(step)
    return torch.randn(dist.get_world_size(), microbatches, 3, 6, generator=random)


def train_steps(strategy: str, grain: str, compute: str) -> None:
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=getattr(torch, compute), reduce_dtype=torch.float32)
    model, reference = sharded_pair(strategy, grain, mp_policy=policy), seeded(pair)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    assert_same_weights(model, reference, rtol=0, atol=0)
    exact = compute == "float32"
    for step in range(3):
        inputs = data(step, 2)
        for k, own in enumerate(inputs[dist.get_rank()]):
            model.set_is_last_backward(k == 1)
            (model(own).square().mean() / 2).backward()
        reference(inputs.flatten(0, 2)).square().mean().backward()
        assert_same_gradients(model, reference, *((1e-5, 1e-7) if exact else (1e-1, 3e-2)))
        optimizer.step()
        expected.step()
        optimizer.zero_grad(set_to_none=step == 0)
        expected.zero_grad()
        if exact:
            assert_same_weights(model, reference)
        assert_at_rest(model)


@pytest.mark.fast_cases(
    "no_shard-block-3",
    "optim-mapping-4",
    "optim_grads-tensor-2",
    "optim_grads-row-4",
    "optim_grads_params-tensor-3",
    "optim_grads_params-mapping-2",
)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("grain", GRAINS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_equals_the_full_batch_on_one_process(
    ranks: RankGroup, strategy: str, grain: str, world: int
) -> None:
    ranks.run(world, train_steps, strategy, grain, "float32")


def test_bfloat16_compute_follows_the_full_batch(ranks: RankGroup) -> None:
    ranks.run(3, train_steps, "optim_grads_params", "row", "bfloat16")


def count_collectives() -> None:
    """Each unit's three buffers (and flags) are one call, but for gathers on the CPU one call to the backend."""
    model = sharded_pair("optim_grads_params", "row")
    together: list[tuple[str, bool]] = []
    originals = {name: getattr(collectives, name) for name in ("_gather_one", "_scatter_one")}

    def noting(name: str) -> Any:
        def call(*args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
            together.append((name, group in distributed_c10d._world.pg_coalesce_state))
            return originals[name](*args, group=group, **kwargs)

        return call

    for name in originals:
        setattr(collectives, name, noting(name))
    try:
        with counted() as counts:
            model(data(0, 1)[dist.get_rank(), 0]).square().mean().backward()
    finally:
        for name, original in originals.items():
            setattr(collectives, name, original)
    assert counts == {"all_gather": 4, "reduce_scatter": 2, "all_reduce": 0}
    assert sorted(together) == [("_gather_one", False)] * 12 + [("_scatter_one", True)] * 8


def test_buffers_are_reduced_in_one_operation_and_gathered_in_several(ranks: RankGroup) -> None:
    ranks.run(3, count_collectives)


class _Noted:
    """A collective whose end is noted."""

    def __init__(self, work: Any, ended: list[int]) -> None:
        self._work, self._ended = work, ended

    def wait(self) -> None:
        self._work.wait()
        self._ended.append(1)


def stop_between_buffers() -> None:
    model = sharded_pair("optim_grads_params", "row")
    own = data(0, 1)[dist.get_rank(), 0]
    with torch.no_grad():
        expected = model(own)
        original, begun, ended = collectives._gather_one, [], []

        def second_call_stops(*args: Any, **kwargs: Any) -> Any:
            begun.append(1)
            if len(begun) == 2:
                raise KeyboardInterrupt
            return _Noted(original(*args, **kwargs), ended)

        collectives._gather_one = second_call_stops
        try:
            with pytest.raises(KeyboardInterrupt):
                model(own)
        finally:
            collectives._gather_one = original
        assert ended == [1], "memory that the first gather writes to is free"
        value = torch.ones(())
        dist.all_reduce(value)
        assert value == dist.get_world_size(), "a collective after the interrupted one was swallowed"
        torch.testing.assert_close(model(own), expected, rtol=0, atol=0)


def test_an_interruption_between_two_buffers_leaves_no_open_operation(ranks: RankGroup) -> None:
    ranks.run(3, stop_between_buffers)


def stop_between_reductions() -> None:
    world = dist.get_world_size()
    shards, values = [torch.zeros(2) for _ in range(2)], [torch.ones(2 * world) for _ in range(2)]
    original, begun = collectives._scatter_one, []

    def second_call_stops(*args: Any, **kwargs: Any) -> Any:
        begun.append(1)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    collectives._scatter_one = second_call_stops
    try:
        with pytest.raises(KeyboardInterrupt):
            collectives.reduce_scatter(shards, values, dist.group.WORLD)
    finally:
        collectives._scatter_one = original
    value = torch.ones(())
    dist.all_reduce(value)
    assert value == world, "a collective after the interrupted one was swallowed"
    collectives.reduce_scatter(shards, values, dist.group.WORLD)
    assert [shard.tolist() for shard in shards] == [[world] * 2] * 2


def test_an_interrupted_reduction_of_two_buffers_leaves_no_open_operation(ranks: RankGroup) -> None:
    ranks.run(3, stop_between_reductions)


@on_ranks(3)
def test_unreduced_sums_are_added_to_in_place() -> None:
    """Later microbatches add into the buffer of the first one: no second copy of the unreduced sums."""
    model = sharded_pair("optim_grads_params", "row")
    model.set_requires_gradient_sync(False)
    inputs = data(0, 3)[dist.get_rank()]
    addresses = []
    for own in inputs:
        model(own).square().mean().backward()
        addresses.append([p.grad._local_tensor.data_ptr() for p in model.parameters()])
    assert addresses[0] == addresses[1] == addresses[2]


def bytes_at_rest(grain: str) -> tuple[int, int]:
    model = sharded_pair("optim_grads_params", grain)
    layouts = [unit._unit.groups[0].layout for unit in (model.first, model.second)]
    report = model.memory_report()
    assert report.main_weights == 4 * sum(layout.shard_size for layout in layouts)
    assert report.compute_weights == 0
    own = sum(
        (r1 - r0) * layout.slot(name).row_size
        for layout in layouts
        for name, (r0, r1) in layout.row_ranges(dist.get_rank()).items()
    )
    assert report.padding == report.main_weights - 4 * own
    return report.padding, 4 * sum(layout.padded_size - layout.numel for layout in layouts)


@pytest.mark.parametrize("grain", GRAINS)
def test_bytes_at_rest_are_those_of_the_layouts(ranks: RankGroup, grain: str) -> None:
    results = ranks.run(2, bytes_at_rest, grain)
    assert sum(padding for padding, _ in results) == results[0][1]


def save_run(strategy: str, grain: str, path: str) -> None:
    model = sharded_pair(strategy, grain)
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    one_step(model, optimizer, 0)
    torch_impl.save_checkpoint(path, model, optimizer, {"step": 1})


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The same global batch of 12 rows on any number of ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
    model(rows[rank * 12 // world : (rank + 1) * 12 // world]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def load_run(strategy: str, grain: str, path: str) -> None:
    model, reference = sharded_pair(strategy, grain), seeded(pair)
    for param in model.parameters():
        with torch.no_grad():
            param.zero_()
    optimizer = torch_impl.MainWeightAdamW(model.parameters(), lr=1e-2)
    torch_impl.load_checkpoint(path, model, optimizer)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.01)
    for step in range(3):
        rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        reference(rows).square().mean().backward()
        expected.step()
        expected.zero_grad()
        if step > 0:
            one_step(model, optimizer, step)
        assert_same_weights(model, reference)


@pytest.mark.fast_cases("2-tensor-3-row")
@pytest.mark.parametrize(
    ("saver", "saved_as", "loader", "loaded_as"),
    [(3, "row", 2, "row"), (2, "row", 4, "block"), (2, "block", 3, "mapping"), (2, "tensor", 3, "row")],
)
def test_a_checkpoint_moves_between_layouts(
    ranks: RankGroup, tmp_path: Any, saver: int, saved_as: str, loader: int, loaded_as: str
) -> None:
    path = str(tmp_path / "saved")
    ranks.run(saver, save_run, "optim_grads_params", saved_as, path)
    ranks.run(loader, load_run, "optim", loaded_as, path)


@on_ranks(2)
def test_granularity_of_unknown_parameters_or_unlike_on_ranks_is_refused() -> None:
    model = seeded(Wide)
    wrong = {"up.weight": "row", "side.weight": "tensor"}
    with pytest.raises(ValueError, match=r"unit's parameters \(gain, up.weight, .*\), got 'side.weight'"):
        torch_impl.fully_shard(model, granularity=wrong)
    with pytest.raises(ValueError, match=r"granularity: expected one of row, block, .* got 'rows'"):
        torch_impl.fully_shard(model, granularity={"up.weight": "rows"})
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="granularity: rank 0 has 'row', rank 1 has 'tensor'"):
        torch_impl.fully_shard(model, granularity="tensor" if rank == 1 else "row")
    # Wrong on one rank only: an error on all of them, not a wait.
    granularity = {"side.weight": "row"} if rank == 1 else {"up.weight": "row"}
    with pytest.raises(ValueError, match=r"granularity: rank 0 has .*, rank 1 has"):
        torch_impl.fully_shard(model, granularity=granularity)
    assert type(torch_impl.fully_shard(model)) is not Wide


def plan_unlike(module: nn.Module) -> None:
    """Ranks whose planners disagree must not start to communicate by different plans."""
    from torch_impl import planned_groups

    original = planned_groups.plan_layout

    def another(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "max_buffers": 1})

    if dist.get_rank() == 1:
        planned_groups.plan_layout = another
    try:
        with pytest.raises(ValueError, match=r"layouts: rank 0 has \['[0-9a-f]{64}'\], rank 1 has"):
            torch_impl.fully_shard(module, align=1)
    finally:
        planned_groups.plan_layout = original


def test_ranks_with_unlike_layouts_are_refused(ranks: RankGroup) -> None:
    ranks.run(2, plan_unlike, Wide())
