"""A training run's state as one tree with the names of checkpoints, and hyperparameters read from a checkpoint.

::

    model.<parameter or persistent buffer>                   live tensors
    optimizer.state.<parameter>.{exp_avg, exp_avg_sq, step}  live tensors
    optimizer.param_groups.<i>.{lr, betas, ..., params}      values; params lists the group's parameter names
    train.<any.path>                                         0-d int64 tensors, arrays

Names equal those of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` after DCP's flattening.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from bridge.core.formats import CheckpointError, CheckpointReader
from bridge.core.mapping.states.plain_states import without_wrappers
from torch_impl.diagnostics.tensors import named_main_parameters
from torch_impl.dtensor.remainders import main_values, remainder_of
from torch_impl.dtensor.tensor import wrap_like
from torch_impl.optimizer.main_weight_sgd import MainWeightSGD

# These choose how to compute, not what: another run may choose differently without changing the result.
_IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
# The live optimizer decides which parameters a group holds.
_NOT_RESTORED = _IMPLEMENTATION_KEYS | {"params", "param_names"}
_GROUPS = "optimizer.param_groups."


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """``{fqn: live tensor}`` of all parameters and persistent buffers; names are those before compiling or wrapping.

    ValueError for state that is not a tensor, or on the meta device.
    """
    tensors = model.state_dict(keep_vars=True)
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name}: expected only tensors in the model's state, got {type(value).__name__}"
            )
        if value.is_meta:
            raise ValueError(
                f"{name}: expected a tensor with memory, got one on the meta device; call model.to_empty(device=...) "
                "first"
            )
    return {name: tensors[full] for full, name in without_wrappers(tensors).items()}


def in_one_piece(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a float32 copy of a tensor that is stored with a remainder."""
    return tensor if remainder_of(tensor) is None else wrap_like(tensor, main_values(tensor))


def tensor_of(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The array's elements in its memory, as ``dtype``, which has the bits of the array's dtype."""
    # torch does not know ml_dtypes, so bits are taken as bytes; a 0-d array cannot change its item size.
    flat = torch.from_numpy(np.atleast_1d(array).reshape(-1).view(np.uint8))
    return flat.view(dtype).view(array.shape)


def parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The fqns of each parameter group's parameters; ValueError for a parameter that is not in the model."""
    # By identity: tensors compare by their elements.
    named = dict(named_main_parameters(model))
    known = {id(named[full]): name for full, name in without_wrappers(named).items()}
    names = []
    for i, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ValueError(
                    f"optimizer group {i}: expected parameters of the model, got one of shape "
                    f"{tuple(parameter.shape)} that is not (was the optimizer made before sharding?)"
                )
        names.append([known[id(parameter)] for parameter in group["params"]])
    return names


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """``{fqn: {"exp_avg": live tensor, ...}}`` of every parameter that the optimizer updates.

    Parameters without state are left out (frozen ones, and see ``materialize_state``). Raises ValueError for state that
    is not a tensor.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for names, group in zip(parameter_names(model, optimizer), optimizer.param_groups, strict=True):
        for name, parameter in zip(names, group["params"], strict=True):
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    raise ValueError(
                        f"optimizer state {key!r} of {name}: expected a tensor, got {type(value).__name__}"
                    )
            if state:
                tensors[name] = dict(state)
    return tensors


def materialize_state(optimizer: Optimizer, *, overwritten: bool = False) -> list[torch.Tensor]:
    """Give trainable parameters without optimizer state their state before a first step; returns these parameters.

    Zero moments and step 0 change no later result; weights are not touched, whatever the weight decay. overwritten:
    whether a load will replace every value. Raises ValueError for an optimizer whose initial state is not known.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    missing = [p for p in params if not optimizer.state.get(p)]
    if not missing or is_stateless(optimizer):
        return []
    # MainWeightAdamW has it, and knows its moments' dtypes and device.
    init_state = getattr(optimizer, "init_state", None)
    if init_state is not None:
        init_state()
    elif isinstance(optimizer, torch.optim.Adam):
        _init_adam_state(optimizer)
    # SGD's first step adds the whole gradient to the momentum, whatever the dampening. A step from zero momentum adds
    # only 1 - dampening of the gradient.
    elif isinstance(optimizer, torch.optim.SGD) and (
        overwritten or not any(group["dampening"] for group in optimizer.param_groups)
    ):
        _init_momentum(optimizer)
    else:
        raise ValueError(
            "expected MainWeightAdamW, torch.optim.Adam, AdamW, or SGD without dampening, or an optimizer that has "
            f"made a step with a gradient for each parameter, got {type(optimizer).__name__} without state for "
            f"{len(missing)} of {len(params)} parameters"
        )
    return missing


def is_stateless(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps nothing between steps: SGD without momentum."""
    groups = optimizer.param_groups
    is_sgd = isinstance(optimizer, torch.optim.SGD | MainWeightSGD)
    return is_sgd and not any(group["momentum"] for group in groups)


def _init_adam_state(optimizer: torch.optim.Adam) -> None:
    for group in optimizer.param_groups:
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        for parameter in group["params"]:
            if optimizer.state.get(parameter) or not parameter.requires_grad:
                continue
            # As Adam's own first step: the step count is on the device only where kernels read it there.
            device = parameter.device if group["capturable"] or group["fused"] else torch.device("cpu")
            wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
            step = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)
            moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in keys}
            optimizer.state[parameter] = {"step": step, **moments}


def _init_momentum(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["momentum"] and parameter.requires_grad and not optimizer.state.get(parameter):
                optimizer.state[parameter] = {
                    "momentum_buffer": torch.zeros_like(parameter, requires_grad=False)
                }


def state_tree(
    model: nn.Module, optimizer: Optimizer | None, train: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The nested tree that is saved; its tensors are the live ones. Materializes missing optimizer state."""
    tree: dict[str, Any] = {"model": model_tensors(model)}
    if optimizer is not None:
        materialize_state(optimizer)
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for names, group in zip(parameter_names(model, optimizer), optimizer.param_groups, strict=True)
        ]
        tree["optimizer"] = {"state": optimizer_tensors(model, optimizer), "param_groups": groups}
    if train is not None:
        tree["train"] = _train_tensors(train, ("train",))
    return tree


def named_tensors(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """``(flat name, tensor)`` of every tensor below the tree's mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from named_tensors(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value


def _train_tensors(train: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for key, value in train.items():
        # A dot separates the levels of a name, so a key with a dot would be loaded as two levels.
        if not isinstance(key, str) or not key or "." in key:
            raise ValueError(f"{'.'.join(path)}: expected keys that are str without '.', got {key!r}")
        here = (*path, key)
        if isinstance(value, Mapping):
            tensors[key] = _train_tensors(value, here)
        # A bool is an int to Python, and would be loaded as an int.
        elif isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            tensors[key] = torch.tensor(int(value), dtype=torch.int64)
        elif isinstance(value, np.ndarray):
            # A copy, since torch warns about read-only memory.
            tensors[key] = torch.from_numpy(value.copy())
        else:
            raise ValueError(
                f"{'.'.join(here)}: expected an int, a numpy array or a mapping of these, got {value!r}"
            )
    return tensors


def train_values(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The nested mapping of ints and arrays that was saved with a run, from ``{"train.<path>": array}``."""
    values: dict[str, Any] = {}
    for name, array in arrays.items():
        _, *parents, last = name.split(".")
        node = values
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = int(array) if array.shape == () and array.dtype == np.int64 else array
    return values


@dataclass(frozen=True)
class GroupUpdate:
    """New values for one live parameter group."""

    group: dict[str, Any]
    values: dict[str, Any]

    def apply(self) -> None:
        for key, value in self.values.items():
            current = self.group.get(key)
            if isinstance(current, torch.Tensor):
                # A captured graph refers to this tensor object.
                current.fill_(value)
            else:
                self.group[key] = value


def plan_group_updates(reader: CheckpointReader, model: nn.Module, optimizer: Optimizer) -> list[GroupUpdate]:
    """The saved hyperparameters of every live group, matched by the group's parameters; nothing is modified.

    Groups may have been saved in another order or divided differently, as long as each live group's parameters were
    saved in one group. Keys that choose an implementation (foreach, fused, ...) are not restored.

    Raises:
        CheckpointError: a live group's parameters come from several saved groups or from none, or a saved value has
            another type than the live one.
    """
    saved = _saved_groups(reader)
    # By parameter, because groups may have been saved in another order.
    owner = {name: i for i, group in saved.items() for name in group.get("params") or ()}
    updates = []
    for i, names in enumerate(parameter_names(model, optimizer)):
        # A checkpoint from another program may have one group that lists no parameters: it applies to all groups.
        origins = {owner.get(name) for name in names} if owner else set(saved)
        if len(origins) > 1 or None in origins:
            saved_groups = ", ".join(
                "none" if k is None else f"{_GROUPS}{k}" for k in sorted(origins, key=str)
            )
            raise CheckpointError(
                f"{reader.path}: expected all parameters of optimizer group {i} in one saved group, found them in "
                f"{saved_groups}"
            )
        group = optimizer.param_groups[i]
        values = {key: value for k in origins if k is not None for key, value in saved[k].items()}
        values = {k: v for k, v in values.items() if k not in _NOT_RESTORED}
        updates.append(
            GroupUpdate(group, {k: _like(group.get(k), v, f"{_GROUPS}{i}.{k}") for k, v in values.items()})
        )
    return updates


def _saved_groups(reader: CheckpointReader) -> dict[int, dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for name in (*reader.objects, *reader.tensors):
        if not name.startswith(_GROUPS):
            continue
        index, _, key = name.removeprefix(_GROUPS).partition(".")
        if not index.isdecimal() or not key:
            raise CheckpointError(f"{reader.path}: expected names like {_GROUPS}0.lr, found {name!r}")
        value = reader.read(name).item() if name in reader.tensors else reader.objects[name]
        groups.setdefault(int(index), {})[key] = value
    return groups


def _like(current: Any, value: Any, name: str) -> Any:
    """``value`` as the live value's type: formats other than pickle turn tuples to lists and 1.0 to 1."""
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
