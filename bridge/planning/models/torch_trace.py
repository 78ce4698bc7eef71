"""Bytes of a segment's activations in PyTorch: one forward and backward on the meta device, with a log of allocations.

Nothing is computed or allocated: on the meta device tensors have shapes and storages without memory. A dispatch mode
sees each operator's results, also in backward, and a finalizer sees each storage's end. So autograd saves and frees
the same tensors at the same moments as on a real device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from bridge.planning.models.activations import SegmentBytes
from bridge.planning.models.runtimes import framework


def trace_segment(
    build: Callable[[], Any], make_input: Callable[[], Any], finish: Callable[[Any], Any] | None = None
) -> SegmentBytes:
    """Trace ``build()``, a module, on ``make_input()``; both are called for the meta device.

    finish: the function from the module's output to a scalar, such as a loss; None: the output's gradient is passed in.
    """
    torch = framework("torch")
    with torch.device("meta"):
        module, example = build(), make_input()
        differentiable = example.is_floating_point()
        source = example.requires_grad_() if differentiable else example
        weight = None
        parameter_gradients: set[int] = set()
        log = _Log(torch)

        def forget(parameter: Any) -> None:
            parameter_gradients.add(log.key(parameter.grad))
            parameter.grad = None

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(forget)
        if finish is None:
            weight = torch.empty_like(module(source))
        # Views of these tensors are also results of operators.
        log.ignore([source, *module.parameters(), *module.buffers(), *([] if weight is None else [weight])])
        with log.mode():
            # A leaf would stay alive in any case; an input from another segment does not.
            inside = source * 1 if differentiable else source
            size = inside.numel() * inside.element_size() if differentiable else 0
            output = module(inside)
            forward = log.peak()
            loss = (output * weight).sum() if finish is None else finish(output)
            forward = forward if finish is None else log.peak()
            del inside, output
            saved = log.live()
            mark = log.mark()
            loss.backward()
    backward = log.peak(mark, parameter_gradients)
    return SegmentBytes(saved, size, forward, backward, size + max(forward, backward), forward)


class _Log:
    """Storages that were made and dropped, in order."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._events: list[tuple[int, int]] = []
        self._alive: dict[int, int] = {}

    def key(self, tensor: Any) -> int:
        """The number of a tensor's storage; -1 for a storage that is older than the log."""
        return self._alive.get(tensor.untyped_storage()._cdata, -1)

    def ignore(self, tensors: Iterable[Any]) -> None:
        """Ignore the bytes of storages that stay alive."""
        self._alive.update((tensor.untyped_storage()._cdata, -1) for tensor in tensors)

    def mark(self) -> int:
        return len(self._events)

    def live(self) -> int:
        """Bytes alive now."""
        return sum(size for _, size in self._events)

    def peak(self, after: int = 0, without: frozenset[int] | set[int] = frozenset()) -> int:
        """The most bytes alive at once since a mark, without the storages ``without``."""
        live = most = 0
        for index, (key, size) in enumerate(self._events):
            if key not in without:
                live += size
            if index >= after:
                most = max(most, live)
        return most

    def note(self, tensor: Any) -> None:
        """Log a result of an operator; its storage may already be known."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive:
            return
        key, size = len(self._events), storage.nbytes()
        self._alive[address] = key
        self._events.append((key, size))
        weakref.finalize(storage, self._dropped, address, key, size)

    def _dropped(self, address: int, key: int, size: int) -> None:
        self._alive.pop(address, None)
        self._events.append((key, -size))

    def mode(self) -> Any:
        """A dispatch mode that keeps the log."""
        log, torch = self, self._torch
        base = framework("torch.utils._python_dispatch").TorchDispatchMode
        tree_map = framework("torch.utils._pytree").tree_map_only

        class Noting(base):  # type: ignore[misc, valid-type]  # the framework is imported when it is used
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                results = func(*args, **(kwargs or {}))
                tree_map(torch.Tensor, log.note, results)
                return results

        return Noting()
