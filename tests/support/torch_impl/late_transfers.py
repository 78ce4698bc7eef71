"""Transfers that end only in ``wait``, and that write their results no sooner.

gloo often ends a collective before the program looks. A program that forgets to wait then reads the right values, and a
program that reuses memory too early spoils nothing. Here two methods make both errors visible:

``late_collectives``
    An asynchronous collective first fills its output with NaN and does its work in ``wait``.
``late_lanes``
    All steps of a transfer, including copies from and to host memory, run when the transfer finishes. The schedule is
    CUDA's, where collectives do not work on copies.

Ranks that wait in different orders hang, as with NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from torch_impl.comm import collectives
from torch_impl.comm.streams import CpuStreams


class _Late:
    """Work that the first ``wait`` does."""

    only_waits = False

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run

    def wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run()

    finish = wait


def _spoil(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Fill ``outputs`` with NaN, except outputs that are also inputs."""
    kept = [(tensor, tensor.clone()) for tensor in inputs]
    for output in outputs:
        # Bytes of ones are NaN in every float dtype, float8_e8m0fnu included.
        output.view(torch.uint8).fill_(255)
    for tensor, values in kept:
        tensor.copy_(values)


@contextmanager
def late_collectives() -> Iterator[None]:
    """Asynchronous collectives of all units on this rank do their work in ``wait``."""
    gather, scatter, reduce = collectives.all_gather, collectives.reduce_scatter, collectives.all_reduce

    def late(collective: Callable[..., Any]) -> Callable[..., Any]:
        def begin(outputs: Any, inputs: Any, group: Any, async_op: bool = False) -> Any:
            if not async_op:
                return collective(outputs, inputs, group)
            # The same memory without a change counter, because the runtime counts its own changes.
            outputs, inputs = [tensor.data for tensor in outputs], [tensor.data for tensor in inputs]
            _spoil(outputs, inputs)
            return _Late(lambda: collective(outputs, inputs, group))

        return begin

    def late_reduce(values: Any, group: Any, *operation: Any, async_op: bool = False, **named: Any) -> Any:
        *operation, async_op = operation if len(operation) == 2 else (*operation, async_op)
        if not async_op:
            return reduce(values, group, *operation, **named)
        return _Late(lambda: reduce(values.data, group, *operation, **named))

    collectives.all_gather, collectives.reduce_scatter = late(gather), late(scatter)
    collectives.all_reduce = late_reduce
    try:
        yield
    finally:
        collectives.all_gather, collectives.reduce_scatter = gather, scatter
        collectives.all_reduce = reduce


@contextmanager
def late_lanes() -> Iterator[None]:
    """Transfers of all units on this rank run when they are finished."""
    start, copies = CpuStreams.start, CpuStreams.copies

    def begin(streams: CpuStreams, steps: Sequence[tuple[str, Callable[[bool], Any]]]) -> _Late:
        steps = list(steps)
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> None:
            # As if the steps had run when they were started, only later.
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                for _, step in steps:
                    step(False)

        return _Late(run)

    CpuStreams.start, CpuStreams.copies = begin, False  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        CpuStreams.start, CpuStreams.copies = start, copies  # type: ignore[method-assign]
