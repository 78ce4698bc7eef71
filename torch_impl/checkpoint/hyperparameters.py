"""Restoring the hyperparameters of optimizer parameter groups from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bridge.formats import CheckpointError, CheckpointReader
from torch_impl.checkpoint.contents import IMPLEMENTATION_KEYS, parameter_names

_PREFIX = "optimizer.param_groups."


@dataclass(frozen=True)
class GroupUpdate:
    """New values for one live parameter group."""

    group: dict[str, Any]
    values: dict[str, Any]

    def apply(self) -> None:
        for key, value in self.values.items():
            current = self.group.get(key)
            if isinstance(current, torch.Tensor):
                current.fill_(value)  # a captured graph holds this very tensor
            else:
                self.group[key] = value


def plan_group_updates(reader: CheckpointReader, model: nn.Module, optimizer: Optimizer) -> list[GroupUpdate]:
    """The saved hyperparameters of every live group, found by the parameters it holds; nothing is modified.

    Groups may have been saved in another order or split otherwise, as long as each live group's parameters were saved
    in one group. Keys that choose an implementation (foreach, fused, ...) are not restored.

    Raises:
        CheckpointError: a live group's parameters come from several saved groups or from none, or a value is of
            another kind than the live one.
    """
    saved = _saved_groups(reader)
    owner = {name: i for i, group in saved.items() for name in group.get("params") or ()}
    updates = []
    for i, names in enumerate(parameter_names(model, optimizer)):
        # A checkpoint from elsewhere may hold one group that lists no parameters: it is everyone's.
        origins = {owner.get(name) for name in names} if owner else set(saved)
        if len(origins) > 1 or None in origins:
            found = ", ".join("none" if k is None else f"{_PREFIX}{k}" for k in sorted(origins, key=str))
            raise CheckpointError(
                f"{reader.path}: expected all parameters of optimizer group {i} in one saved group, found them in "
                f"{found}"
            )
        group = optimizer.param_groups[i]
        values = {key: value for k in origins if k is not None for key, value in saved[k].items()}
        values = {k: v for k, v in values.items() if k != "params" and k not in IMPLEMENTATION_KEYS}
        updates.append(
            GroupUpdate(group, {k: _like(group.get(k), v, f"{_PREFIX}{i}.{k}") for k, v in values.items()})
        )
    return updates


def _saved_groups(reader: CheckpointReader) -> dict[int, dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for name in (*reader.objects, *reader.tensors):
        if not name.startswith(_PREFIX):
            continue
        index, _, key = name.removeprefix(_PREFIX).partition(".")
        if not index.isdecimal() or not key:
            raise CheckpointError(f"{reader.path}: expected names like {_PREFIX}0.lr, found {name!r}")
        value = reader.read(name).item() if name in reader.tensors else reader.objects[name]
        groups.setdefault(int(index), {})[key] = value
    return groups


def _like(current: Any, value: Any, name: str) -> Any:
    """``value`` as the kind of the live value: formats other than pickle turn tuples to lists and 1.0 to 1."""
    if isinstance(current, tuple) and isinstance(value, (list, tuple)) and len(value) == len(current):
        return tuple(_like(c, v, name) for c, v in zip(current, value, strict=True))
    if (
        isinstance(current, (float, torch.Tensor))
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    ):
        return float(value)
    if current is not None and value is not None and type(current) is not type(value):
        raise CheckpointError(
            f"{name}: expected a {type(current).__name__} like {current!r}, found {type(value).__name__} {value!r}"
        )
    return value
