"""A PyTorch model as one side of a comparison: its runs as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from bridge.parity.recorded.recording import Leaves, Recording, Replacements, Rerun, Training, in_order
from bridge.parity.recorded.store import LEAST, Store, StoredLeaves, map_together
from bridge.parity.torch.calls import (
    CallRecord,
    Recorder,
    check_leaves,
    fill_slots,
    fresh_leaf,
    set_random_state,
)
from bridge.parity.torch.leaves import Slot, deep_copy, leaves_of, share_memory, to_numpy, to_torch
from bridge.parity.torch.losses import LOSSES, Loss, as_tensors, probe_loss, scalar_loss
from bridge.parity.torch.run_in_dtype import (
    buffers_of,
    check_unsharded,
    copy_in,
    counterparts,
    device_of,
    running,
    second_copy,
    state_of,
)

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with torch's own default betas and a learning rate of 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


@dataclass
class _Run:
    """The last record in a dtype: the copy of the model that ran, in its state before the run, and its calls.

    ``weights``: parameters that are on disk until they are used.
    """

    model: nn.Module
    calls: Sequence[CallRecord]
    weights: StoredLeaves

    def shelve(self) -> None:
        """Write the parameters to disk, and keep only their shapes."""
        for name, parameter in self.model.named_parameters():
            # Subclasses and other devices have no bytes that a file could be mapped to.
            plain = type(parameter.data) is torch.Tensor and parameter.device.type == "cpu"
            if plain and parameter.is_contiguous() and parameter.nbytes >= LEAST:
                self.weights[name] = to_numpy(parameter, copy=False)
                parameter.data = _only_shape(parameter)

    @contextmanager
    def load_weights(self) -> Iterator[nn.Module]:
        """The model with its parameters mapped; changes in place stay private."""
        parameters = dict(self.model.named_parameters())
        try:
            names = list(self.weights)
            arrays = map_together([self.weights.file_location(name) for name in names])
            for name, array in zip(names, arrays, strict=True):
                parameters[name].data = share_memory(array)
            yield self.model
        finally:
            for name in self.weights:
                parameters[name].data = _only_shape(parameters[name])
                parameters[name].grad = None


class TorchSide:
    """A PyTorch model with its loss; see ``Side``. Runs happen on the model's devices and in its mode.

    ``loss``: ``(model, batch) -> scalar tensor``; ``"next_token"``; or ``"probe"``, which None means, too. See
    ``losses``. ``optimizer``: from parameters to a ``torch.optim.Optimizer``, by default AdamW.

    All runs use copies, each with the same random numbers. In a copy all floating-point parameters and persistent
    buffers have the run's dtype, and all parameters have gradients. Other buffers, such as a rotary embedding's
    frequencies, keep the values from the model's construction. In a float64 run, these buffers and tensors that are
    attributes of modules become float64, and all computation in torch happens in float64 (``run_in_dtype``). In other
    runs they keep their dtype.

    An output has no gradient if autograd does not reach it, for instance under ``no_grad``; and if it is changed in
    place later and was an input of the module, or was changed in place inside.

    TypeError if the argument is no module, ValueError for a module without parameters, or with some on the meta device.
    """

    framework = "torch"
    separator = "."
    left_out = ()

    def __init__(
        self, model: nn.Module, loss: str | Loss | None = None, *, optimizer: OptimizerFactory | None = None
    ) -> None:
        if isinstance(loss, str) and loss not in LOSSES:
            raise ValueError(f"expected a loss among {', '.join(LOSSES)} or a function, got {loss!r}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        parameters = dict(model.named_parameters())
        if not parameters:
            raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to compare")
        for name, parameter in parameters.items():
            if parameter.is_meta:
                raise ValueError(f"{name}: a parameter on the meta device has no values; load them first")
        self.model = model
        self.loss: Loss = LOSSES[loss or "probe"] if loss is None or isinstance(loss, str) else loss
        self.optimizer = optimizer or default_optimizer
        self._runs: dict[str, _Run] = {}

    def weights(self) -> dict[str, np.ndarray]:
        """Parameters by name; tied ones once."""
        return _values(self.model.named_parameters())

    def buffers(self) -> dict[str, np.ndarray]:
        """Registered buffers by name, persistent or not, in their own dtype."""
        return _values(buffers_of(self.model))

    def load(self, weights: Leaves) -> None:
        """Set the weights, also in the copies for ``rerun``. Values are cast to the model's dtypes.

        ``ValueError`` also names sharded parameters. In this case no parameter is set.
        """
        parameters = dict(self.model.named_parameters())
        own: dict[str, torch.Tensor] = {**parameters, **dict(buffers_of(self.model))}
        check_unsharded(self.model)
        missing, unexpected = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        if missing or unexpected:
            raise ValueError(f"weights: missing {missing or 'none'}, unexpected {unexpected or 'none'}")
        own = {name: tensor for name, tensor in own.items() if name in weights}
        for name, tensor in own.items():
            if np.shape(weights[name]) != tuple(tensor.shape):
                raise ValueError(
                    f"{name}: expected shape {tuple(tensor.shape)}, got {np.shape(weights[name])}"
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(to_torch(np.asarray(weights[name])))
            for run in self._runs.values():
                for name, copied in (*run.model.named_parameters(), *buffers_of(run.model)):
                    if name in run.weights:
                        run.weights[name] = to_numpy(own[name].to(copied.dtype))
                    elif name in own:
                        copied.copy_(own[name])

    def record(self, batch: Any, dtype: str = "float32", *, backward: bool = True) -> Recording:
        """Floats are cast to ``dtype``, integers to int64.

        ``ValueError`` if the model cannot be copied, refuses the batch or is not called by the loss, or if the loss is
        not a scalar.
        """
        kept = copy_in(self.model, dtype)
        for parameter in kept.parameters():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        model, _ = second_copy(kept, kept)
        paths = {module: path for path, module in model.named_modules()}
        store = Store()
        recorder = Recorder(paths, keep=counterparts(model, kept), store=store)
        with running(kept, dtype):
            inputs = as_tensors(batch, getattr(torch, dtype), device_of(kept))
            with recorder.on():
                loss = scalar_loss(self.loss, model, inputs)
            if not recorder.calls:
                raise ValueError("the loss called no module of the model that it got as first argument")
            buffers = _stored(buffers_of(model), store)
            gradients: Leaves = {}
            if backward:
                gradients = _stored_gradients(loss, model, store)
        self._runs[dtype] = _Run(kept, recorder.calls, store.leaves())
        self._runs[dtype].shelve()
        calls = [record.call() for record in recorder.calls]
        return Recording(dtype, calls, float(loss.detach()), gradients, buffers)

    def in_order(self, batch: Any, rows: Sequence[int], dtype: str = "float32") -> Recording:
        """See ``Side``."""
        model = copy_in(self.model, dtype)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        with running(model, dtype):
            inputs = as_tensors(batch, getattr(torch, dtype), device_of(model))
            loss = scalar_loss(in_order(self.loss, rows, probe_loss), model, inputs)
            gradients = _stored_gradients(loss, model, Store())
        return Recording(dtype, [], float(loss.detach()), gradients)

    def rerun(
        self,
        dtype: str,
        path: str,
        number: int,
        inputs: Leaves,
        *,
        cotangents: Leaves | None = None,
        replaced: Replacements | None = None,
    ) -> Rerun:
        """See ``Side``. Numbers of inner calls, in ``replaced`` and in the result, count from 0 in this rerun.

        No gradient flows into a call with a replaced output: the replacement is a constant. KeyError for calls and
        leaves that do not exist, ValueError for arrays of another shape.
        """
        run = self._runs.get(dtype)
        where = f"{path!r}, call {number}"
        calls = run.calls if run else ()
        record = next((call for call in calls if (call.path, call.number) == (path, number)), None)
        if run is None or record is None:
            raise KeyError(f"{where}: no such call was recorded in {dtype}")
        check_leaves(inputs, record.inputs, f"the input of {where}")
        check_leaves(cotangents or {}, record.outputs, f"the output of {where}")
        with run.load_weights() as whole_model:
            return self._again(whole_model, dtype, record, inputs, cotangents, replaced)

    def _again(
        self,
        whole_model: nn.Module,
        dtype: str,
        record: CallRecord,
        inputs: Leaves,
        cotangents: Leaves | None,
        replaced: Replacements | None,
    ) -> Rerun:
        path, where = record.path, f"{record.path!r}, call {record.number}"
        assert record.arguments is not None
        model, memo = second_copy(whole_model.get_submodule(path), whole_model)
        names = {id(parameter): name for name, parameter in whole_model.named_parameters()}
        paths = {memo[id(module)]: name for name, module in whole_model.named_modules() if id(module) in memo}
        recorder = Recorder(paths, replaced=replaced)
        arrays = {where: inputs.get(where, array) for where, array in record.inputs.items()}
        leaves: dict[str, torch.Tensor] = {}
        input_gradients: dict[str, np.ndarray] = {}

        def leaf(slot: Slot) -> torch.Tensor:
            tensor = fresh_leaf(arrays[slot.place], slot.device, slot.dtype, slot.stride)
            leaves[slot.place] = tensor
            if tensor.requires_grad and cotangents is not None:
                tensor.register_hook(
                    lambda gradient: input_gradients.update({slot.place: to_numpy(gradient)})
                )
            return tensor

        device, on, low = record.arguments.autocast
        with running(whole_model, dtype):
            set_random_state(record.arguments.random)
            args, kwargs = fill_slots(deep_copy((record.arguments.args, record.arguments.kwargs), memo), leaf)
            zeros = {
                where: tensor.detach().clone().zero_()
                for where, tensor in leaves.items()
                if tensor.requires_grad
            }
            with recorder.on(), torch.autocast(device, dtype=low, enabled=on):
                output = model(*args, **kwargs)
            if recorder.replaced:
                lost = ", ".join(f"{name!r}, call {count}" for name, count in recorder.replaced)
                raise KeyError(f"{where} made no call of {lost}: its output cannot be replaced")
            gradients: dict[str, np.ndarray] = {}
            if cotangents is not None:
                _backward(leaves_of(output), cotangents)
                input_gradients = {
                    where: input_gradients.get(where, to_numpy(zero)) for where, zero in zeros.items()
                }
                gradients = _gradients((names[id(parameter)], parameter) for parameter in model.parameters())
        own, *inside = recorder.calls
        return Rerun(own.outputs, [call.call(shift=1) for call in inside], input_gradients, gradients)

    def forget(self) -> None:
        """Free the copies and calls that ``rerun`` needs."""
        self._runs.clear()

    def train(self, batches: Sequence[Any], dtype: str = "float32") -> Training:
        """Train a copy, one step for each batch. Frozen parameters stay constant. ValueError without batches, if all
        parameters are frozen, or as ``record``.

        Weights are in ``dtype``.
        """
        if not batches:
            raise ValueError("expected at least one batch to train on, got none")
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ValueError(
                f"{type(self.model).__name__}: all parameters are frozen, so it cannot be trained: compare without "
                "training (steps = 0), or set requires_grad"
            )
        model = copy_in(self.model, dtype)
        losses: list[float] = []
        reached: list[Leaves] = []
        store = Store()
        with running(model, dtype):
            optimizer = self.optimizer(model.parameters())
            for step, batch in enumerate(batches):
                inputs = as_tensors(batch, getattr(torch, dtype), device_of(model))
                loss = scalar_loss(self.loss, model, inputs)
                losses.append(float(loss.detach()))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                whole = step in (0, len(batches) - 1)
                reached.append(_stored(state_of(model) if whole else buffers_of(model), store))
        return Training(tuple(losses), reached[0], reached[-1], tuple(reached[1:-1]))


def _only_shape(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.data.new_empty(1).expand(parameter.shape)


def _values(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    return {name: to_numpy(tensor) for name, tensor in tensors}


def _stored(tensors: Iterable[tuple[str, torch.Tensor]], store: Store) -> Leaves:
    leaves = store.leaves()
    for name, tensor in tensors:
        leaves[name] = to_numpy(tensor, copy=tensor.nbytes < LEAST)
    return leaves


def _backward(outputs: dict[str, torch.Tensor], cotangents: Leaves) -> None:
    reached = {
        where: tensor for where, tensor in outputs.items() if where in cotangents and tensor.requires_grad
    }
    if reached:
        gradients = [
            to_torch(cotangents[where], tensor.device).to(tensor.dtype) for where, tensor in reached.items()
        ]
        torch.autograd.backward(list(reached.values()), gradients)


def _stored_gradients(loss: torch.Tensor, model: nn.Module, store: Store) -> Leaves:
    """Run backward. Each parameter's gradient leaves the memory as soon as it exists."""
    made = store.leaves()

    def store_as(name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        if name in made:
            # A backward inside the backward, from a checkpoint, accumulates as autograd does.
            gradient = to_torch(made[name], gradient.device) + gradient
        made[name] = to_numpy(gradient, copy=gradient.nbytes < LEAST)
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(store_as, name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        if loss.requires_grad:
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in wanted.items():
        if name not in made:
            made.update(_gradients([(name, parameter)]))
    return made.select(wanted)


def _gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, np.ndarray]:
    """The gradients of a backward, zeros where there is none; clears them on the parameters."""
    gradients = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            gradient, parameter.grad = parameter.grad, None
            gradients[name] = to_numpy(torch.zeros_like(parameter) if gradient is None else gradient)
    return gradients
