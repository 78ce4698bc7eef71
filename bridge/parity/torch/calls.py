"""Hooks on all modules of a PyTorch model that record the inputs and outputs of each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from bridge.parity.recorded.recording import Call, Heads, Leaves, Replacements, heads_of
from bridge.parity.recorded.store import Store, StoredLeaves
from bridge.parity.torch.leaves import (
    Slot,
    arguments,
    deep_copy,
    has_objects,
    is_leaf,
    leaves_of,
    map_leaves,
    to_numpy,
    to_torch,
)


@dataclass
class CallArguments:
    """What a repeated call needs: arguments with slots in place of leaves, and the surrounding state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: list[torch.Tensor]
    autocast: tuple[str, bool, torch.dtype]


@dataclass
class CallRecord:
    """A call during the run."""

    path: str
    number: int
    kind: str
    parent: int | None
    inputs: Leaves
    arguments: CallArguments | None
    heads: Heads = ((), ())
    outputs: Leaves = field(default_factory=dict)
    gradients: MutableMapping[str, np.ndarray] = field(default_factory=dict)

    def call(self, shift: int = 0) -> Call:
        """The call as a part of the record. ``shift``: calls that are left out before it."""
        parent = None if self.parent is None or self.parent < shift else self.parent - shift
        made = self.gradients
        gradients = (
            made.select(self.outputs)
            if isinstance(made, StoredLeaves)
            else {where: made[where] for where in self.outputs if where in made}
        )
        return Call(
            self.path, self.number, self.kind, self.inputs, self.outputs, gradients, parent, self.heads
        )


class GradientWatch:
    """A floating output whose gradient is recorded.

    The enclosing module continues with ``view``, because the gradient of the output itself would include all its uses:
    uses inside the module and, for an output that is an input, uses before the module. A change in place removes the
    view from the graph. Then the gradient of ``new`` is recorded: the output as made, None if it is not from this call.
    """

    def __init__(
        self, record: CallRecord, where: str, output: torch.Tensor, new: torch.Tensor | None
    ) -> None:
        self.view = output.view_as(output)
        self._record, self._place = record, where
        self._made = self.view.grad_fn
        self.view.register_hook(lambda gradient: self._note(gradient, changed=False))
        self._changed: bool | None = None
        if new is not None:
            new.register_hook(lambda gradient: self._note(gradient, changed=True))

    def end_forward(self) -> None:
        """From now on, gradients are gradients of the loss."""
        self._changed = self.view.grad_fn is not self._made
        del self.view, self._made

    def _note(self, gradient: torch.Tensor, changed: bool) -> None:
        if self._changed is changed:
            self._record.gradients[self._place] = to_numpy(gradient)


class TensorHistory(NamedTuple):
    """A tensor that modules got or returned; kept so that no other tensor gets its id.

    ``new``: the output of ``call`` itself, if the tensor is a view of it; ``made``: the tensor's history since then.
    """

    tensor: torch.Tensor
    new: torch.Tensor | None
    call: int
    made: Any


class Recorder:
    """Records calls of ``paths``' modules, from ``on()`` until its end.

    ``keep``: by id, modules of the running model and their
    replacements in kept arguments; None: arguments are not kept. ``replaced``: outputs that calls return instead of
    their own. ``store``: where arrays go; None: they stay in memory.
    """

    def __init__(
        self,
        paths: Mapping[nn.Module, str],
        *,
        keep: dict[int, Any] | None = None,
        replaced: Replacements | None = None,
        store: Store | None = None,
    ) -> None:
        self.calls: list[CallRecord] = []
        self._leaves: Callable[..., MutableMapping[str, np.ndarray]] = dict if store is None else store.leaves
        self.replaced = dict(replaced or {})
        self._paths = dict(paths)
        self._counts: Counter[str] = Counter()
        self._keep = keep
        self._open: list[tuple[nn.Module, int]] = []
        self._watched: list[GradientWatch] = []
        self._seen = {
            id(tensor): TensorHistory(tensor, None, -1, None)
            for module in paths
            for tensor in module.parameters(recurse=False)
        }

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record calls. Calls in a backward, which checkpointing makes, must stay outside."""
        handles = []
        for module in self._paths:
            # First among the hooks: the model's own hooks may change the arguments, and this is part of the call.
            handles.append(module.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(self._end, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            # Tensors were kept so that no other tensor got their ids; now the backward needs their memory.
            self._seen.clear()
            for watch in self._watched:
                watch.end_forward()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path = self._paths[module]
        leaves = leaves_of(arguments(args, kwargs))
        inputs = self._leaves()
        for where, leaf in leaves.items():
            inputs[where] = to_numpy(leaf)
        parent = self._open[-1][1] if self._open else None
        kept_arguments = None if self._keep is None else self._keep_arguments(args, kwargs, self._keep)
        index = len(self.calls)
        self._open.append((module, index))
        class_name, heads = type(module).__name__, heads_of(module)
        record = CallRecord(path, self._counts[path], class_name, parent, inputs, kept_arguments, heads)
        record.outputs, record.gradients = self._leaves(), self._leaves()
        self.calls.append(record)
        self._counts[path] += 1
        for leaf in leaves.values():
            self._seen.setdefault(id(leaf), TensorHistory(leaf, None, index - 1, leaf.grad_fn))

    def _keep_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], keep: dict[int, Any]
    ) -> CallArguments:
        def slot(where: str, value: Any) -> Any:
            return Slot(where, value.device, value.dtype, value.stride()) if is_leaf(value) else value

        everything = map_leaves(arguments(args, kwargs), slot)
        if has_objects(everything):
            # Such as a cache, which the call will change.
            everything = _copied(everything, dict(keep))
        values = list(everything.values())
        kept = dict(zip(kwargs, values[len(args) :], strict=True))
        device = next((leaf.device.type for leaf in leaves_of(arguments(args, kwargs)).values()), "cpu")
        autocast = (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        return CallArguments(tuple(values[: len(args)]), kept, random_state(), autocast)

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        # A call that raised is still open if the enclosing module caught the error.
        while self._open[-1][0] is not module:
            self._open.pop()
        _, index = self._open.pop()
        record = self.calls[index]
        leaves = leaves_of(output)
        record.outputs = self._leaves({where: to_numpy(leaf) for where, leaf in leaves.items()})
        instead = self.replaced.pop((record.path, record.number), {})
        check_leaves(instead, record.outputs, f"the output of {record.path!r}, call {record.number}")

        def change(where: str, value: Any) -> Any:
            if not is_leaf(value):
                return value
            if where in instead:
                value = fresh_leaf(instead[where], value.device, value.dtype)
            if not (value.is_floating_point() and value.requires_grad and torch.is_grad_enabled()):
                self._seen.setdefault(id(value), TensorHistory(value, None, index, None))
                return value
            known = self._seen.setdefault(id(value), TensorHistory(value, value, index, value.grad_fn))
            inside = known.call >= index and known.made is value.grad_fn
            new = known.new if inside else None
            self._watched.append(GradientWatch(record, where, value, new))
            view = self._watched[-1].view
            self._seen[id(view)] = TensorHistory(view, new, known.call if inside else index, view.grad_fn)
            return view

        changed = map_leaves(output, change)
        return None if changed is output else changed


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy; the object itself if it cannot be copied."""
    try:
        return deep_copy(value, memo)
    except (TypeError, RuntimeError, ValueError, NotImplementedError):
        # The error depends on the object: locks and generators raise TypeError, tensors of a graph RuntimeError, ...
        return value


def fresh_leaf(
    array: np.ndarray, device: torch.device, dtype: torch.dtype, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor for autograd that can get a gradient and that modules may change in place.

    ``stride``: some kernels add in an order that depends on it. Overlapping elements are laid out separately.
    """
    tensor = to_torch(array, device).to(dtype)
    if dtype.is_floating_point and torch.is_grad_enabled():
        tensor.requires_grad_()
    if stride is None or 0 in stride:
        # A leaf that needs a gradient must not be changed in place; its clone may be.
        return tensor.clone()
    return torch.empty_strided(tensor.shape, stride, dtype=dtype, device=device).copy_(tensor)


def check_leaves(leaves: Leaves, known: Leaves, where: str) -> None:
    """KeyError for a leaf that does not exist, ValueError for a leaf of another shape."""
    for where_in_call, array in leaves.items():
        if where_in_call not in known:
            raise KeyError(f"{where} has no leaf {where_in_call!r}: expected one of {sorted(known)}")
        if np.shape(array) != known[where_in_call].shape:
            raise ValueError(
                f"{where}, leaf {where_in_call!r}: expected shape {known[where_in_call].shape}, got {np.shape(array)}"
            )


def random_state() -> list[torch.Tensor]:
    """States of torch's generators in use: the CPU's, then those of the CUDA devices."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def set_random_state(state: Sequence[torch.Tensor]) -> None:
    """Put generators back to ``random_state()``."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])


def fill_slots(tree: Any, leaf: Callable[[Slot], torch.Tensor]) -> Any:
    """Kept arguments with ``leaf(slot)`` in place of each slot."""
    return map_leaves(tree, lambda _, value: leaf(value) if isinstance(value, Slot) else value)
