"""Ports that are linen modules or plain functions, and how they get their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from bridge.core.mapping import MappingTable
from tests.support.parity.pair_tools import Pair, torch_arrays, translated


def nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Arrays by path, as a tree of dicts."""
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *parents, name = path.split("/")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = jnp.asarray(array)
    return tree


def ported(
    name: str,
    torch_model: torch.nn.Module,
    port: Any,
    mapping: MappingTable,
    batch: Any,
    *,
    axes: dict[str, int] | None = None,
    loss: Any = "probe",
    linen: bool = True,
) -> Pair:
    """A pair whose JAX model is ``(port, weights)``: a linen module and its variables, or a function and its tree."""
    tree = nested(translated(torch_arrays(torch_model), mapping, axes or {}))
    model: Any = (port, {"params": tree} if linen else tree)
    return Pair(name, torch_model, model, mapping, axes or {}, batch, loss)
