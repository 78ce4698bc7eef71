"""Batches as tensors, and the named losses of a PyTorch model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from bridge.parity.recorded.recording import call_model, in_rows, probe_values
from bridge.parity.torch.leaves import cast, leaves_of, map_leaves, to_torch

Loss = Callable[[nn.Module, Any], torch.Tensor]


def as_tensors(batch: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The batch with tensors in place of arrays: floating arrays in ``dtype``, integers as int64."""

    def tensor(_: str, value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            value = to_torch(np.asarray(value))
        if not isinstance(value, torch.Tensor):
            return value
        whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return (value.long() if whole else cast(value, dtype)).to(device)

    return map_leaves(batch, tensor)


def probe_loss(
    model: nn.Module,
    batch: Any,
    numbers: Mapping[str, np.ndarray] | None = None,
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """The sum over floating output leaves of leaf times ``numbers``, divided by the root of the leaf's size.

    Computed in float32 or wider. ``numbers``: by place; default ``probe_values`` by the leaves' numbers, for all.
    ``rows``: the order of the batch's rows, None for the order of ``numbers``. ValueError for
    an output without floating leaves.
    """
    terms: list[torch.Tensor] = []
    for where, leaf in leaves_of(call_model(model, batch)).items():
        if leaf.is_floating_point() and leaf.numel() and (numbers is None or where in numbers):
            wide = torch.promote_types(leaf.dtype, torch.float32)
            own = probe_values(str(len(terms)), leaf.shape) if numbers is None else numbers[where]
            factors = torch.from_numpy(np.array(in_rows(own, rows) / math.sqrt(leaf.numel())))
            terms.append((leaf.to(wide) * factors.to(leaf.device, wide)).sum())
    if not terms:
        raise ValueError("the model's output has no floating-point array: pass a loss")
    return torch.stack([term.to(terms[0]) for term in terms]).sum()


def next_token_loss(model: nn.Module, tokens: Any) -> torch.Tensor:
    """The mean cross-entropy, in float32 or wider, of ``tokens[:, 1:]`` given ``tokens[:, :-1]``.

    ``tokens``: integers [B, T + 1]. The model returns logits [B, T, vocabulary], or an object with ``.logits``.
    ValueError for a batch of another kind.
    """
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.dtype != torch.int64:
        raise ValueError(f"next_token: expected a batch of integer tokens [B, T + 1], got {_type_of(tokens)}")
    output = model(tokens[:, :-1])
    logits = getattr(output, "logits", output)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(wide).flatten(0, 1), tokens[:, 1:].to(logits.device).flatten())


def scalar_loss(loss: Loss, model: nn.Module, batch: Any, where: str = "") -> torch.Tensor:
    """The loss of a batch, without axes. ValueError, which begins with ``where``, if there is no such loss."""
    try:
        value = loss(model, batch)
    except Exception as error:
        raise ValueError(
            f"{where}{type(model).__name__} or its loss refused the batch ({describe(batch)}): "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        raise ValueError(f"{where}expected the loss to be a floating-point scalar, got {_type_of(value)}")
    return value.reshape(())


def _type_of(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


LOSSES: dict[str, Loss] = {"probe": probe_loss, "next_token": next_token_loss}


def describe(batch: Any) -> str:
    """The leaves of a batch with dtypes and shapes, for error messages."""
    leaves = leaves_of(batch)
    named = [f"{where or 'array'} {str(leaf.dtype)[6:]} {list(leaf.shape)}" for where, leaf in leaves.items()]
    return ", ".join(named) or "no arrays"
