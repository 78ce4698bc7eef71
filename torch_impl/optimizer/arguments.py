"""Checks of the user's arguments to the optimizers of main weights; ``of``: the optimizer's name, in errors."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_impl.dtensor.remainders import remainder_of

_PARAMS = "an iterable of parameters, (name, parameter) pairs or groups"


def check_params(params: Any, of: str) -> None:
    """TypeError for values that torch would refuse without naming ``params``."""
    if isinstance(params, nn.Module):
        raise TypeError(f"{of}: params: expected {_PARAMS}, got the module itself; pass its parameters()")
    if isinstance(params, str) or not isinstance(params, Iterable):
        raise TypeError(f"{of}: params: expected {_PARAMS}, got {params!r}")


def check_group(group: Any, of: str) -> None:
    """TypeError unless ``group`` is a dictionary with parameters or (name, parameter) pairs in ``params``."""
    if not isinstance(group, dict) or "params" not in group:
        what = f"keys {', '.join(map(str, group))}" if isinstance(group, dict) else repr(group)
        raise TypeError(f'{of}: expected a group with its parameters under "params", got {what}')
    params = group["params"]
    if isinstance(params, torch.Tensor):
        return
    check_params(params, of)
    if isinstance(params, set):
        # Unordered: torch's error says what to do.
        return
    group["params"] = list(params)
    for entry in group["params"]:
        what = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
        if not isinstance(what, torch.Tensor):
            raise TypeError(f"{of}: params: expected parameters, got {what!r}")


def check_number(name: str, value: Any, of: str) -> None:
    """TypeError unless ``value`` is a number, or a tensor."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | torch.Tensor):
        raise TypeError(f"{of}: {name}: expected a number, got {value!r}")


def check_flag(name: str, value: Any, of: str) -> None:
    """TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{of}: {name}: expected True or False, got {value!r}")


def check_numbers(group: Mapping[str, Any], of: str, names: Iterable[str]) -> None:
    """TypeError for anything but a number, ValueError for a negative number and for ``lr`` with several elements."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"{of}: expected lr of one element, got a tensor of shape {tuple(lr.shape)}")
    for name in names:
        check_number(name, group[name], of)
        if not group[name] >= 0:
            raise ValueError(f"{of}: expected {name} >= 0, got {group[name]}")


def numbers_of(name: str, values: Any, count: int, of: str) -> tuple[Any, ...]:
    """The values as a tuple. TypeError unless they are iterable numbers; ValueError for another number of values."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{of}: {name}: expected {count} numbers, got {values!r}")
    numbers = tuple(values)
    if len(numbers) != count:
        raise ValueError(f"{of}: {name}: expected {count} numbers, got {numbers!r}")
    for number in numbers:
        check_number(name, number, of)
    return numbers


def check_no_remainders(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> None:
    """Raises TypeError, naming the optimizer, if one of ``params`` has a remainder."""
    for param in params:
        if remainder_of(param) is not None:
            raise TypeError(
                f"{type(optimizer).__name__}: expected parameters in one piece, got one of shape {tuple(param.shape)} "
                "that is stored as a bfloat16 weight and a remainder: use MainWeightAdamW, or shard without "
                "MixedPrecisionPolicy(store_param_remainders=True)"
            )


@functools.cache
def refuse_other_optimizers() -> None:
    """Make steps of other optimizers on such parameters raise from now on; calls after the first do nothing.

    Other optimizers would update the bfloat16 weights, and lose updates smaller than their last bit.
    """
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(optimizer, "updates_remainders", False):
        check_no_remainders(
            optimizer, (param for group in optimizer.param_groups for param in group["params"])
        )
