"""Random values for a ``RowDTensor``: bit for bit the rows of the tensor that a single process would draw.

How a generator fills a tensor depends on the whole tensor, so every rank draws the whole tensor and keeps its own part.
Only one tensor at a time is whole. All ranks draw from the generator state of the mesh's first rank:

* the first rank's generator advances as in a single process
* so does the generator of every rank in the same state, for example ranks with the same seed
* a rank with another seed, for dropout for example, keeps its generator unchanged
"""

from __future__ import annotations

from typing import Any

import torch

from torch_impl.comm import collectives
from torch_impl.comm.mesh import coordinate_of
from torch_impl.dtensor.local import local_of, own_part

_aten = torch.ops.aten

RANDOM = {
    _aten.bernoulli_.float, _aten.cauchy_.default, _aten.exponential_.default, _aten.geometric_.default,
    _aten.log_normal_.default, _aten.normal_.default, _aten.random_.default, getattr(_aten.random_, "from"),
    _aten.random_.to, _aten.uniform_.default,
}  # fmt: skip


def fill_randomly(func: Any, tensor: Any, *args: Any, generator: torch.Generator | None = None) -> None:
    """Run ``func``, one of ``RANDOM``, on the whole tensor; each rank keeps its part. A collective over the mesh."""
    local = local_of(tensor)
    # A single process would draw nothing either.
    if not tensor.numel():
        return
    # There are no values yet, so no rank needs another rank's generator and nothing is communicated.
    if local.is_meta:
        func(local, *args, generator=generator)
        return
    own_state = _state_of(generator, local.device)
    state = _of_first_rank(own_state, tensor)
    # A temporary generator, so that this rank's generator keeps its state.
    if not torch.equal(state, own_state):
        generator = torch.Generator(local.device)
        generator.set_state(state)
    whole = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
    func(whole, *args, generator=generator)
    local.copy_(own_part(tensor, whole))


def _state_of(generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
    if generator is not None:
        return generator.get_state()
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _of_first_rank(state: torch.Tensor, tensor: Any) -> torch.Tensor:
    mesh = tensor.device_mesh
    shared = state.to(local_of(tensor).device, copy=True)
    for axis, at in enumerate(coordinate_of(mesh)):
        # The sum over the axis of one state and zeros: a broadcast with the available collectives.
        if at > 0:
            shared.zero_()
        collectives.all_reduce(shared, mesh.get_group(axis))
    return shared.to(state.device)
