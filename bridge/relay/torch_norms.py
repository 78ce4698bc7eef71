"""Norms of a torch run's weights and moments, sharded or not; separate, since JAX legs read `norms` without torch."""

from __future__ import annotations

import torch
from torch import nn

from bridge.relay.norms import KINDS

STATE = dict(zip(KINDS[1:], ("exp_avg", "exp_avg_sq"), strict=True))


def state_norms(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, with_moments: bool = True
) -> dict[str, dict[str, float]]:
    """The norms of whole parameters and of their moments after a step, in float64. Collective.

    ``with_moments``: False leaves out moments that are stored in low precision, which are too coarse to compare.
    """
    named = dict(model.named_parameters())
    kinds: dict[str, dict[str, torch.Tensor]] = {KINDS[0]: dict(named)}
    if with_moments:
        kinds |= {
            norm_kind: {name: optimizer.state[parameter][key] for name, parameter in named.items()}
            for norm_kind, key in STATE.items()
        }
    return {
        norm_kind: {
            name: float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
            for name, tensor in tensors.items()
        }
        for norm_kind, tensors in kinds.items()
    }
