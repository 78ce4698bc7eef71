"""SGD with momentum on the main weights of sharded modules.

For every element, these are the operations of ``jax_impl.optimizer.main_weight_sgd``. ``[x]`` is a number rounded once
to the dtype of the update, ``fma(x, y, z)`` is ``x * y + z`` rounded once; every other operation rounds::

    1   g = the gradient in the dtype of the update, negated if maximize
    2   g = fma([weight_decay], w, g)                   if weight_decay
    3   m = fma([1 - dampening], g, m * [momentum])     in the first step m = g; only with momentum
    4   g = fma([momentum], m, g) with nesterov, else m
    5   w = fma([-lr], g, w)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from bridge.core.sharding.policy.optimizer_state import together
from torch_impl.optimizer.arguments import check_flag, check_number, check_numbers
from torch_impl.optimizer.main_weight import MainWeightOptimizer
from torch_impl.optimizer.moments import MomentFormat
from torch_impl.optimizer.offload import Transfers
from torch_impl.optimizer.update import Group, Tensors, Updates, update

# Elements of the tensors that are updated together, unless one tensor is larger.
_TOGETHER = 1 << 20


class MainWeightSGD(MainWeightOptimizer):
    """SGD, bit for bit equal to ``torch.optim.SGD(foreach=True)``, wherever rows are cut.

    torch's for-loop has the same bits; ``fused=True`` rounds differently. Half-precision weights are updated in float32
    and rounded once, while torch rounds after every operation. State is ``momentum_buffer``, a DTensor placed like its
    parameter, and ``step``, a float32 CPU scalar; without momentum there is no state. The rest is as in
    ``MainWeightAdamW``.
    """

    state_of = "SGD"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        momentum_dtype: torch.dtype = torch.float32,
        offload_fraction: float = 0.0,
    ) -> None:
        """``params``, ``lr``, ... as in ``torch.optim.SGD``.

        momentum_dtype: the dtype in which momentum is stored between steps: float32 (float64 for float64 parameters),
            bfloat16, or, with a scale per row, float16, float8_e4m3fn or float8_e5m2 (``optimizer.moments``).
        offload_fraction: as in ``MainWeightAdamW``.

        Raises ValueError for a negative ``lr``, ``momentum`` or ``weight_decay``, for ``nesterov`` without momentum or
        with dampening, for another dtype and a fraction outside [0, 1]; TypeError for other types; RuntimeError for
        parameters that were collected before ``fully_shard`` took them.
        """
        formats = (MomentFormat("momentum_buffer", momentum_dtype, option="momentum_dtype"),)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        self._check(defaults)
        super().__init__(params, defaults, formats, offload_fraction)

    def _check(self, group: Mapping[str, Any]) -> None:
        check_numbers(group, "MainWeightSGD", ("lr", "momentum", "weight_decay"))
        check_number("dampening", group["dampening"], "MainWeightSGD")
        for name in ("nesterov", "maximize"):
            check_flag(name, group[name], "MainWeightSGD")
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise ValueError(
                "MainWeightSGD: nesterov: expected momentum > 0 and dampening = 0, got "
                f"momentum={group['momentum']}, dampening={group['dampening']}"
            )

    def _formats_in(self, group: Mapping[str, Any]) -> tuple[MomentFormat, ...]:
        return self._formats if group["momentum"] else ()

    def _completed(self, saved: dict[str, Any]) -> dict[str, Any]:
        # torch.optim.SGD has momentum from the first step on, but no step count.
        return {"step": 1.0, **saved}

    def _update(self, updates: Updates, grads: Tensors, group: Group, transfers: Transfers) -> None:
        update(updates, grads, group, transfers, _sgd, rounds_once=False)


def _sgd(weights: Tensors, grads: Tensors, moments: Sequence[Tensors], steps: Tensors, group: Group) -> None:
    lr = group["lr"].item() if isinstance(group["lr"], torch.Tensor) else group["lr"]
    # In batches, so that intermediate tensors take bounded memory.
    for numbers in together(range(len(weights)), lambda n: weights[n].numel(), _TOGETHER):
        own = [weights[n] for n in numbers]
        slopes = [grads[n] for n in numbers]
        if group["maximize"]:
            slopes = list(torch._foreach_neg(slopes))
        if group["weight_decay"]:
            slopes = list(torch._foreach_add(slopes, own, alpha=group["weight_decay"]))
        if group["momentum"]:
            buffers = [moments[n][0] for n in numbers]
            _accumulate(buffers, slopes, [steps[n] for n in numbers], group)
            if group["nesterov"]:
                slopes = list(torch._foreach_add(slopes, buffers, alpha=group["momentum"]))
            else:
                slopes = buffers
        torch._foreach_add_(own, slopes, alpha=-lr)


def _accumulate(buffers: Tensors, grads: Tensors, steps: Tensors, group: Group) -> None:
    """Line 3."""
    first = [step.item() == 1 for step in steps]
    started = [n for n, at_first in enumerate(first) if not at_first]
    if len(started) < len(buffers):
        new = [n for n, at_first in enumerate(first) if at_first]
        torch._foreach_copy_([buffers[n] for n in new], [grads[n] for n in new])
    if started:
        old = [buffers[n] for n in started]
        torch._foreach_mul_(old, group["momentum"])
        torch._foreach_add_(old, [grads[n] for n in started], alpha=1 - group["dampening"])
