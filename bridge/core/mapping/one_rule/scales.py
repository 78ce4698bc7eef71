"""Scales of moments under other axes, so that payload and scales are carried bit for bit.

An optimizer that stores moments in float8 or float16 has one scale for each row of its tensor. A rule moves the
elements of the tensor, and a row on one side may be a column on the other. Scales therefore follow their elements: in
the target, they extend along the axes that the source's rows have there, and the other axes have size one::

    torch   wq.exp_avg        (h d) m     (320, 331)         jax   query/kernel in mu          m h d     (331, 8, 40)
            wq.exp_avg_scale  (h d) 1     (320, 1)                 query/kernel in mu_scale    1 h d     (1, 8, 40)

Nothing is decoded and re-encoded, which would round. A run that continues from such scales decodes the moments, with
`bridge.core.formats.tensors.scaled`, and encodes them for its own rows (``load_checkpoint(..., moments="convert")``).

If a tensor axis is composite, and the scales have only its slower factors, consecutive elements share a scale: for a
JAX kernel ``m h d`` with a scale for each (m, h), the scales in torch, ``(h d) m``, have shape ``(h, m)``, one for d
rows. For ``(gate + up) m`` they have shape ``(2, m)``. If such elements are not consecutive, scales are repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bridge.core.formats.tensors.base import Box, CheckpointReader, TensorInfo
from bridge.core.formats.tensors.scaled import decode, run_lengths, scale_box
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.expression import Affine, Alternative
from bridge.core.mapping.language.operations import ChangedView
from bridge.core.mapping.language.relation import Block, TensorView


def scale_view(
    moment: TensorView, shapes: Mapping[str, Sequence[int]], scales: Mapping[str, TensorInfo]
) -> TensorView:
    """The scales of a target's moment. shapes, scales: for the sources of ``moment``, by name.

    The view has one block for each block of ``moment``, in the same order. Raises MappingError for scales that do not
    fit their tensor.
    """
    sources = [_source(block, shapes[block.source], scales[block.source]) for block in moment.blocks]
    dtypes = {scales[block.source].dtype.name for block in moment.blocks}
    if len(dtypes) > 1:
        raise MappingError(f"expected one dtype of scales, got {', '.join(sorted(dtypes))}")
    targets = [
        _Scaled(block.target_index, block.sizes, kept)
        for block, (_, kept) in zip(moment.blocks, sources, strict=True)
    ]
    runs = [_run(axis, size, targets) for axis, size in enumerate(moment.shape)]
    blocks = tuple(
        _target(block, scales[block.source].name, index, kept, runs)
        for block, (index, kept) in zip(moment.blocks, sources, strict=True)
    )
    first = scales[moment.blocks[0].source]
    shape = tuple(size // run for size, run in zip(moment.shape, runs, strict=True))
    return TensorView(shape, first.dtype, blocks)


@dataclass(frozen=True)
class _Scaled:
    """A block's place in the target. kept: the axes along which its scales differ."""

    index: Alternative
    sizes: Mapping[str, int]
    kept: frozenset[str]


def _source(block: Block, shape: Sequence[int], scale: TensorInfo) -> tuple[Alternative, frozenset[str]]:
    """The place of a block's scales in the source, and the axes along which they differ."""
    runs = run_lengths(shape, scale.shape)
    if runs is None:
        raise MappingError(
            f"expected scales for {block.source} with sizes that divide its shape {tuple(shape)}, got shape "
            f"{scale.shape} in {scale.name}"
        )
    index: list[Affine] = []
    kept: set[str] = set()
    for dim, run in zip(block.source_index, runs, strict=True):
        slow, fast = _cut(dim, block.sizes, run)
        if dim.offset % run + _span(fast, block.sizes) >= run:
            raise MappingError(
                f"expected scales for {block.source} that each cover a whole axis, got {scale.name} of shape "
                f"{scale.shape}, where each covers {run} elements of an axis of size {shape[len(index)]}"
            )
        kept.update(axis for axis, _ in slow)
        index.append(Affine(dim.offset // run, tuple((axis, stride // run) for axis, stride in slow)))
    return tuple(index), frozenset(kept)


View = TensorView | ChangedView
Terms = Sequence[tuple[str, int]]


def _cut(dim: Affine, sizes: Mapping[str, int], run: int) -> tuple[Terms, Terms]:
    """The terms that step over whole runs, and the terms that step inside a run. Axes of size one do neither."""
    terms = [term for term in dim.terms if sizes[term[0]] > 1]
    slow = [term for term in terms if term[1] % run == 0]
    return slow, [term for term in terms if term[1] % run]


def _span(terms: Terms, sizes: Mapping[str, int]) -> int:
    return sum(stride * (sizes[axis] - 1) for axis, stride in terms)


def _run(axis: int, size: int, targets: Sequence[_Scaled]) -> int:
    """The most elements along a target axis that can share a scale, in all blocks."""
    common = size
    for target in targets:
        dim = target.index[axis]
        common = math.gcd(common, dim.offset)
        for name, stride in dim.terms:
            if name in target.kept:
                common = math.gcd(common, stride)
    return next(run for run in _divisors(common) if all(_whole(t.index[axis], t.sizes, run) for t in targets))


def _whole(dim: Affine, sizes: Mapping[str, int], run: int) -> bool:
    """Whether the fast terms stay inside a run, so that no run has elements with two scales."""
    return _span(_cut(dim, sizes, run)[1], sizes) < run


def _divisors(number: int) -> Iterator[int]:
    """The largest first."""
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    yield from (number // k for k in small)
    yield from (k for k in reversed(small) if k * k != number)


def _target(
    block: Block, source: str, index: Alternative, kept: frozenset[str], runs: Sequence[int]
) -> Block:
    dims, axes = [], set(kept)
    for dim, run in zip(block.target_index, runs, strict=True):
        slow, _ = _cut(dim, block.sizes, run)
        # A target axis along which the source has one scale: the scale is repeated.
        axes.update(axis for axis, _ in slow)
        dims.append(Affine(dim.offset // run, tuple((axis, stride // run) for axis, stride in slow)))
    sizes = {axis: size for axis, size in block.sizes.items() if axis in axes}
    return Block(source, index, tuple(dims), sizes)


def of_whole_rows(view: View, reader: CheckpointReader) -> View:
    """The same scales, one for each row of the target, if the scales along a row are equal; else ``view`` itself.

    Rows that were cut into several tensors and are joined again have equal scales in each tensor.
    """
    last = len(view.shape) - 1
    kept = {axis for block in view.blocks for dim in block.source_index for axis, _ in dim.terms}
    if view.shape[last] == 1 or any(
        a in kept for block in view.blocks for a, _ in block.target_index[last].terms
    ):
        return view
    values = view.read(reader, Box.whole(view.shape)).astype(np.float32)
    bits = values.view(np.uint32)
    if not np.array_equal(bits, np.broadcast_to(bits[..., :1], bits.shape)):
        return view
    first = [k for k, block in enumerate(view.blocks) if block.target_index[last].offset == 0]
    blocks = []
    for block in (view.blocks[k] for k in first):
        repeated = {axis for axis, _ in block.target_index[last].terms}
        index = (*block.target_index[:last], Affine(0, ()))
        sizes = {axis: size for axis, size in block.sizes.items() if axis not in repeated}
        blocks.append(replace(block, target_index=index, sizes=sizes))
    rows = TensorView((*view.shape[:last], 1), view.dtype, tuple(blocks))
    return ChangedView(rows, tuple(view.changes[k] for k in first)) if isinstance(view, ChangedView) else rows


@dataclass(frozen=True)
class DecodedView:
    """A moment's numbers in float32: the numbers of ``payload``, each times its scale.

    Raises MappingError if the scales belong to a tensor of another shape.
    """

    payload: View
    scales: View

    def __post_init__(self) -> None:
        if run_lengths(self.payload.shape, self.scales.shape) is None:
            raise MappingError(f"expected scales of shape {self.payload.shape}, got {self.scales.shape}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.payload.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (*self.payload.blocks, *self.scales.blocks)

    def read(self, reader: CheckpointReader, box: Box) -> np.ndarray:
        """The numbers of ``box``, C-contiguous."""
        runs = run_lengths(self.shape, self.scales.shape)
        assert runs is not None
        scale = self.scales.read(reader, scale_box(box, runs))
        return decode(self.payload.read(reader, box), box, scale, runs)
