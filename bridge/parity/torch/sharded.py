"""A sharded PyTorch model as one side of a trace: it runs unchanged on all ranks, and rank 0 gets the whole record.

    rank 0   rows 0, 1 -> [ model, its shards ] -> activations of rows 0, 1 --+
                             | collectives                                     +-> as if one process had run all rows
    rank 1   rows 2, 3 -> [ model, its shards ] -> activations of rows 2, 3 --+

Ranks with the same rows are replicas (tensor parallelism): one of them counts, and the others must hold the same
values. DTensors, also those that modules pass to each other, are gathered by their own collectives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.core.dtype_names import FLOATING, full_name
from bridge.parity.recorded.recording import Call, Leaves, Recording, Training, checked_dtype
from bridge.parity.recorded.trace import Capture, OneRecording, check_new
from bridge.parity.torch.calls import Recorder
from bridge.parity.torch.leaves import is_sharded, to_numpy
from bridge.parity.torch.losses import LOSSES, Loss, as_tensors, scalar_loss
from bridge.parity.torch.ranks import Ranks, probe_of_all
from bridge.parity.torch.run_in_dtype import device_of, running
from bridge.parity.torch.side import OptimizerFactory, default_optimizer


def capture_sharded(
    model: nn.Module,
    batch: Any,
    path: str | os.PathLike[str],
    *,
    loss: str | Loss | None = None,
    dtype: str = "float32",
    steps: int = 3,
    optimizer: OptimizerFactory | None = None,
    samples: Mapping[int, int] | None = None,
    reference: nn.Module | None = None,
) -> None:
    """Run a sharded model on all ranks of the default process group; rank 0 writes one complete trace.

    The trace equals that of one process with all rows: activations of all ranks, concatenated in rank order, whole
    parameters and gradients, the mean loss. ``batch``: this rank's own rows, the same number on all ranks, as in
    training; ranks of one tensor-parallel group pass the same rows. ``loss``: a mean over rows.

    The model runs in its own precision, which ``dtype`` names, and must not have gradients yet; its weights and buffers
    are restored afterwards. ``reference``: the model in float64, sharded in the same way; it gets the model's weights.
    With it, a comparison is as sharp as for plain models. Without it, only differences above ``dtype`` rounding show.

    All ranks raise ``ValueError`` or ``TraceError`` for problems that are visible before the run. An error during the
    run is raised on its rank; the other ranks fail when that process ends. No trace is written then.
    """
    ranks = Ranks.of(batch)
    dtype = full_name(dtype, FLOATING)

    def checked() -> None:
        checked_dtype(dtype, steps)
        if ranks.rank == 0:
            check_new(path)
        _check(model, loss, reference)

    ranks.run_on_all(checked)
    side = ShardedTorchSide(model, loss, ranks, dtype=dtype, optimizer=optimizer, reference=reference)
    dtypes = (dtype,) if reference is None else ("float64", dtype)
    taken = Capture.of(side, batch, dtypes, steps, samples)
    whole = ranks.whole_batch(batch)

    def written() -> None:
        if ranks.rank == 0:
            taken.write(path, whole, side.notes)

    ranks.run_on_all(written)


def _check(model: nn.Module, loss: str | Loss | None, reference: nn.Module | None) -> None:
    if isinstance(loss, str) and loss not in LOSSES:
        raise ValueError(f"expected a loss among {', '.join(LOSSES)} or a function, got {loss!r}")
    for what, checked in (("model", model), ("reference", reference)):
        for name, parameter in () if checked is None else checked.named_parameters():
            if parameter.grad is not None:
                raise ValueError(f"{what}: {name} has a gradient: call zero_grad() before the capture")
    if reference is None:
        return
    own, its = dict(model.named_parameters()), dict(reference.named_parameters())
    if own.keys() != its.keys():
        odd = sorted(own.keys() ^ its.keys())[0]
        raise ValueError(f"reference: expected the parameters of the model, got only in one of them: {odd}")
    for name, parameter in its.items():
        if parameter.shape != own[name].shape or is_sharded(parameter) != is_sharded(own[name]):
            raise ValueError(
                f"reference: expected {name} {list(own[name].shape)} sharded as in the model, got "
                f"{list(parameter.shape)}{'' if is_sharded(parameter) else ', not sharded'}"
            )
        if parameter.dtype != torch.float64:
            raise ValueError(
                f"reference: expected float64, got {name} in {str(parameter.dtype)[6:]}; call double() before sharding"
            )


class ShardedTorchSide(OneRecording):
    """See ``capture_sharded`` and ``Side``. All methods are collectives; only rank 0's results are whole.

    ``notes``: results that did not fit together across the ranks.
    """

    runs_once = "a module of a sharded model cannot run alone"
    framework = "torch"
    separator = "."
    left_out = ()

    def __init__(
        self,
        model: nn.Module,
        loss: str | Loss | None,
        ranks: Ranks,
        *,
        dtype: str,
        optimizer: OptimizerFactory | None = None,
        reference: nn.Module | None = None,
    ) -> None:
        self._models = {dtype: model}
        self._ranks, self._where = ranks, f"rank {ranks.rank}: "
        self._optimizer = optimizer or default_optimizer
        if loss is None or loss == "probe":
            loss = probe_of_all(ranks)
        self._loss: Loss = LOSSES[loss] if isinstance(loss, str) else loss
        self._dtype = dtype
        if reference is not None:
            self._models["float64"] = reference
            with torch.no_grad():
                for tensor, value in zip(_tensors(reference), _tensors(model), strict=True):
                    tensor.copy_(value)

    @property
    def notes(self) -> list[str]:
        ranks = self._ranks
        what = f"torch ran sharded on {ranks.size} ranks, with {len(ranks.holders)} different batches"
        return [what, *ranks.notes]

    def weights(self) -> dict[str, np.ndarray]:
        return self._whole("weight", self._models[self._dtype].named_parameters())

    def buffers(self) -> dict[str, np.ndarray]:
        return self._whole("buffer", self._models[self._dtype].named_buffers())

    def record(self, batch: Any, dtype: str = "float32", *, backward: bool = True) -> Recording:
        model = self._models[dtype]
        paths = {module: path for path, module in model.named_modules()}
        kinds = {path: _kind(module) for module, path in paths.items()}
        recorder = Recorder(paths)
        with _unchanged(model), running(model, dtype):
            inputs = as_tensors(batch, getattr(torch, dtype), device_of(model))
            with recorder.on():
                loss = scalar_loss(self._loss, model, inputs, self._where)
            buffers = self._whole("buffer after the forward", model.named_buffers())
            if backward:
                loss.backward()
            trained = [
                (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
            ]
            made = ((name, torch.zeros_like(own) if own.grad is None else own.grad) for name, own in trained)
            gradients = self._whole("gradient", made)
        calls = [record.call() for record in recorder.calls]
        merged = [
            Call(call.path, call.number, kinds[call.path], *groups, call.parent, call.heads)
            for call, groups in zip(calls, self._ranks.whole_calls(calls), strict=True)
        ]
        return Recording(dtype, merged, self._ranks.mean(float(loss.detach())), gradients, buffers)

    def train(self, batches: Sequence[Any], dtype: str = "float32") -> Training:
        model = self._models[dtype]
        losses: list[float] = []
        reached: list[Leaves] = []
        with _unchanged(model), running(model, dtype):
            optimizer = self._optimizer(model.parameters())
            for step, batch in enumerate(batches):
                inputs = as_tensors(batch, getattr(torch, dtype), device_of(model))
                loss = scalar_loss(self._loss, model, inputs, self._where)
                losses.append(self._ranks.mean(float(loss.detach())))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                whole = step in (0, len(batches) - 1)
                reached.append(self._state(model) if whole else self._whole("buffer", model.named_buffers()))
        return Training(tuple(losses), reached[0], reached[-1], tuple(reached[1:-1]))

    def _state(self, model: nn.Module) -> dict[str, np.ndarray]:
        parameters = self._whole("weight", model.named_parameters())
        return {**parameters, **self._whole("buffer after training", model.named_buffers())}

    def _whole(self, what: str, tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
        """Sharded tensors, gathered by their own collectives; rank 0's copy of others, which should be equal."""
        whole = {}
        for name, tensor in tensors:
            whole[name] = to_numpy(tensor)
            if not is_sharded(tensor):
                self._ranks.note_unlike(f"the {what} of {name}, which is not sharded,", whole[name])
        return whole


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers afterwards, and remove gradients."""
    kept = [(tensor, tensor.detach().clone()) for tensor in _tensors(model)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, values in kept:
                tensor.copy_(values)
        for parameter in model.parameters():
            parameter.grad = None


def _kind(module: nn.Module) -> str:
    """The class before sharding, which replaces it with its own class."""
    bases = type(module).__bases__
    sharded = len(bases) == 2 and bases[0].__name__ == "FSDPModule"
    return (bases[1] if sharded else type(module)).__name__
