"""PyTorch's dtypes: those that other formats have, and those that can only be listed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import ml_dtypes
import numpy as np

from bridge.core.formats.tensors.base import DTYPES

UNREADABLE: Mapping[str, np.dtype] = MappingProxyType(
    {
        **{f"{sign}int{bits}": np.dtype(np.uint8) for sign in ("u", "") for bits in range(1, 8)},
        **{
            name: np.dtype(getattr(ml_dtypes, name))
            for name in ("int1", "uint1", "int2", "uint2", "int4", "uint4")
        },
        "float4_e2m1fn_x2": np.dtype(ml_dtypes.float4_e2m1fn),
        **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8"), np.dtype(np.uint8)),
        "bits16": np.dtype(np.uint16),
        **dict.fromkeys(("qint8", "quint8", "quint4x2", "quint2x4"), np.dtype(np.uint8)),
        "qint32": np.dtype(np.int32),
        "complex32": np.dtype(np.uint32),
    }
)
"""Dtypes that only PyTorch has, with one of as many bytes to list them by. What their bytes mean is nowhere said."""


def torch_dtype(name: str) -> tuple[np.dtype, str | None] | None:
    """The dtype called "torch.<name>", and why its elements cannot be read, if so; None for an unknown name."""
    name = name.removeprefix("torch.")
    if name in DTYPES:
        return DTYPES[name], None
    if name in UNREADABLE:
        return UNREADABLE[name], f"torch.{name}, which only PyTorch has"
    return None
