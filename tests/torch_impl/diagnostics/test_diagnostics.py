"""Reports about a sharded model: each says what a program that looks at whole tensors would say."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_impl
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.toy import Block, Toy, batch, full_batch_loss, local_loss, mse, sharded_toy
from torch_impl.comm import collectives
from torch_impl.dtensor.local import local_of, local_pieces

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
# World, mesh shape, strategy: odd splits, and one replicated axis.
PLACED = [
    *((3, (3,), strategy) for strategy in STRATEGIES),
    (4, (2, 2), "hsdp"),
    (4, (2, 2), "hfsdp"),
]


def trained_once(shape: tuple[int, ...], strategy: str) -> tuple[nn.Module, nn.Module]:
    """A sharded model and its reference after one backward over all ranks' data."""
    mesh = init_device_mesh("cpu", shape)
    model, reference = sharded_toy(mesh=mesh, strategy=strategy), Toy()
    local_loss(model).backward()
    full_batch_loss(reference).backward()
    return model, reference


def norms(shape: tuple[int, ...], strategy: str) -> None:
    model, reference = trained_once(shape, strategy)
    model.get_parameter("head.bias").grad = None
    for norm_type in (2.0, 1.0, 3.0, math.inf):
        with torch_impl.count_collectives() as count:
            weights = torch_impl.parameter_norms(model, norm_type=norm_type)
        assert count.calls["all_reduce"] == {"no_shard": 0, "hfsdp": 2}.get(strategy, 1)
        assert sum(count.calls.values()) == count.calls["all_reduce"]
        gradients = torch_impl.parameter_norms(model, gradients=True, norm_type=norm_type)
        assert list(weights) == [name for name, _ in reference.named_parameters()]
        assert list(gradients) == [name for name in weights if name != "head.bias"]
        for name, param in reference.named_parameters():
            assert weights[name] == pytest.approx(param.detach().double().norm(norm_type).item(), rel=1e-12)
            if name in gradients:
                assert gradients[name] == pytest.approx(param.grad.double().norm(norm_type).item(), rel=1e-5)


@pytest.mark.parametrize(("world", "shape", "strategy"), PLACED)
def test_norms_are_those_of_whole_tensors_and_take_one_collective(
    ranks: RankGroup, world: int, shape: tuple[int, ...], strategy: str
) -> None:
    ranks.run(world, norms, shape, strategy)


class Odd(nn.Module):
    """Tensors without elements, of integers, of complex numbers and one that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.codes = nn.Parameter(torch.tensor([3, -4, 0]), requires_grad=False)
        self.plain = nn.Parameter(torch.tensor([1.0, 2.0, 2.0]))
        self.wide = nn.Parameter(torch.full((2, 3), 1e30))

    def forward(self) -> torch.Tensor:
        return (self.wide * self.plain).sum()


@on_ranks(2)
def test_norms_of_empty_integer_plain_and_large_tensors() -> None:
    module = Odd()
    torch_impl.fully_shard(module, ignored_params=[module.plain])
    expected = {"empty": 0.0, "codes": 5.0, "plain": 3.0, "wide": math.sqrt(6) * 1e30}
    assert torch_impl.parameter_norms(module) == pytest.approx(expected, rel=1e-6)
    assert torch_impl.parameter_norms(module, norm_type=math.inf)["empty"] == 0.0
    module.unshard()
    assert torch_impl.parameter_norms(module) == pytest.approx(expected, rel=1e-6)
    module.reshard()
    with pytest.raises(ValueError, match="norm_type: expected a positive number or inf, got 0"):
        torch_impl.parameter_norms(module, norm_type=0)
    module.set_requires_gradient_sync(False)
    module().backward()
    with pytest.raises(RuntimeError, match="wide: expected a reduced gradient"):
        torch_impl.parameter_norms(module, gradients=True)


@on_ranks(2)
def test_a_nan_on_any_rank_makes_the_norm_nan_on_all() -> None:
    for row in (0, 8):
        module = Toy()
        with torch.no_grad():
            module.embed.weight[row, 0] = float("nan")
        torch_impl.fully_shard(module)
        for norm_type in (2.0, math.inf):
            norms = torch_impl.parameter_norms(module, norm_type=norm_type)
            assert [name for name, norm in norms.items() if math.isnan(norm)] == ["embed.weight"]


def poison(tensor: torch.Tensor, index: tuple[int, ...], value: float) -> None:
    """Set one element of a sharded tensor, on the ranks that hold it."""
    boxes = torch_impl.dtensor.local.local_boxes(tensor)
    for box, piece in zip(boxes, local_pieces(tensor), strict=True):
        local = tuple(at - start for at, start in zip(index, box.offsets, strict=True))
        if all(0 <= at < size for at, size in zip(local, box.sizes, strict=True)):
            piece[local] = value


def nonfinite(shape: tuple[int, ...], strategy: str) -> list[torch_impl.NonFinite]:
    model, _ = trained_once(shape, strategy)
    assert torch_impl.find_nonfinite(model) == ()
    poison(model.get_parameter("blocks.1.up.weight"), (5, 2), math.nan)
    poison(model.get_parameter("blocks.1.up.weight"), (5, 4), math.inf)
    poison(model.get_parameter("blocks.1.up.weight"), (0, 0), math.nan)
    poison(model.get_parameter("blocks.0.stack").grad, (1, 2, 6), -math.inf)
    poison(model.get_parameter("blocks.0.gain").grad, (), math.nan)
    poison(model.get_parameter("blocks.0.up.bias").grad, (3,), math.nan)
    records = torch_impl.find_nonfinite(model)
    assert [(record.kind, record.name, record.nan, record.inf, record.rows) for record in records] == [
        ("gradient", "blocks.0.stack", 0, 1, ((1, 2),)),
        ("gradient", "blocks.0.gain", 1, 0, ((),)),
        ("gradient", "blocks.0.up.bias", 1, 0, ((3,),)),
        ("weight", "blocks.1.up.weight", 2, 1, ((0,), (5,))),
    ]
    assert torch_impl.find_nonfinite(model, weights=False) == records[:3]
    assert torch_impl.find_nonfinite(model, gradients=False) == records[3:]
    (first,) = torch_impl.find_nonfinite(model, gradients=False, max_rows=1)
    assert (first.nan, first.inf, first.rows) == (2, 1, ((0,),))
    holds = local_of(model.get_parameter("blocks.0.stack").grad).isinf().any().item()
    assert (dist.get_rank() in records[0].ranks) == holds
    assert str(records[3]).startswith("weight blocks.1.up.weight: 2 NaN, 1 infinite, rows [0], [5] (ranks ")
    return list(records)


@pytest.mark.parametrize(("world", "shape", "strategy"), PLACED)
def test_what_is_not_finite_is_reported_by_name_and_row_on_every_rank(
    ranks: RankGroup, world: int, shape: tuple[int, ...], strategy: str
) -> None:
    reports = ranks.run(world, nonfinite, shape, strategy)
    assert all(report == reports[0] for report in reports)
    copies = {"no_shard": world, "hsdp": 2}.get(strategy, 1)
    assert len(reports[0][0].ranks) == copies


def nonfinite_before_reduction() -> tuple[torch_impl.NonFinite, ...]:
    model = sharded_toy(strategy="optim_grads")
    model.set_requires_gradient_sync(False)
    tokens, targets = batch(0, dist.get_world_size(), 1)
    rank = dist.get_rank()
    if rank == 1:
        targets[1, 0, 2] = math.nan
    mse(model, tokens[rank], targets[rank]).backward()
    return torch_impl.find_nonfinite(model)


def test_before_reduction_the_rank_with_the_bad_data_is_named(ranks: RankGroup) -> None:
    reports = ranks.run(3, nonfinite_before_reduction)
    assert reports[0] == reports[1] == reports[2]
    assert {record.kind for record in reports[0]} == {"unreduced gradient"}
    assert {record.ranks for record in reports[0]} == {(1,)}
    assert "head.weight" in {record.name for record in reports[0]}


def nonfinite_outputs() -> list[str]:
    model = sharded_toy()
    hook = None
    if dist.get_rank() == 1:
        hook = model.blocks[1].down.register_forward_hook(lambda *args: args[-1] / 0)
    with torch_impl.watch_nonfinite_outputs(model) as records:
        local_loss(model).backward()
    before = list(records)
    if hook is not None:
        assert (before[0].kind, before[0].rows, before[0].ranks) == ("output", ((0,), (1,), (2,), (3,)), (1,))
    local_loss(model).backward()
    assert records == before
    return [record.name for record in records]


def test_the_first_output_that_is_not_finite_names_the_module_where_it_began(ranks: RankGroup) -> None:
    healthy, ill = ranks.run(2, nonfinite_outputs)
    assert healthy == []
    assert ill[0] == "blocks.1.down"
    assert ill[0] not in ill[1:]


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_shared_memory_is_found_and_a_healthy_step_has_none(strategy: str) -> None:
    model = sharded_toy(strategy=strategy)
    optimizer = torch_impl.MainWeightAdamW(model.parameters())
    tokens, targets = batch(0, dist.get_world_size(), 2)
    rank = dist.get_rank()
    model.set_is_last_backward(False)
    mse(model, tokens[rank, 0], targets[rank, 0]).backward()
    assert torch_impl.memory_overlaps(model, optimizer) == ()
    seen = []
    hook = model.blocks[0].register_full_backward_hook(
        lambda *_: seen.append(torch_impl.memory_overlaps(model, optimizer))
    )
    model.set_is_last_backward(True)
    mse(model, tokens[rank, 1], targets[rank, 1]).backward()
    hook.remove()
    assert seen == [()]
    optimizer.step()
    assert torch_impl.memory_overlaps(model, optimizer) == ()
    first, second = model.get_parameter("embed.weight"), model.get_parameter("blocks.0.stack")
    if strategy == "no_shard":
        first.grad = torch_impl.dtensor.tensor.wrap_like(first, local_of(second).view(-1)[1:6].expand(9, 5))
        (overlap,) = torch_impl.memory_overlaps(model)
        assert {overlap.first, overlap.second} == {"gradient embed.weight", "weight blocks.0.stack"}
        assert overlap.nbytes == 20
    state = optimizer.state[first]
    state["exp_avg"] = torch_impl.dtensor.tensor.wrap_like(first, local_of(state["exp_avg_sq"]))
    overlaps = [
        overlap for overlap in torch_impl.memory_overlaps(model, optimizer) if "exp_avg" in overlap.first
    ]
    numel = local_of(first).numel()
    labels = {"exp_avg of embed.weight", "exp_avg_sq of embed.weight"}
    assert [({overlap.first, overlap.second}, overlap.nbytes) for overlap in overlaps] == (
        [(labels, 4 * numel)] if numel else []
    )


def counts(strategy: str) -> dict[tuple[str, str], tuple[int, float]]:
    """Calls by unit and kind, and their bytes in buffers of the unit; elsewhere, bytes."""
    model = sharded_toy(strategy=strategy)
    with torch_impl.count_collectives(model) as count:
        local_loss(model).backward()
        torch_impl.parameter_norms(model)
    for collective, calls in count.calls.items():
        assert calls == sum(value for (_, of), value in count.calls_of.items() if of == collective)
    calls_and_bytes = {key: (calls, count.bytes_of[key]) for key, calls in count.calls_of.items()}
    local_loss(model).backward()
    torch_impl.fully_shard(Block())
    assert calls_and_bytes == {key: (calls, count.bytes_of[key]) for key, calls in count.calls_of.items()}
    text = str(count).splitlines()
    assert text[0].split() == ["unit", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    assert text[-1].split()[0] == "total"
    assert "(root)" in str(count)
    assert collectives.all_gather.__module__ == "torch_impl.comm.collectives"
    report = torch_impl.layout_report(model)
    sizes: dict[tuple[str, str], int] = {}
    for unit in report.units:
        (group,) = unit.groups
        # Gradients have a flag for each parameter and shard.
        gradients = 4 * (group.padded_numel + group.num_shards * len(group.parameters))
        sizes |= {(unit.name, "all_gather"): 4 * group.padded_numel}
        sizes |= {(unit.name, collective): gradients for collective in ("reduce_scatter", "all_reduce")}
    return {key: (calls, nbytes / sizes.get(key, 1)) for key, (calls, nbytes) in calls_and_bytes.items()}


UNITS = ("", "blocks.0", "blocks.1")


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("no_shard", {"all_reduce": 1}),
        ("optim", {"all_gather": 1, "reduce_scatter": 1}),
        ("optim_grads", {"all_gather": 1, "reduce_scatter": 1}),
        ("optim_grads_params", {"all_gather": 2, "reduce_scatter": 1}),
    ],
)
def test_collectives_are_counted_by_unit(ranks: RankGroup, strategy: str, expected: dict[str, int]) -> None:
    want = {(unit, collective): (n, float(n)) for unit in UNITS for collective, n in expected.items()}
    if strategy == "optim_grads_params":
        # The root keeps its weights for its backward.
        want["", "all_gather"] = (1, 1.0)
    if strategy != "no_shard":
        want["elsewhere", "all_reduce"] = (1, 8.0 * len(list(Toy().parameters())))
    for counted in ranks.run(2, counts, strategy):
        assert counted == want


@on_ranks(3)
def test_the_layout_report_lists_units_groups_and_what_is_not_sharded() -> None:
    model = Toy().to(torch.bfloat16)
    model.head.float()
    model.blocks[0].up.requires_grad_(False)
    policy = torch_impl.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    torch_impl.fully_shard(model.blocks[0], strategy="optim", mp_policy=policy, grad_divisor=5, align=16)
    torch_impl.fully_shard([model.blocks[1].up, model.blocks[1].down], reshard_after_forward=False)
    torch_impl.fully_shard(model, ignored_params=[model.head.bias])
    report = torch_impl.layout_report(model)
    assert [(unit.name, unit.module, len(unit.groups)) for unit in report.units] == [
        ("", "Toy", 2),
        ("blocks.0", "Block", 2),
        ("blocks.1.up+blocks.1.down", "Linear+Linear", 1),
    ]
    assert [unit.reshard_after_forward for unit in report.units] == [None, None, False]
    assert report.ignored == ("head.bias",)
    assert report.numel == sum(param.numel() for param in Toy().parameters()) - 1
    first, frozen = sorted(report.units[1].groups, key=lambda group: not group.trainable)
    assert (first.trainable, frozen.trainable, frozen.parameters) == (True, False, ("up.weight", "up.bias"))
    assert (first.main_dtype, first.compute_dtype, first.reduce_dtype, first.grad_dtype) == (
        "float32",
        "float16",
        "float32",
        "float32",
    )
    assert (first.strategy, first.divisor, first.mesh, first.num_shards) == ("optim", 5, (3,), 3)
    for unit in report.units:
        for group in unit.groups:
            assert group.padded_numel == group.num_shards * sum(group.shard_sizes) >= group.numel
            assert group.padding == group.padded_numel / group.numel - 1
            assert all(size % group.align == 0 for size in group.shard_sizes)
    assert {group.align for group in report.units[1].groups} == {16}
    assert json.loads(json.dumps(report.as_dict()))["units"][1]["groups"][0]["strategy"] == "optim"
    lines = str(report).splitlines()
    assert len(lines) == 8
    assert lines[0].split()[:2] == ["unit", "module"]
    assert [line.split()[-3] for line in lines[3:5]] == ["16", "16"]
    assert "blocks.0" in lines[3] + lines[4]
    assert "float32/float16/float32/float32" in str(report)
    assert lines[-2].split()[:3] == ["total", "12", f"{report.numel:,}"]
    assert lines[-1] == "not sharded: head.bias"
    assert dataclasses.is_dataclass(report)
    empty = torch_impl.fully_shard(nn.Sequential(nn.Tanh()))
    assert torch_impl.layout_report(empty).numel == 0
    assert "(root)" in str(torch_impl.layout_report(empty))
