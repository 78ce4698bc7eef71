"""The tensors in arguments and outputs of PyTorch modules, by place, and their conversion to NumPy and back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a leaf in arguments that were kept without it."""

    place: str
    device: torch.device
    dtype: torch.dtype
    stride: tuple[int, ...]


def is_leaf(value: object) -> bool:
    """Whether the value is a tensor with an element at each index. Sparse and nested tensors stay as they are."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested


def map_leaves(tree: Any, change: Callable[[str, Any], Any], where: str = "") -> Any:
    """The tree with ``change(place, value)`` for each value that is not a container.

    Containers: tuples, named tuples, lists, dicts and dataclasses, which includes the outputs of ``transformers``. An
    unchanged container is the same object; changed ones are copies of the same type.
    """
    if not isinstance(tree, type):
        parts = _parts(tree)
        if parts is not None:
            new = [map_leaves(value, change, f"{where}.{key}" if where else str(key)) for key, value in parts]
            if all(item is value for item, (_, value) in zip(new, parts, strict=True)):
                return tree
            return _of_parts(tree, [key for key, _ in parts], new)
    return change(where, tree)


def _parts(tree: Any) -> list[tuple[Any, Any]] | None:
    """Keys and values of a container; None for other values."""
    if isinstance(tree, tuple | list):
        names = getattr(tree, "_fields", None)
        return list(zip(names or range(len(tree)), tree, strict=True))
    # Before dataclasses: a ModelOutput is both, and its items are only those that are not None.
    if isinstance(tree, dict):
        return list(tree.items())
    if dataclasses.is_dataclass(tree) and not isinstance(tree, Slot):
        fields = [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
        return [(name, getattr(tree, name)) for name in fields]
    return None


def _of_parts(tree: Any, keys: list[Any], values: list[Any]) -> Any:
    if isinstance(tree, tuple):
        # torch.return_types (of max, topk and others) take one sequence, as tuples do.
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    new = copy.copy(tree)
    for key, value in zip(keys, values, strict=True):
        if isinstance(tree, list | dict):
            new[key] = value
        else:
            object.__setattr__(new, key, value)  # works for frozen dataclasses, too
    return new


def leaves_of(tree: Any) -> dict[str, torch.Tensor]:
    """The leaves by place. ValueError for two leaves at one place, such as ``{"a.b": x, "a": {"b": y}}``."""
    by_place: dict[str, torch.Tensor] = {}

    def note(where: str, value: Any) -> Any:
        if is_leaf(value):
            if where in by_place:
                raise ValueError(
                    f"two arrays at {where!r}: keys with a dot make places ambiguous; rename one"
                )
            by_place[where] = value
        return value

    map_leaves(tree, note)
    return by_place


def arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name; positional arguments by number."""
    return {**{str(number): value for number, value in enumerate(args)}, **kwargs}


class _Detached(TorchFunctionMode):
    """While active, ``copy.deepcopy`` copies computed tensors, which torch refuses, without their history."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and args[0].grad_fn is not None:
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` that also copies objects with computed tensors."""
    with _Detached():
        return copy.deepcopy(value, memo)


def has_objects(tree: Any) -> bool:
    """Whether the tree contains anything except slots, numbers, text and None."""
    seen = False

    def look(_: str, value: Any) -> Any:
        nonlocal seen
        seen = seen or not isinstance(value, (Slot, *PLAIN))
        return value

    map_leaves(tree, look)
    return seen


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor; for a sharded tensor, a collective."""
    return getattr(tensor, "full_tensor", lambda: tensor)()


def to_numpy(tensor: torch.Tensor, *, copy: bool = True) -> np.ndarray:
    """In the tensor's own dtype; gathers a DTensor by a collective. ``copy=False``: may share the tensor's memory."""
    with torch.no_grad():
        tensor = whole(tensor.detach()).resolve_conj().resolve_neg().cpu()
        narrow = tensor.dtype == torch.bfloat16
        array = tensor.view(torch.int16).numpy().view(BFLOAT16) if narrow else tensor.numpy()
        return array.copy() if copy else array


def to_torch(array: np.ndarray, device: torch.device | None = None) -> torch.Tensor:
    """A copy, in the array's own dtype."""
    return share_memory(np.array(array, order="C")).to(device)


def share_memory(array: np.ndarray) -> torch.Tensor:
    """A tensor that shares the array's memory."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in this dtype if it is floating; complex tensors in the complex dtype of as many bits."""
    if tensor.is_floating_point():
        return tensor.to(dtype)
    if tensor.is_complex() and dtype in (torch.float32, torch.float64):
        return tensor.to(dtype.to_complex())
    return tensor
