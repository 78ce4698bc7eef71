"""Ports that are linen modules or plain functions: how they get their weights, and how a bug is planted in them."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from bridge.core.mapping import MappingTable
from tests.support.parity.bug_tools import Planted
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


class Rewritten(Planted):
    """Other source text of a port, whose file has it under the name ``PORT``; the weights stay."""

    def __call__(self, pair: Pair) -> None:
        """Plant it: ``change`` gets the pair."""
        self.change(pair)


def rewritten(file: str, *changes: tuple[str, str], path: str = "") -> Rewritten:
    """A bug in the port of a file: each old text must occur once in the source."""

    def change(pair: Pair) -> None:
        text = Path(file).read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, f"expected {old!r} once in {file}, found {text.count(old)}"
            text = text.replace(old, new)
        module: Any = types.ModuleType(f"rewritten_{Path(file).stem}")
        sys.modules[module.__name__] = module  # flax asks for the modules of its dataclasses
        exec(compile(text, file, "exec"), module.__dict__)
        jax_model: Any = pair.jax_model
        object.__setattr__(pair, "jax_model", (module.PORT, jax_model[1]))

    return Rewritten("jax", path, change)


def changed_leaf(path: str, change: Any) -> Rewritten:
    """Other values of one array of a port's tree; ``change`` gets a copy of the old values."""

    def plant(pair: Pair) -> None:
        jax_model: Any = pair.jax_model
        *parents, name = path.split("/")
        at = jax_model[1].get("params", jax_model[1])
        for parent in parents:
            at = at[parent]
        at[name] = jnp.asarray(change(np.array(at[name])))

    return Rewritten("jax", path.rpartition("/")[0], plant)
