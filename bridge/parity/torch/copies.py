"""Copies of a PyTorch model to run, in any dtype, and the surroundings of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from bridge.core.dtype_names import FLOATING
from bridge.parity.torch.leaves import cast, deep_copy, is_leaf, is_sharded
from bridge.parity.torch.run_in_dtype import all_float64

SEED = 0


def has_shards(model: object) -> bool:
    """Whether it is a module of whose parameters this process has parts only."""
    return isinstance(model, nn.Module) and any(map(is_sharded, model.parameters()))


def check_unsharded(model: nn.Module) -> None:
    """ValueError names a parameter of which this process has a part only."""
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise ValueError(
                f"{name} is sharded (a DTensor): call bridge.parity.capture_torch with the model on all ranks, under "
                "torchrun, and capture_jax with the JAX model, and compare the traces; or build it without sharding"
            )


def copy_in(model: nn.Module, dtype: str) -> nn.Module:
    """A copy with all floating parameters in ``dtype``.

    Persistent buffers follow. Other buffers are constants that modules computed, often in float32 on purpose; they and
    tensors that are mere attributes follow to float64 only.
    """
    if dtype not in FLOATING:
        raise ValueError(f"expected a dtype out of {', '.join(FLOATING)}, got {dtype!r}")
    check_unsharded(model)
    try:
        model = deep_copy(model, {})
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be copied by copy.deepcopy: {error}") from error
    wanted = getattr(torch, dtype)
    persistent = model.state_dict().keys()
    for parameter in model.parameters():
        parameter.data = cast(parameter.data, wanted)
        parameter.grad = None
    for name, buffer in model.named_buffers():
        if dtype == "float64" or name in persistent:
            buffer.data = cast(buffer.data, wanted)
    for module in model.modules() if dtype == "float64" else ():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                vars(module)[name] = cast(value, wanted)
    return model


def buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Registered buffers by name, without sparse and nested ones."""
    return ((name, one) for name, one in model.named_buffers() if is_leaf(one))


def state_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, by name."""
    yield from model.named_parameters()
    yield from buffers_of(model)


def second_copy(module: nn.Module, model: nn.Module) -> tuple[nn.Module, dict[int, Any]]:
    """A copy that shares the parameters of ``model`` and has buffers and attributes of its own.

    With it the copies of all that is in the module, by the id of the first.
    """
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return deep_copy(module, memo), memo


def counterparts(model: nn.Module, other: nn.Module) -> dict[int, Any]:
    """By id, the modules of a model and those of its second copy, and their parameters as themselves."""
    modules = zip(model.modules(), other.modules(), strict=True)
    return {
        **{id(module): its for module, its in modules},
        **{id(parameter): parameter for parameter in other.parameters()},
    }


def device_of(model: nn.Module) -> torch.device:
    """Where batches go: the device of the first parameter."""
    return next(model.parameters()).device


@contextmanager
def running(model: nn.Module, dtype: str) -> Iterator[None]:
    """The surroundings of each run: the same random numbers, gradients, no compilation, and what float64 needs."""
    devices = sorted({one.device for one in model.parameters() if one.device.type == "cuda"}, key=str)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        torch.default_generator.manual_seed(SEED)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(SEED)
        # Also without a backward: some modules of torch take another path where no gradient is asked for.
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if dtype == "float64":
            stack.enter_context(all_float64())
        yield
