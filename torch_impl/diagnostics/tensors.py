"""Norms of single parameters and gradients, of all of a model at once."""

from __future__ import annotations

import torch
from torch import nn

from torch_impl.diagnostics.model_tensors import named_main_parameters
from torch_impl.dtensor.reductions import norms
from torch_impl.dtensor.tensor import is_partial


def parameter_norms(model: nn.Module, *, gradients: bool = False, norm_type: float = 2.0) -> dict[str, float]:
    """The norm of each whole parameter, or of its gradient, by name; the same on every rank. Collective.

    All parameters on one mesh take one all-reduce for each axis that they are sharded over, none if they are
    replicated; norms are computed in float64. Parameters that are not sharded (ignored ones) count as this rank has
    them; those without a gradient are left out.

    Raises ValueError for a norm type that is not positive, RuntimeError for a gradient that is not reduced yet.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type: expected a positive number or inf, got {norm_type!r}")
    tensors: dict[str, torch.Tensor] = {}
    for name, param in named_main_parameters(model):
        tensor = param.grad if gradients else param
        if tensor is None:
            continue
        if is_partial(tensor):
            raise RuntimeError(
                f"{name}: expected a reduced gradient, got one whose last microbatch is still to come"
            )
        # torch refuses the maximum of a tensor without elements.
        whole = tensor.detach() if tensor.numel() else torch.zeros(1)
        tensors[name] = whole if whole.is_floating_point() else whole.abs().double()
    found = norms("parameter_norms", list(tensors.values()), norm_type, torch.float64)
    if not found:
        return {}
    # One copy to the host for all: asking tensor by tensor would wait for the device each time.
    values = torch.stack([norm.to(found[0].device) for norm in found]).tolist()
    return dict(zip(tensors, values, strict=True))
