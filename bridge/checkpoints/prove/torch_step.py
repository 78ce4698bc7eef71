"""Restores by stock `torch.distributed.checkpoint`, and steps by stock `torch.optim`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from bridge.checkpoints.prove.weight_state import LARGEST, MOMENTUM, WeightState
from bridge.core.formats.tensors.base import CheckpointReader, dtype_name

LIBRARY = f"torch {torch.__version__}"


def restored(path: Path, reader: CheckpointReader) -> Iterator[tuple[str, np.ndarray]]:
    """The bytes of each tensor as stock DCP loads them, by name, as uint8 arrays. reader: of the same checkpoint."""
    state = {
        name: torch.empty(info.shape, dtype=getattr(torch, dtype_name(info.dtype)))
        for name, info in reader.tensors.items()
    }
    with warnings.catch_warnings():
        # DCP warns that there is one process, as is wanted. It unpickles the metadata, which ``reader`` has read: a
        # pickle that would run code is refused there.
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    for name, tensor in state.items():
        yield name, tensor.reshape(-1).view(torch.uint8).numpy()


def update(state: WeightState) -> np.ndarray:
    """What one step of `torch.optim.SGD`, `Adam` or `AdamW` adds to the weight."""
    weight = torch.nn.Parameter(torch.from_numpy(state.weight.copy()))
    weight.grad = torch.from_numpy(state.gradient.copy())
    rate, decay = state.number("lr", 1e-3), state.number("weight_decay", 0.0)
    # The optimizer changes the moments in place.
    own: dict[str, torch.Tensor] = {m: torch.from_numpy(values.copy()) for m, values in state.moments.items()}
    optimizer: torch.optim.Optimizer
    if MOMENTUM in own:
        optimizer = torch.optim.SGD(
            [weight],
            rate,
            momentum=state.number("momentum", 0.9),
            dampening=state.number("dampening", 0.0),
            weight_decay=decay,
            nesterov=bool(state.options.get("nesterov", False)),
        )
    else:
        optimizer = (torch.optim.AdamW if state.decoupled else torch.optim.Adam)(
            [weight], rate, state.betas, state.number("eps", 1e-8), decay, amsgrad=LARGEST in own
        )
        own["step"] = torch.tensor(state.step)
    optimizer.state[weight] = own
    optimizer.step()
    return weight.detach().numpy() - state.weight
