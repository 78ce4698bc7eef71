"""One update of many local tensors; AdamW uses torch's fused kernel.

resident    weight, gradient and moments in one dtype on the device: all such tensors in one call, in place
staged      all others, in chunks of bounded size: tensors that must be converted, joined with a remainder or fetched
            are copied and written back

Updates are computed in float32 (float64 for float64 weights) and rounded once to the stored dtype.

Step ``t`` = 1, 2, ... for every element by the CPU kernel, the same list as in
``jax_impl.optimizer.main_weight_adamw``. ``[x]`` is a scalar computed in doubles and rounded once to the dtype of the
update. Every operation rounds; ``fma(x, y, z)`` is ``x * y + z`` rounded once::

    1   g = the gradient in the dtype of the update
    2   w = w * [fma(-lr, weight_decay, 1)]
    3   m = fma([1 - b1], g - m, m)                     if [1 - b1] < 0.5, else
        m = fma([1 - b1] - 1, g - m, g)
    4   v = fma([1 - b2] * g, g, v * [b2])              in whole vectors
        v = fma(v, [b2], ([1 - b2] * g) * g)            after a tensor's last whole vector
    5   w = w + (-[lr / (1 - b1**t)] * m) / (sqrt(v) / [sqrt(1 - b2**t)] + [eps])

Because of the two forms of line 4, the same elements may differ in their last bits if they are cut differently. The
CUDA kernel has other last bits: its line 3 is ``m = fma([b1], m, (1 - [b1]) * g)``, with ``1 - [b1]`` in float32.

With ``bias_correction=False`` both ``b**t`` of line 5 are 0. With ``adam_w_mode=False`` (torch's fused Adam), and if
``weight_decay`` is not 0, line 2 is::

    2   g = fma(w, [weight_decay], g)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bridge.core.sharding.policy.optimizer_state import CHUNK, VECTOR, together
from torch_impl.dtensor.local import local_of, plain_values
from torch_impl.dtensor.remainders import join, remainder_of, split
from torch_impl.dtensor.tensor import RowDTensor
from torch_impl.optimizer.moments import MomentFormat, first_row
from torch_impl.optimizer.offload import Transfers

Tensors: TypeAlias = Sequence[torch.Tensor]
Group: TypeAlias = Mapping[str, Any]
"""A parameter group of an optimizer: its options by name."""
Kernel: TypeAlias = Callable[[Tensors, Tensors, Sequence[Tensors], Tensors, Group], None]
"""Updates weights and moments in place: ``(weights, gradients, moments of each weight, steps, group)``."""
# After this number of steps, in the range of float32, the initial zeros no longer influence the moments.
_FOREVER = 1e30
Moments: TypeAlias = list[tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(slots=True, eq=False)
class UpdatePiece:
    """Part of a parameter's update: local tensors of one shape, or views of their parts.

    ``moments``: for each, the stored values and the scale or None. ``row``: the index, in the parameter, of the first
    row. ``dtype``: of the update. ``remainder``: the weight's remainder, if it has one.
    """

    weight: torch.Tensor
    grad: torch.Tensor
    moments: Moments
    formats: tuple[MomentFormat, ...]
    step: torch.Tensor
    row: int
    dtype: torch.dtype
    remainder: torch.Tensor | None = None

    @property
    def stored(self) -> list[torch.Tensor]:
        """The moments and scales: the tensors that are fetched and sent back when they are offloaded."""
        return [tensor for pair in self.moments for tensor in pair if tensor is not None]


def cut(piece: UpdatePiece) -> Iterator[UpdatePiece]:
    """A whole tensor's update in pieces of at most ``CHUNK`` elements, so that memory for one chunk is enough::

        tensor of 5 rows, chunks of 2 rows      chunk 0    chunk 1    chunk 2
        |r0 r1 r2 r3 r4| |small|                |r0 r1|    |r2 r3|    |r4 small|

    A piece consists of whole rows if a moment has a scale for each row, else of any run of elements. Every piece except
    a tensor's last has a multiple of ``VECTOR`` elements. Torch's CPU kernel rounds the elements after a tensor's last
    whole vector differently (line 4 above), so this gives a piece the same bits as the whole tensor.
    """
    numel = piece.weight.numel()
    values = [piece.weight, piece.grad, *(tensor for tensor, _ in piece.moments)]
    # Pieces of a tensor with gaps, or in another order, could not be views.
    if numel <= CHUNK or not all(tensor.is_contiguous() for tensor in values):
        yield piece
        return
    scaled = any(scale is not None for _, scale in piece.moments)
    columns = piece.weight.shape[-1] if scaled else 1
    together = columns * (VECTOR // math.gcd(VECTOR, columns))
    length = max(1, CHUNK // together) * together
    for start in range(0, numel, length):
        rows = slice(start // columns, min(start + length, numel) // columns)

        def part(tensor: torch.Tensor, rows: slice = rows) -> torch.Tensor:
            return tensor.view(-1, columns)[rows] if scaled else tensor.view(-1)[rows]

        moments: Moments = [
            (part(tensor), None if scale is None else scale.view(-1, 1)[rows])
            for tensor, scale in piece.moments
        ]
        yield UpdatePiece(
            part(piece.weight),
            part(piece.grad),
            moments,
            piece.formats,
            piece.step,
            piece.row + (rows.start if scaled else 0),
            piece.dtype,
            None if piece.remainder is None else part(piece.remainder),
        )


def chunks(pieces: Sequence[UpdatePiece]) -> Iterator[list[UpdatePiece]]:
    """Lists of consecutive pieces of one dtype, with up to ``CHUNK`` elements together."""
    every = (piece for whole in pieces for piece in cut(whole))
    for _, alike in itertools.groupby(every, lambda piece: piece.dtype):
        yield from together(alike, lambda piece: piece.weight.numel(), CHUNK)


class ParameterUpdate:
    """The data of one parameter that its update needs, looked up once. ``state`` is the optimizer's, in ``formats``.

    ``moments``: each moment's stored local tensor and its scale or None, the same tensors as in ``state``. Without
    moments there is no step either.
    ``made_by_unit``: the parameter is what ``fully_shard`` made of the original parameter.
    """

    def __init__(
        self,
        param: nn.Parameter,
        state: dict[str, torch.Tensor],
        formats: tuple[MomentFormat, ...],
        offloaded: bool,
    ) -> None:
        self.param, self.state, self.formats, self.offloaded = param, state, formats, offloaded
        self._held = tuple(state[moment.key] for moment in formats)
        self.made_by_unit = isinstance(param, RowDTensor)
        self.placements: Any = param.placements if isinstance(param, DTensor) else None
        self.shape = param.shape
        self.weight = plain_values(param)
        remainder = remainder_of(self.weight)
        self.remainder = None if remainder is None else remainder.values
        self.moments: Moments = [
            (
                local_of(state[moment.key]),
                local_of(state[moment.scale_key]) if moment.scale_key in state else None,
            )
            for moment in formats
        ]
        stored = [tensor for tensor, _ in self.moments]
        uniform = all(tensor.dtype == self.weight.dtype for tensor in stored)
        unscaled = all(scale is None for _, scale in self.moments)
        self.dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        alike = all(tensor.stride() == self.weight.stride() for tensor in stored)
        self.resident = uniform and unscaled and alike and not offloaded and self.remainder is None
        self.step = state["step"] if formats else torch.zeros(())
        self._weight_dtype = self.weight.dtype

    def is_current(self, state: Mapping[str, torch.Tensor] | None) -> bool:
        """Whether parameter and state still consist of these tensors."""
        return (
            state is self.state
            and plain_values(self.param) is self.weight
            and self.weight.dtype == self._weight_dtype
            and all(state[moment.key] is held for moment, held in zip(self.formats, self._held, strict=True))
            and (not self.formats or state["step"] is self.step)
        )

    def piece(self, grad: torch.Tensor) -> UpdatePiece:
        """The whole update, with the local gradient."""
        row = first_row(self.param)
        return UpdatePiece(
            self.weight, grad, self.moments, self.formats, self.step, row, self.dtype, self.remainder
        )


Updates: TypeAlias = Sequence[ParameterUpdate]


def update(
    updates: Updates, grads: Tensors, group: Group, transfers: Transfers, kernel: Kernel, *, rounds_once: bool
) -> None:
    """Update the weights and moments of ``updates``, all on one device, by local gradients of any floating dtype.

    ``kernel`` computes, on tensors of one dtype; ``rounds_once``: whether it rounds half precision once,
    after computing in float32. Steps are already counted. Local tensors without elements are skipped.
    """
    resident: dict[torch.dtype, list[tuple[ParameterUpdate, torch.Tensor]]] = {}
    at_home: list[UpdatePiece] = []
    offloaded: list[UpdatePiece] = []
    for pending, grad in zip(updates, grads, strict=True):
        if pending.weight.numel() == 0:
            continue
        dtype, alike = pending.weight.dtype, grad.stride() == pending.weight.stride()
        if pending.resident and grad.dtype == dtype and alike and (rounds_once or dtype == pending.dtype):
            resident.setdefault(dtype, []).append((pending, grad))
        else:
            (offloaded if pending.offloaded else at_home).append(pending.piece(grad))
    for pairs in resident.values():
        kernel(
            [pending.weight for pending, _ in pairs],
            [grad for _, grad in pairs],
            [[tensor for tensor, _ in pending.moments] for pending, _ in pairs],
            [pending.step for pending, _ in pairs],
            group,
        )
    for pieces in chunks(at_home):
        _update_staged(pieces, [piece.moments for piece in pieces], group, kernel)
    batches = list(chunks(offloaded))
    homes = [[tensor for piece in pieces for tensor in piece.stored] for pieces in batches]
    for pieces, copies in zip(batches, transfers.stream(homes), strict=True):
        fetched = iter(copies)
        moments: list[Moments] = [
            [(next(fetched), None if scale is None else next(fetched)) for _, scale in piece.moments]
            for piece in pieces
        ]
        _update_staged(pieces, moments, group, kernel)


def _update_staged(
    pieces: Sequence[UpdatePiece], moments: Sequence[Moments], group: Mapping[str, Any], kernel: Kernel
) -> None:
    """Update one chunk; ``moments`` are the stored tensors and scales, on the device."""
    dtype = pieces[0].dtype
    weights = [
        _like(piece.weight, piece.weight, dtype)
        if piece.remainder is None
        else join(piece.weight, piece.remainder)
        for piece in pieces
    ]
    grads = [_like(piece.grad, piece.weight, dtype) for piece in pieces]
    values: list[list[torch.Tensor]] = []
    for piece, stored in zip(pieces, moments, strict=True):
        values.append([])
        for moment, (tensor, scale) in zip(piece.formats, stored, strict=True):
            value = _like(tensor, piece.weight, dtype) if scale is None else _empty(piece.weight, dtype)
            if scale is not None:
                moment.decode(tensor, scale, value)
            values[-1].append(value)
    kernel(weights, grads, values, [piece.step for piece in pieces], group)
    for piece, weight, stored, new in zip(pieces, weights, moments, values, strict=True):
        if piece.remainder is not None:
            split(weight, piece.weight, piece.remainder)
        elif weight is not piece.weight:
            piece.weight.copy_(weight)
        for moment, (tensor, scale), value in zip(piece.formats, stored, new, strict=True):
            if value is not tensor:
                step = int(piece.step.item()) if scale is not None else 0
                moment.encode(value, tensor, scale, piece.row, step)


def _empty(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(weight, dtype=dtype)


def _like(tensor: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor itself, or a copy in the dtype and memory order that all tensors of one fused call need."""
    if tensor.dtype == dtype and tensor.stride() == weight.stride():
        return tensor
    return _empty(weight, dtype).copy_(tensor)


def fused_adamw(
    weights: Tensors, grads: Tensors, moments: Sequence[Tensors], steps: Tensors, group: Group
) -> None:
    """AdamW of tensors on one device in one dtype, in place. ``moments``: first and second moment of each weight."""
    device = weights[0].device
    if not group["bias_correction"]:
        # Every beta below 1, as a double, raised to this power is 0, so the kernel's corrections are exactly 1.
        steps = [torch.full_like(step, _FOREVER) for step in steps]
    if steps[0].device != device:
        # One transfer for all steps, without waiting for the device.
        steps = list(torch.stack(list(steps)).to(device, non_blocking=True).unbind())
    kernel = torch._fused_adamw_ if group["adam_w_mode"] else torch._fused_adam_
    kernel(
        list(weights),
        list(grads),
        [first for first, _ in moments],
        [second for _, second in moments],
        [],
        list(steps),
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )
