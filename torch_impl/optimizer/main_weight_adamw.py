"""AdamW on the main weights of sharded modules. ``torch_impl.optimizer.update`` lists the order of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_impl.dtensor.local import is_partial, local_of
from torch_impl.optimizer.moments import MomentFormat
from torch_impl.optimizer.offload import Share, Transfers, transfers_for
from torch_impl.optimizer.update import ParameterUpdate, update
from torch_impl.runtime.ownership import taken_by


class MainWeightAdamW(torch.optim.Optimizer):
    """AdamW, bit for bit what ``torch.optim.AdamW(fused=True)`` computes for this rank's rows of each parameter.

    Cut otherwise, the same elements may differ in the last bit: torch's CPU kernel rounds the last elements of a
    tensor, those that do not fill a vector register, differently.

    Main weights are the parameters themselves: there is no second copy. Moments are DTensors placed like their
    parameter; ``step`` is a float32 CPU scalar per parameter. Parameters of which this rank holds no rows have (empty)
    moments like all others, so that all ranks have the same keys. Weight, gradient and moments of one dtype are updated
    in place; others are converted, a chunk at a time, to float32 (of float64 parameters: float64) and back. Ordinary
    tensors are updated as well.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        offload_fraction: float = 0.0,
        maximize: bool = False,
        amsgrad: bool = False,
    ) -> None:
        """``params``, ``lr`` (a number or a tensor of one element), ... as in ``torch.optim.AdamW``.

        exp_avg_dtype, exp_avg_sq_dtype: in which moments are stored between steps: float32 (for float64 parameters
            float64), bfloat16, or, with a scale per row, float16, float8_e4m3fn or float8_e5m2 (``optimizer.moments``).
        offload_fraction: part of the state, by elements, to the nearest parameter, that lives in CPU memory and is
            fetched for the update. Results and checkpoints are those of no offload, to the byte.

        Raises ValueError for a negative ``lr``, ``eps`` or ``weight_decay``, betas outside [0, 1), another dtype, a
        fraction outside [0, 1] or ``amsgrad=True``; RuntimeError for parameters that were collected before
        ``fully_shard`` took them.
        """
        self._formats = (
            MomentFormat("exp_avg", exp_avg_dtype),
            MomentFormat("exp_avg_sq", exp_avg_sq_dtype, positive=True),
        )
        self._share = Share(offload_fraction)
        self._offloaded: set[nn.Parameter] = set()
        self._updates: dict[nn.Parameter, ParameterUpdate] = {}
        self._transfers: dict[torch.device, Transfers] = {}
        numbers = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        defaults = {**numbers, "maximize": maximize}
        _check_hyperparameters({**numbers, "amsgrad": amsgrad})
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Raises the errors of the constructor; the group is then not added."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_hyperparameters(group)
            for index in range(len(group["params"])):
                _check_not_taken(group, index)
        except Exception:
            self.param_groups.pop()
            raise
        self._offloaded.update(param for param in group["params"] if self._share.picks(param.numel()))

    def init_state(self) -> None:
        """Create the state of all trainable parameters that have none: zero moments, step 0. Changes no weight."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad and not self.state.get(param):
                    self.state[param] = self._initial_state(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """Update all parameters that have a gradient; returns what ``closure`` returns.

        Raises RuntimeError when gradients were not reduced over the ranks yet, or for parameters that ``fully_shard``
        took after this optimizer was built; nothing is updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [self._with_gradients(group) for group in self.param_groups]
        for group, by_device in zip(self.param_groups, work, strict=True):
            for device, (updates, grads) in by_device.items():
                # Counted also for ranks without rows: all ranks must agree that the weights have changed.
                torch.autograd.graph.increment_version([one.weight for one in updates])
                torch._foreach_add_([one.step for one in updates], 1.0)
                if device not in self._transfers:
                    self._transfers[device] = transfers_for(device)
                update(updates, grads, group, self._transfers[device])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but moments are stored as this optimizer stores them, whatever the dtypes they were saved in.

        Raises ValueError for moments that are placed otherwise than their parameter, or for state of another kind of
        optimizer; nothing is changed then.
        """
        before = {"state": self.state, "param_groups": self.param_groups}
        # torch would turn all moments into the parameter's dtype on its device; sealed, they reach _adopt as they are.
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, loaded: _sealed(loaded)),
            self.register_load_state_dict_post_hook(lambda _: self._adopt(), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.__setstate__(before)
            raise
        finally:
            for hook in hooks:
                hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_formats": self._formats, "_share": self._share, "_offloaded": self._offloaded}
        return {**super().__getstate__(), **own, "_transfers": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._updates = {}
        for group in self.param_groups:
            group.setdefault("maximize", False)

    def _with_gradients(
        self, group: dict[str, Any]
    ) -> dict[torch.device, tuple[list[ParameterUpdate], list[torch.Tensor]]]:
        """Parameters that have a gradient, and their local gradients, by device; all checks are made here."""
        found: dict[torch.device, tuple[list[ParameterUpdate], list[torch.Tensor]]] = {}
        for index, param in enumerate(group["params"]):
            one = self._updates.get(param)
            if one is None or not one.made_by_unit:
                _check_not_taken(group, index)
            grad = param.grad
            if grad is None:
                continue
            if one is None or not one.is_current(self.state.get(param)):
                one = self._update_of(param)
            local = _checked_gradient(grad, one)
            device = one.weight.device
            if device not in found:
                found[device] = ([], [])
            updates, grads = found[device]
            updates.append(one)
            grads.append(local)
        return found

    def _initial_state(self, param: nn.Parameter) -> dict[str, torch.Tensor]:
        if param.is_complex():
            raise TypeError(
                f"parameter of shape {tuple(param.shape)}: expected real numbers, got {param.dtype}"
            )
        state = {"step": torch.zeros((), dtype=torch.float32)}
        for kind in self._formats:
            state.update(kind.zeros(param, param in self._offloaded))
        return state

    def _update_of(self, param: nn.Parameter) -> ParameterUpdate:
        if not self.state.get(param):
            self.state[param] = self._initial_state(param)
        one = ParameterUpdate(param, self.state[param], self._formats, param in self._offloaded)
        self._updates[param] = one
        return one

    def _adopt(self) -> None:
        """Turn the sealed state of a load into this optimizer's."""
        for group in self.param_groups:
            _check_hyperparameters(group)
        for param, sealed in self.state.items():
            saved = {key: value.content for key, value in sealed.items()}
            self.state[param] = self._adopted(param, saved) if saved else {}

    def _adopted(self, param: torch.Tensor, saved: dict[str, Any]) -> dict[str, torch.Tensor]:
        needed = {"step", *(kind.key for kind in self._formats)}
        if not needed <= saved.keys() <= needed | {kind.scale_key for kind in self._formats}:
            raise ValueError(
                f"state of a parameter of shape {tuple(param.shape)}: expected {', '.join(sorted(needed))} (of AdamW "
                f"without amsgrad), got {', '.join(sorted(saved))}"
            )
        step = torch.as_tensor(saved["step"]).detach().to("cpu", torch.float32)
        state = {"step": step}
        for kind in self._formats:
            stored, scale = saved[kind.key], saved.get(kind.scale_key)
            _check_placement(kind.key, stored, param)
            state.update(kind.adopt(param, stored, scale, int(step.item()), param in self._offloaded))
        return state


@dataclass(frozen=True)
class _Sealed:
    """Keeps a value of a state dict as it is: torch converts tensors and containers only."""

    content: Any


def _sealed(loaded: dict[str, Any]) -> dict[str, Any]:
    state = {key: {name: _Sealed(v) for name, v in own.items()} for key, own in loaded["state"].items()}
    return {**loaded, "state": state}


def _check_hyperparameters(group: Mapping[str, Any]) -> None:
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(
            f"MainWeightAdamW: expected lr of one element, got a tensor of shape {tuple(lr.shape)}"
        )
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"MainWeightAdamW: expected {name} >= 0, got {group[name]}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"MainWeightAdamW: expected two betas in [0, 1), got {betas}")
    if group.get("amsgrad"):
        raise ValueError(
            "MainWeightAdamW: expected amsgrad=False, got True; use torch.optim.AdamW(amsgrad=True)"
        )


def _described(group: Mapping[str, Any], index: int) -> str:
    param, names = group["params"][index], group.get("param_names")
    return f"parameter of shape {tuple(param.shape)}" if names is None else f"parameter {names[index]!r}"


def _check_not_taken(group: Mapping[str, Any], index: int) -> None:
    unit = taken_by(group["params"][index])
    if unit is not None:
        raise RuntimeError(
            f"{_described(group, index)} was collected before fully_shard took it into a {unit} unit, and is not "
            "trained any more: build the optimizer after sharding, from model.parameters()"
        )


def _checked_gradient(grad: torch.Tensor, one: ParameterUpdate) -> torch.Tensor:
    """The local gradient."""
    placements = grad.placements if isinstance(grad, DTensor) else None
    if placements != one.placements or grad.shape != one.shape:
        if is_partial(grad):
            raise RuntimeError(
                f"gradient of a parameter of shape {tuple(one.shape)} is not reduced over the ranks: run the last "
                "backward of the step outside no_sync(), with set_is_last_backward(True) and "
                "set_requires_gradient_sync(True)"
            )
        _check_placement("gradient", grad, one.param)
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"gradient of a parameter of shape {tuple(one.shape)}: expected a dense tensor, got {grad.layout}; use "
            "sparse=False or torch.optim.SparseAdam"
        )
    return local_of(grad)


def _check_placement(what: str, tensor: Any, param: Any) -> None:
    expected = param.placements if isinstance(param, DTensor) else None
    found = tensor.placements if isinstance(tensor, DTensor) else None
    if expected != found or tensor.shape != param.shape:
        raise ValueError(
            f"{what} of a parameter of shape {tuple(param.shape)}: expected placements {expected}, got shape "
            f"{tuple(tensor.shape)} with placements {found}"
        )
