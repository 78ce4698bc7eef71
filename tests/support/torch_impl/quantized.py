"""Float8 weights on one process: whole tensors quantized by ``bridge.core.sharding.policy.float8``, and training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

import torch_impl
from bridge.core.sharding.layout.layout import Layout
from bridge.core.sharding.policy import float8
from tests.support.bridge import float8_reference

GATHERS = ["mxfp8", "float8_e4m3fn"]
# An expert stack with odd rows and widths, a matrix of whole blocks, one that ends within a block, a single column.
SHAPES = {"experts": (3, 7, 33), "up": (9, 96), "down": (10, 37), "column": (11, 1)}
# Rows of whole blocks, and an expert stack with odd numbers of rows.
EVEN_SHAPES = {"experts": (3, 7, 64), "up": (9, 96), "down": (11, 32)}


def policy(gather: str, **options: Any) -> torch_impl.MixedPrecisionPolicy:
    dtype: Any = gather if gather == "mxfp8" else torch.float8_e4m3fn
    return torch_impl.MixedPrecisionPolicy(gather_dtype=dtype, cast_forward_inputs=False, **options)


class Wide(nn.Module):
    """Matrices and a vector, of many magnitudes; the last forward's are kept in ``seen``."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(SHAPES),
    ) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(2)
        for name, shape in {**shapes, "vector": (5,)}.items():
            powers = torch.randint(-22, 6, (*shape[:-1], 1), generator=random)
            values = torch.randn(shape, generator=random) * 2.0**powers
            self.register_parameter(name, nn.Parameter(values.to(dtype)))
        self.seen: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: param.detach().clone() for name, param in self.named_parameters()}
        return torch.stack([(param.float() * x).sum() for param in self.parameters()]).sum()


def bytes_of(values: torch.Tensor, gather: str) -> tuple[np.ndarray, np.ndarray]:
    """Payload and row scales of a whole tensor."""
    rows = values.detach().float().reshape(-1, values.shape[-1]).numpy()
    return (
        float8_reference.quantize_rows(rows) if gather == "mxfp8" else float8_reference.quantize_tensor(rows)
    )


def quantized(values: torch.Tensor, gather: str) -> torch.Tensor:
    """The float32 numbers that forward and backward compute with, of a whole parameter."""
    if not float8.is_quantized(values.shape):
        return values.detach().float()
    payload, scales = bytes_of(values, gather)
    restore = float8_reference.dequantize_rows if gather == "mxfp8" else float8_reference.dequantize_tensor
    return torch.from_numpy(restore(payload, scales)).view(values.shape)


def straight_through(
    reference: nn.Module, gather: str, loss_of: Callable[[nn.Module], torch.Tensor]
) -> float:
    """The loss with quantized weights, whose gradients become those of ``reference``."""
    other = copy.deepcopy(reference)
    with torch.no_grad():
        for param in other.parameters():
            param.copy_(quantized(param, gather))
            param.grad = None
    loss = loss_of(other)
    loss.backward()
    for param, its in zip(reference.parameters(), other.parameters(), strict=True):
        param.grad = its.grad
    return loss.item()


def expected_pieces(layout: Layout, values: dict[str, torch.Tensor], gather: str) -> np.ndarray:
    """The bytes that a gather must fill: bytes of whole tensors at the layout's place of each shard's rows."""
    shards, scales_at = layout.num_shards, layout.shard_size
    pieces = np.zeros((shards, float8.piece_bytes(layout, gather)), np.uint8)
    alike = not any(size % 32 for slot in layout.slots for size in (slot.row_size, slot.offset)) and not any(
        size % 32 for size in layout.shard_sizes
    )
    taken = [0] * shards
    # By place in the buffers, which is the order of the parts of every shard.
    for slot in sorted(layout.slots, key=lambda slot: (slot.buffer, slot.offset)):
        payload, scales = bytes_of(values[slot.name], gather)
        for rank in range(shards):
            r0, r1 = layout.row_range(slot.name, rank)
            if r0 == r1:
                continue
            start = layout.shard_start(slot.name, rank)
            pieces[rank, start : start + (r1 - r0) * slot.row_size] = payload[r0:r1].ravel()
            if gather == "mxfp8":
                mine = scales[r0:r1].ravel()
                first = scales_at + (start // 32 if alike else taken[rank])
                pieces[rank, first : first + mine.size] = mine
                taken[rank] += mine.size
    return pieces
