"""Weights sent as float8: quantized, gathered as bytes, dequantized into compute weights.

``bridge.core.sharding.policy.float8`` defines the formats and the position of a shard's bytes; this
module produces exactly the bits that it defines.

    main shard --float32, quantize--> piece: payload | scales
    piece --all-gather, one axis per step--> pieces of all shards, in their order
    pieces --dequantize--> compute weights: payload cast, multiplied by powers of two

One scale per tensor requires the largest magnitude on all ranks first. The magnitudes are reduced with the first gather
after a change of the main weights. Every strategy computes with the dequantized weights, even if nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from bridge.core.sharding.policy import float8
from bridge.core.sharding.policy.strategy import Strategy
from bridge.core.sharding.policy.strategy_collectives import collectives_of, keeps_shard
from torch_impl.comm import collectives
from torch_impl.comm.collectives import Work
from torch_impl.comm.streams import Step
from torch_impl.runtime.ground.buffer import ShardLevels, lane_of
from torch_impl.runtime.ground.host_memory import fetch
from torch_impl.runtime.ground.tensor_parallel import TensorParallel

_PAYLOAD = torch.float8_e4m3fn
_LARGEST = torch.finfo(_PAYLOAD).max
_SMALLEST_NORMAL = torch.finfo(torch.float32).smallest_normal
# The temporary memory of quantization is a multiple of this many elements.
_CHUNK = 1 << 22


class _OwnRows(NamedTuple):
    """Rows of a parameter in this rank's shard, from ``start``; scales from byte ``scales``."""

    number: int
    start: int
    rows: int
    row_size: int
    scales: int


class _Chunk(NamedTuple):
    """Some of these rows: float32 rows, payload, and bytes of scales (none if there is one scale)."""

    number: int
    rows: torch.Tensor
    payload: torch.Tensor
    scales: torch.Tensor


class QuantizedGather:
    """Weights of ``levels``, all of two dimensions or more, in the format ``gather``.

    ``tensor_parallel``: the placement of each parameter on further mesh axes. A scale of a whole
    tensor covers all its parts there; rows, and their blocks, belong to this rank's part.
    ``fetches``: main weights are on the host, and are copied to ``device`` to be quantized.
    """

    def __init__(
        self,
        levels: ShardLevels,
        strategy: Strategy,
        gather: str,
        device: torch.device,
        tensor_parallel: Sequence[TensorParallel | None],
        fetches: bool = False,
    ) -> None:
        self._levels, self._strategy, self._blocks = levels, strategy, gather == "mxfp8"
        self._device, self._fetches = device, fetches
        self._layout = levels.layouts[strategy.optimizer]
        self._piece = float8.piece_bytes(self._layout, gather)
        # All tensors are treated as one with 32 columns, padding included.
        self._alike = self._blocks and float8.in_blocks(self._layout)
        self._own = self._own_rows(levels.mesh.index(strategy.optimizer) if strategy.optimizer else 0)
        self._runs = self._scale_runs() if self._blocks and not self._alike else []
        # E8M0, by parameter; valid once ``steps`` after a change of main weights are done.
        self._tensor_scales = torch.zeros(len(self._layout.slots), dtype=torch.uint8, device=device)
        self._other_groups = [] if self._blocks else _groups_of(tensor_parallel)
        self.resident: torch.Tensor | None = None
        if keeps_shard(strategy):
            self.resident = torch.zeros(self._bytes(strategy.parameters), dtype=torch.uint8, device=device)

    def _bytes(self, level: int) -> int:
        """The size in bytes of the pieces that form a shard of a level."""
        return self._piece * (self._layout.num_shards // self._levels.mesh.shards(level))

    def steps(self, main: torch.Tensor, target: torch.Tensor, current: bool) -> list[Step]:
        """See ``WeightGather``."""
        transfers, steps = collectives_of(self._strategy, self._levels.axes), list[Step]()
        axes = (*transfers.gathered_once, *transfers.gathered)
        if self.resident is not None and current:
            axes, source = (*transfers.gathered,), self.resident
        else:
            source = torch.zeros(self._piece, dtype=torch.uint8, device=self._device)
            if self._fetches:
                steps, main = fetch(main, main.dtype, self._device)
            steps += self._quantize_steps(main, source, current)
        for level in axes:
            output = self.resident if level == self._strategy.parameters else None
            if output is None:
                output = source.new_empty(self._bytes(level))
            steps.append((lane_of(level), partial(self._gather, level, output, source)))
            source = output
        steps.append(("gather", partial(self._dequantize, source, target)))
        return steps

    def _gather(self, axis: int, output: torch.Tensor, source: torch.Tensor, async_op: bool) -> Work | None:
        mesh = self._levels.mesh
        if mesh.sizes[axis] == 1:
            output.copy_(source)
            return None
        return collectives.all_gather([output], [source], mesh.groups[axis], async_op)

    def _quantize_steps(self, main: torch.Tensor, piece: torch.Tensor, current: bool) -> list[Step]:
        """The steps after which ``piece`` holds the bytes of ``main``."""
        if self._blocks:
            return self._when_fetched(partial(self._quantize_blocks, main, piece))
        if current:
            return self._when_fetched(partial(self._quantize_tensors, main, piece))
        amax = main.new_zeros(len(self._layout.slots), dtype=torch.float32)
        first = self._when_fetched(partial(self._find_largest, main, piece, amax))
        mesh, axes = self._levels.mesh, range(self._strategy.optimizer)
        groups = [(lane_of(axis), mesh.groups[axis]) for axis in axes if mesh.sizes[axis] > 1]
        groups += [("gather", group) for group in self._other_groups]
        steps: list[Step] = [
            (lane, partial(collectives.all_reduce, amax, group, dist.ReduceOp.MAX)) for lane, group in groups
        ]
        return [
            *first,
            *steps,
            ("gather", partial(self._set_tensor_scales, amax)),
            ("gather", partial(self._quantize_tensors, main, piece)),
        ]

    def _when_fetched(self, work: Callable[[bool], None]) -> list[Step]:
        """``work`` as a step after the fetch of main weights; runs at once if nothing is fetched."""
        if self._fetches:
            return [("gather", work)]
        work(False)
        return []

    def _quantize_blocks(self, main: torch.Tensor, piece: torch.Tensor, async_op: bool) -> None:
        for chunk in self._chunks(main, piece):
            _quantize_rows(chunk)

    def _find_largest(
        self, main: torch.Tensor, piece: torch.Tensor, amax: torch.Tensor, async_op: bool
    ) -> None:
        for chunk in self._chunks(main, piece):
            amax[chunk.number].clamp_min_(magnitudes_of(chunk.rows).max())

    def _set_tensor_scales(self, amax: torch.Tensor, async_op: bool) -> None:
        self._tensor_scales.copy_(scales_of(amax))

    def _quantize_tensors(self, main: torch.Tensor, piece: torch.Tensor, async_op: bool) -> None:
        for chunk in self._chunks(main, piece):
            scaled = _flushed(chunk.rows, magnitudes_of(chunk.rows))
            scaled.mul_(inverse_of(self._tensor_scales[chunk.number]))
            _to_payload(chunk, scaled)

    def _dequantize(self, pieces: torch.Tensor, target: torch.Tensor, async_op: bool) -> None:
        shards, size = self._layout.num_shards, self._layout.shard_size
        by_shard = pieces.view(shards, self._piece)
        # float16 may not represent a power of two although it represents its product with the payload.
        dtype = torch.float32 if target.dtype == torch.float16 else target.dtype
        for part in self._layout.shard_slices:
            whole = target[shards * part.start : shards * part.stop].view(shards, -1)
            whole.copy_(by_shard[:, part].view(_PAYLOAD))
            if self._alike:
                first, stop = size + part.start // float8.BLOCK, size + part.stop // float8.BLOCK
                _multiply_blocks(whole, powers_of(by_shard[:, first:stop]).to(dtype))
        if not self._alike:
            self._multiply_tensors(pieces, target, dtype)

    def _multiply_tensors(self, pieces: torch.Tensor, target: torch.Tensor, dtype: torch.dtype) -> None:
        tensor_powers = powers_of(self._tensor_scales).to(dtype)
        for number, slot in enumerate(self._layout.slots):
            if not slot.numel:
                continue
            start = self._layout.start(slot.name)
            rows = target[start : start + slot.numel].view(slot.num_rows, slot.row_size)
            if self._blocks:
                runs = [pieces[first:stop] for first, stop in self._runs[number]]
                _multiply_blocks(rows, powers_of(torch.cat(runs)).to(dtype).view(slot.num_rows, -1))
            else:
                rows.mul_(tensor_powers[number].view(1, 1))

    def _chunks(self, main: torch.Tensor, piece: torch.Tensor) -> Iterator[_Chunk]:
        shard, blocks_at = piece[: main.numel()].view(_PAYLOAD), main.numel()
        for own in self._own:
            many, size = max(1, _CHUNK // own.row_size), own.row_size
            blocks = float8.blocks_of(size) if self._blocks else 0
            for first in range(0, own.rows, many):
                count = min(many, own.rows - first)
                a, b = own.start + first * size, own.start + (first + count) * size
                scales = blocks_at + own.scales + first * blocks
                yield _Chunk(
                    own.number,
                    main[a:b].view(count, size).float(),
                    shard[a:b].view(count, size),
                    piece[scales : scales + count * blocks].view(count, blocks),
                )

    def _own_rows(self, rank: int) -> list[_OwnRows]:
        slots = self._layout.slots
        if self._alike:
            return [_OwnRows(0, 0, self._layout.shard_size // float8.BLOCK, float8.BLOCK, 0)]
        return [
            _OwnRows(
                part.number,
                self._layout.shard_start(slots[part.number].name, rank),
                part.rows,
                slots[part.number].row_size,
                part.start,
            )
            for part in float8.scale_parts(self._layout, rank)
        ]

    def _scale_runs(self) -> list[list[tuple[int, int]]]:
        """By parameter, in the order of rows, the bytes ``[first, stop)`` of the pieces that contain scales."""
        runs: list[list[tuple[int, int]]] = [[] for _ in self._layout.slots]
        for rank in range(self._layout.num_shards):
            begin = rank * self._piece + self._layout.shard_size
            for part in float8.scale_parts(self._layout, rank):
                first = begin + part.start
                runs[part.number].append((first, first + part.rows * part.blocks))
        return runs


def _groups_of(tensor_parallel: Sequence[TensorParallel | None]) -> list[dist.ProcessGroup]:
    """The groups of ranks that hold other parts of some parameter."""
    meshes = dict.fromkeys(
        placed.mesh for placed in tensor_parallel if placed is not None and placed.placements
    )
    return [mesh.get_group(axis) for mesh in meshes for axis in range(mesh.ndim) if mesh.size(axis) > 1]


def _to_payload(chunk: _Chunk, scaled: torch.Tensor) -> None:
    # The cast of some devices and versions of torch turns too large values into NaN.
    chunk.payload.copy_(scaled.clamp_(-_LARGEST, _LARGEST))


def _quantize_rows(chunk: _Chunk) -> None:
    magnitudes = magnitudes_of(chunk.rows)
    whole, rest = _in_blocks(magnitudes)
    amax = [part.amax(-1) for part in (whole, rest) if part.numel()]
    chunk.scales.copy_(scales_of(torch.cat(amax, 1)))
    scaled = _flushed(chunk.rows, magnitudes)
    _multiply_blocks(scaled, inverse_of(chunk.scales))
    _to_payload(chunk, scaled)


def magnitudes_of(rows: torch.Tensor) -> torch.Tensor:
    """Magnitudes of float32 values, 0 for NaN."""
    return rows.abs().nan_to_num_(nan=0.0, posinf=torch.inf)


def _flushed(rows: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """A copy in which subnormal numbers are zeros of the same sign; NaN times 0 stays NaN."""
    return rows.mul(magnitudes >= _SMALLEST_NORMAL)


def _in_blocks(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of whole blocks ``(rows, blocks, 32)``, and of the rest ``(rows, 0 or 1, size)``."""
    size = rows.shape[1]
    whole = size - size % float8.BLOCK
    blocks = rows[:, :whole].unflatten(1, (whole // float8.BLOCK, float8.BLOCK))
    return blocks, rows[:, whole:].unflatten(1, (int(whole < size), size - whole))


def _multiply_blocks(rows: torch.Tensor, powers: torch.Tensor) -> None:
    """In place, block by block; ``powers``: ``(rows, blocks)``."""
    whole, rest = _in_blocks(rows)
    blocks = whole.shape[1]
    whole.mul_(powers[:, :blocks, None])
    rest.mul_(powers[:, blocks:, None])


def scales_of(amax: torch.Tensor, power_of_largest: int = 8) -> torch.Tensor:
    """E8M0 bytes, exponent + 127, for magnitudes: for formats whose largest number is 1.75 times a power of two."""
    exponents = amax.view(torch.int32).add(0x1FFFFF).bitwise_right_shift_(23).sub_(power_of_largest)
    return exponents.clamp_min_(0).to(torch.uint8)


def powers_of(scales: torch.Tensor) -> torch.Tensor:
    """E8M0 as float32; the smallest scale, 2^-127, is a subnormal number."""
    return scales.int().bitwise_left_shift_(23).clamp_min_(1 << 22).view(torch.float32)


def inverse_of(scales: torch.Tensor) -> torch.Tensor:
    """``2 ** (127 - scale)``, which is a normal float32 for the scales of all float32 numbers."""
    return scales.int().neg_().add_(254).bitwise_left_shift_(23).view(torch.float32)
