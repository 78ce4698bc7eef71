"""AdamW on the main weights of sharded modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_impl.dtensor import local_of
from torch_impl.dtensor_ops import count_write

_MOMENTS = ("exp_avg", "exp_avg_sq")


class MainWeightAdamW(torch.optim.Optimizer):
    """AdamW, bit for bit what ``torch.optim.AdamW(fused=True)`` computes for this rank's rows of each parameter.

    Cut otherwise, the same elements may differ in the last bit: torch's CPU kernel rounds the last elements of a
    tensor, those that do not fill a vector register, differently.

    Main weights are the parameters themselves: there is no second copy. Moments are DTensors placed like their
    parameter, in its dtype; ``step`` is a float32 CPU scalar per parameter. Parameters of which this rank holds no rows
    have (empty) moments like all others, so that all ranks have the same keys. Gradients of another dtype than the
    parameter are cast for the update. Ordinary tensors are updated as well.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        """Raises ValueError for a negative ``lr``, ``eps`` or ``weight_decay`` or betas outside [0, 1)."""
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"MainWeightAdamW: expected {name} >= 0, got {value}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"MainWeightAdamW: expected two betas in [0, 1), got {betas}")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})

    def init_state(self) -> None:
        """Create the state of all trainable parameters that have none: zero moments, step 0. Changes no weight."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    self._state_of(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """Update all parameters that have a gradient; returns what ``closure`` returns.

        Raises RuntimeError when gradients were not reduced over the ranks yet.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_kind: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
            for param in group["params"]:
                if param.grad is not None:
                    by_kind.setdefault((param.device, param.dtype), []).append(param)
            for params in by_kind.values():
                self._update(params, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. Raises ValueError for moments that are placed otherwise than their parameter."""
        super().load_state_dict(state_dict)
        for param, state in self.state.items():
            for key in _MOMENTS:
                if key in state:
                    _check_placement(key, state[key], param)

    def _state_of(self, param: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for key in _MOMENTS:
                state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state

    def _update(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        for param in params:
            _check_gradient(param)
        states = [self._state_of(param) for param in params]
        torch._foreach_add_([state["step"] for state in states], 1.0)
        weights, grads, firsts, seconds, steps = [], [], [], [], []
        on_device: dict[float, torch.Tensor] = {}
        for param, state in zip(params, states, strict=True):
            # Counted also for ranks without rows: all ranks must agree that the weights have changed.
            count_write(param)
            weight = local_of(param)
            if weight.numel() == 0:
                continue
            step = state["step"].item()
            if step not in on_device:
                on_device[step] = torch.tensor(step, dtype=torch.float32, device=weight.device)
            weights.append(weight)
            assert param.grad is not None
            grads.append(local_of(param.grad).to(weight.dtype))
            firsts.append(local_of(state["exp_avg"]))
            seconds.append(local_of(state["exp_avg_sq"]))
            steps.append(on_device[step])
        if weights:
            torch._fused_adamw_(
                weights,
                grads,
                firsts,
                seconds,
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


def _check_gradient(param: nn.Parameter) -> None:
    grad = param.grad
    if isinstance(grad, DTensor) and grad.placements[0].is_partial():
        raise RuntimeError(
            f"gradient of a parameter of shape {tuple(param.shape)} is not reduced over the ranks: run the last "
            "backward of the step outside no_sync(), with set_is_last_backward(True) and "
            "set_requires_gradient_sync(True)"
        )
    _check_placement("gradient", grad, param)


def _check_placement(what: str, tensor: Any, param: Any) -> None:
    expected = param.placements if isinstance(param, DTensor) else None
    found = tensor.placements if isinstance(tensor, DTensor) else None
    if expected != found or tensor.shape != param.shape:
        raise ValueError(
            f"{what} of a parameter of shape {tuple(param.shape)}: expected placements {expected}, got shape "
            f"{tuple(tensor.shape)} with placements {found}"
        )
