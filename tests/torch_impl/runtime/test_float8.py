"""Weights gathered as float8: the bytes that travel, how many they are, and the numbers that they become.

Whole tensors are quantized by NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import torch_impl
from bridge.core.sharding import plan_layout, strategy_named
from bridge.core.sharding.policy import float8
from tests.support.ranks import RankGroup, on_ranks
from tests.support.torch_impl.quantized import (
    EVEN_SHAPES,
    GATHERS,
    SHAPES,
    Wide,
    expected_pieces,
    policy,
    quantized,
)
from tests.support.torch_impl.toy import sharded_toy, whole
from torch_impl.runtime.gather import float8 as runtime_float8
from torch_impl.runtime.gather.float8 import QuantizedGather
from torch_impl.runtime.ground.buffer import ShardLevels

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


@contextmanager
def gathered_pieces() -> Iterator[list[tuple[QuantizedGather, torch.Tensor]]]:
    """What has arrived whenever weights are dequantized."""
    seen: list[tuple[QuantizedGather, torch.Tensor]] = []
    original = QuantizedGather._dequantize

    def spy(self: QuantizedGather, pieces: torch.Tensor, target: torch.Tensor, async_op: bool) -> None:
        seen.append((self, pieces.clone()))
        original(self, pieces, target, async_op)

    QuantizedGather._dequantize = spy  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        QuantizedGather._dequantize = original  # type: ignore[method-assign]


def travels(
    mesh_shape: tuple[int, ...], gather: str, shapes: dict[str, tuple[int, ...]], options: dict[str, Any]
) -> list[int]:
    mesh = init_device_mesh("cpu", mesh_shape)
    values = {name: param.detach().clone() for name, param in Wide(shapes=shapes).named_parameters()}
    model = torch_impl.fully_shard(Wide(shapes=shapes), mesh=mesh, mp_policy=policy(gather), **options)
    (group, _) = model._unit.groups
    with gathered_pieces() as seen:
        model(torch.tensor(1.0)).backward()
        # Of other weights, which forget what was kept.
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(-1.7)
        model(torch.tensor(1.0)).backward()
    later = {name: value * -1.7 for name, value in values.items()}
    for index in (0, -1):
        wanted = expected_pieces(group.layout, (values, later)[index], gather)
        np.testing.assert_array_equal(seen[index][1].view(wanted.shape).numpy(), wanted)
    for name, value in later.items():
        assert torch.equal(model.seen[name], quantized(value, gather)), name
    return [group.layout.num_shards, len(seen)]


@pytest.mark.each_value
@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("granularity", ["row", "block(32)"])
@pytest.mark.parametrize("shapes", [SHAPES, EVEN_SHAPES], ids=["odd", "even"])
def test_bytes_that_travel_are_those_of_whole_tensors(
    ranks: RankGroup, gather: str, granularity: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    for world in (1, 2, 3, 4):
        for align in (1, "auto"):
            options = {"granularity": granularity, "align": align}
            # The root keeps its weights from forward to backward.
            assert ranks.run(world, travels, (world,), gather, shapes, options) == [[world, 2]] * world
    options = {"granularity": granularity, "strategy": "hfsdp", "align": 1}
    assert ranks.run(4, travels, (2, 2), gather, shapes, options) == [[4, 2]] * 4


@pytest.mark.fast_cases("mxfp8-no_shard", "mxfp8-optim_grads_params", "mxfp8-hfsdp", "float8_e4m3fn-optim")
@pytest.mark.parametrize("strategy", [*STRATEGIES, "hsdp", "hfsdp"])
@pytest.mark.parametrize("gather", GATHERS)
def test_all_strategies_compute_with_the_same_weights(ranks: RankGroup, gather: str, strategy: str) -> None:
    ranks.run(4, computes_with, (2, 2), gather, strategy)


def computes_with(mesh_shape: tuple[int, ...], gather: str, strategy: str) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for dtype in (torch.float32, torch.bfloat16):
        for compute in (torch.float32, torch.bfloat16, torch.float16):
            values = {name: param.detach().clone() for name, param in Wide(dtype).named_parameters()}
            options = {"mp_policy": policy(gather, param_dtype=compute), "strategy": strategy}
            model = torch_impl.fully_shard(Wide(dtype), mesh=mesh, **options)
            model(torch.tensor(1.0)).backward()
            for name, value in values.items():
                assert torch.equal(model.seen[name], quantized(value, gather).to(compute)), name
                assert torch.equal(whole(model.get_parameter(name)), value.float()), name


class _Rank:
    """One of several ranks of a mesh that is not there."""

    def __init__(self, shards: int, rank: int) -> None:
        self.ndim, self.sizes, self._rank = 1, (shards,), rank

    def shards(self, level: int) -> int:
        return self.sizes[0] if level else 1

    def index(self, level: int) -> int:
        return self._rank if level else 0


@pytest.mark.each_value
@pytest.mark.parametrize("granularity", ["row", "block(32)"])
@pytest.mark.parametrize("shards", [5, 8])
@pytest.mark.parametrize("shapes", [SHAPES, EVEN_SHAPES], ids=["odd", "even"])
def test_more_shards_than_processes(
    shards: int, granularity: str, shapes: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A few rows at a time.
    monkeypatch.setattr(runtime_float8, "_CHUNK", 70)
    layout = plan_layout(shapes, shards, granularity=granularity, align=1 if shapes is SHAPES else 32)
    values = {
        name: param.detach() for name, param in Wide(shapes=shapes).named_parameters() if name in shapes
    }
    assert float8.in_blocks(layout) == (shapes is EVEN_SHAPES)
    whole_pieces = expected_pieces(layout, values, "mxfp8")
    for rank in range(shards):
        levels: Any = ShardLevels(layout, _Rank(shards, rank), 1)  # type: ignore[arg-type]
        main = levels.buffer(1, torch.float32, torch.device("cpu"))
        for slot in layout.slots:
            r0, r1 = layout.row_range(slot.name, rank)
            main.view(slot.name).copy_(values[slot.name].reshape(-1, slot.row_size)[r0:r1])
        gather = QuantizedGather(
            levels, strategy_named("optim_grads_params"), "mxfp8", torch.device("cpu"), []
        )
        piece = torch.zeros(whole_pieces.shape[1], dtype=torch.uint8)
        assert gather._quantize_steps(main.flat, piece, current=False) == []
        np.testing.assert_array_equal(piece.numpy(), whole_pieces[rank])
        target = torch.full((layout.padded_size,), 7.0)
        gather._dequantize(torch.from_numpy(whole_pieces.copy()).view(-1), target, False)
        for slot in layout.slots:
            start = layout.start(slot.name)
            unpacked = target[start : start + slot.numel].view(slot.shape)
            assert torch.equal(unpacked, quantized(values[slot.name], "mxfp8")), slot.name


def test_bytes_are_those_of_numpy_for_every_exponent_and_for_values_that_are_no_numbers() -> None:
    bits = np.arange(0, 2**32, 65521, dtype=np.uint32)
    special = np.array(
        [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 1, 0x80000001, 0x007FFFFF]
    )
    values = np.concatenate([bits, np.tile(special, 100).astype(np.uint32)])
    random = np.random.default_rng(3)
    # Sorted by magnitude, so that blocks have the same scale, and shuffled.
    ordered = values[np.argsort(values & 0x7FFFFFFF)]
    for ordering in (ordered, random.permutation(values)):
        rows = torch.from_numpy(ordering[: ordering.size // 95 * 95].view(np.float32).reshape(-1, 95).copy())
        for gather in GATHERS:
            with torch.no_grad():
                assert_same_bytes(rows, gather)


def assert_same_bytes(rows: torch.Tensor, gather: str) -> None:
    """Those of a group of one tensor on one rank."""
    layout = plan_layout({"w": tuple(rows.shape)}, 1, align=1)
    levels: Any = ShardLevels(layout, _Rank(1, 0), 0)  # type: ignore[arg-type]
    made = QuantizedGather(levels, strategy_named("no_shard"), gather, torch.device("cpu"), [])
    main, target = rows.reshape(-1).clone(), torch.zeros(rows.numel())
    with gathered_pieces() as seen:
        for _, step in made.steps(main, target, current=False):
            step(False)
    wanted = expected_pieces(layout, {"w": rows}, gather)
    np.testing.assert_array_equal(seen[0][1].numpy(), wanted.ravel())
    np.testing.assert_array_equal(target.view(rows.shape).numpy(), quantized(rows, gather).numpy())


class Matrix(nn.Module):
    """A matrix of 256 x 512 and a bias, in two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(512, 256) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x).square().mean() for layer in self.layers), torch.zeros(()))


def carried(gather: str | None, compute: torch.dtype, strategy: str, mesh_shape: tuple[int, ...]) -> Any:
    mesh = init_device_mesh("cpu", mesh_shape)
    chosen = torch_impl.MixedPrecisionPolicy(param_dtype=compute, gather_dtype=gather)
    model = Matrix()
    for layer in model.layers:
        torch_impl.fully_shard(layer, mesh=mesh, strategy=strategy, mp_policy=chosen, align=64)
    torch_impl.fully_shard(model, mesh=mesh, strategy=strategy, mp_policy=chosen)
    optimizer = torch_impl.MainWeightAdamW(model.parameters())
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).backward()
    optimizer.step()
    with torch_impl.count_collectives(model) as count:
        for k in range(2):
            model.set_is_last_backward(k == 1)
            model(x).backward()
    report = torch_impl.layout_report(model)
    shown = [group.gather_bytes for unit in report.units for group in unit.groups]
    model.reshard()
    held = model.memory_report(optimizer).compute_weights
    names = ("all_gather", "all_reduce")
    return {name: (count.calls[name], count.nbytes[name]) for name in names}, shown, held, str(report)


def test_a_gather_takes_one_byte_an_element_and_a_thirty_second(ranks: RankGroup) -> None:
    numel, bias = 256 * 512, 256
    for gather, ratio in ((None, 2), ("mxfp8", 1 + 1 / 32), ("float8_e4m3fn", 1)):
        for counts, shown, _, text in ranks.run(
            2, carried, gather, torch.bfloat16, "optim_grads_params", (2,)
        ):
            size = int(numel * ratio)
            groups = 1 if gather is None else 2
            # Two layers, two microbatches, forward and backward.
            assert counts["all_gather"] == (8 * groups, 8 * (size + 2 * bias))
            assert sum(shown) == 2 * (size + 2 * bias)
            # Of weights that the optimizer has changed, once.
            assert counts["all_reduce"] == ((2, 8) if gather == "float8_e4m3fn" else (0, 0))
            assert (f"gathered as {gather}" in text) == (gather is not None)


def test_float32_weights_travel_in_a_quarter_of_the_bytes(ranks: RankGroup) -> None:
    sizes = {}
    for gather in (None, "mxfp8", "float8_e4m3fn"):
        ((counts, *_), *_) = ranks.run(2, carried, gather, torch.float32, "optim_grads_params", (2,))
        sizes[gather] = counts["all_gather"][1] - 8 * 4 * 256
    assert sizes[None] == 8 * 4 * 256 * 512
    assert sizes["mxfp8"] * 32 == 33 * 8 * 256 * 512
    assert sizes["float8_e4m3fn"] == 8 * 256 * 512


def test_hfsdp_keeps_payload_and_gathers_the_outer_axis_once_a_step(ranks: RankGroup) -> None:
    numel, bias = 256 * 512, 256
    for gather, ratio in (("mxfp8", 1 + 1 / 32), ("float8_e4m3fn", 1)):
        for counts, _, held, _ in ranks.run(4, carried, gather, torch.bfloat16, "hfsdp", (2, 2)):
            size = int(numel * ratio) + 2 * bias
            assert held == 2 * size // 2
            # Inner axis: whole weights, four times; outer axis: half of them, once.
            assert counts["all_gather"] == (2 * 2 * 5, 2 * (4 * size + size // 2))
            assert counts["all_reduce"] == ((4, 16) if gather == "float8_e4m3fn" else (0, 0))


@pytest.mark.parametrize("gather", GATHERS)
@on_ranks(2)
def test_nan_and_infinity_stay_where_they_are(gather: str) -> None:
    model = sharded_toy(mp_policy=policy(gather))
    values = {name: whole(param) for name, param in model.named_parameters()}
    special = {"blocks.0.up.weight": torch.nan, "blocks.0.stack": torch.inf, "blocks.1.stack": -torch.inf}
    for name, value in special.items():
        values[name].view(-1)[3] = value
    model.load_state_dict(values)
    model.unshard()
    model.blocks[0].unshard()
    model.blocks[1].unshard()
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            param.detach(), quantized(values[name], gather), rtol=0, atol=0, equal_nan=True
        )
        assert torch.equal(param.isfinite(), values[name].isfinite()), name


def refused(dtype: torch.dtype) -> str:
    before = Wide(dtype)
    with pytest.raises(ValueError, match="expected weights of float32") as caught:
        torch_impl.fully_shard(before, mp_policy=policy("mxfp8"))
    assert type(before) is Wide
    return str(caught.value)


def test_what_cannot_be_quantized_is_refused(ranks: RankGroup) -> None:
    for message in ranks.run(2, refused, torch.float64):
        assert message == (
            "experts: expected weights of float32, bfloat16 or float16 with gather_dtype='mxfp8', which quantizes "
            "float32 main weights, got torch.float64"
        )
    for wrong in ("fp8", torch.bfloat16, torch.float8_e5m2, 8):
        with pytest.raises(
            ValueError, match=r"gather_dtype: expected \"mxfp8\", torch.float8_e4m3fn or None, got"
        ):
            torch_impl.MixedPrecisionPolicy(gather_dtype=wrong)  # type: ignore[arg-type]
    for name in ("param_dtype", "reduce_dtype", "grad_dtype"):
        with pytest.raises(
            ValueError, match=f"{name}: expected a dtype of two or more bytes, got torch.float8"
        ):
            torch_impl.MixedPrecisionPolicy(**{name: torch.float8_e4m3fn})
    assert torch_impl.MixedPrecisionPolicy(gather_dtype="float8_e4m3fn").gather == "float8_e4m3fn"


@on_ranks(2)
def test_integers_are_not_quantized() -> None:
    """Integers are never quantized, and keep their bits."""
    model = nn.Module()
    model.table = nn.Parameter(torch.arange(12, dtype=torch.int64).view(3, 4), requires_grad=False)
    model.weight = nn.Parameter(torch.randn(4, 40, generator=torch.Generator().manual_seed(0)))
    weight = model.weight.detach().clone()
    model.forward = lambda: None
    torch_impl.fully_shard(model, mp_policy=policy("mxfp8"))
    model.unshard()
    assert torch.equal(model.table, torch.arange(12).view(3, 4))
    assert torch.equal(model.weight.detach(), quantized(weight, "mxfp8"))
