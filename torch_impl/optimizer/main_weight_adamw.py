"""AdamW on the main weights of sharded modules. ``torch_impl.optimizer.update`` lists the order of operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torch_impl.dtensor.local import local_of
from torch_impl.optimizer.arguments import check_flag, check_numbers, numbers_of
from torch_impl.optimizer.main_weight import MainWeightOptimizer
from torch_impl.optimizer.moments import MomentFormat
from torch_impl.optimizer.offload import Transfers
from torch_impl.optimizer.update import Group, Tensors, Updates, fused_adamw, update


class MainWeightAdamW(MainWeightOptimizer):
    """AdamW, bit for bit equal to ``torch.optim.AdamW(fused=True)`` on this rank's rows of each parameter.

    With ``adam_w_mode=False`` it equals ``torch.optim.Adam(fused=True)`` in the same way.

    If rows are cut differently, the same elements may differ in the last bit: torch's CPU kernel uses another rounding
    for the last elements of a tensor, which do not fill a vector register.

    Main weights are the parameters themselves: there is no second copy. Moments are DTensors placed like their
    parameter; ``step`` is a float32 scalar per parameter, on the CPU unless ``capturable``. Parameters without rows on
    this rank have (empty) moments like all others, so that all ranks have the same keys. If weight, gradient and
    moments have one dtype, they are updated in place. Otherwise they are converted, a chunk at a time, to float32
    (float64 for float64 parameters) and back, and so are weights that are stored with remainders
    (``MixedPrecisionPolicy(store_param_remainders=True)``). Ordinary tensors are updated as well.
    """

    state_of = "AdamW without amsgrad"
    updates_remainders = True

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
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = False,
        maximize: bool = False,
        amsgrad: bool = False,
    ) -> None:
        """``params``, ``lr`` (a number or a tensor of one element), ... as in ``torch.optim.AdamW``.

        exp_avg_dtype, exp_avg_sq_dtype: the dtype in which moments are stored between steps: float32 (float64 for
            float64 parameters), bfloat16, or, with a scale per row, float16, float8_e4m3fn or float8_e5m2
            (``optimizer.moments``).
        offload_fraction: the part of the state, by elements, to the nearest parameter, that is stored in CPU memory and
            fetched for the update. Results and checkpoints are byte for byte the same as without offload.
        adam_w_mode: False adds ``weight_decay`` times the weight to the gradient (L2), as ``torch.optim.Adam`` does.
        bias_correction: False divides neither moment by ``1 - beta**step``.
        capturable: ``step`` is stored on the parameter's device. With an ``lr`` tensor on that device, a step never
            waits for the device, so that a CUDA graph can capture it. On the CPU it changes nothing.

        ``adam_w_mode`` and ``bias_correction`` are options of a parameter group, which state dicts restore like ``lr``;
        state of torch's Adam counts as ``adam_w_mode=False``. ``capturable`` and the dtypes are not restored.

        Raises ValueError for a negative ``lr``, ``eps`` or ``weight_decay``, betas outside [0, 1), another dtype, a
        fraction outside [0, 1], ``amsgrad=True``, or ``capturable`` with offload or with moments that have scales,
        whose update waits for the device; TypeError for other types; RuntimeError for parameters that were collected
        before ``fully_shard`` took them.
        """
        formats = (
            MomentFormat("exp_avg", exp_avg_dtype),
            MomentFormat("exp_avg_sq", exp_avg_sq_dtype, positive=True),
        )
        check_flag("capturable", capturable, "MainWeightAdamW")
        self._capturable = capturable
        if capturable:
            _check_capturable(formats, offload_fraction)
        betas = numbers_of("betas", betas, 2, "MainWeightAdamW")
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"adam_w_mode": adam_w_mode, "bias_correction": bias_correction, "maximize": maximize}
        check_adamw({**defaults, "amsgrad": amsgrad})
        super().__init__(params, defaults, formats, offload_fraction)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_capturable": self._capturable}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            # Older state has no modes, and torch has another name for one of them.
            torchs = group.get("decoupled_weight_decay", self.defaults.get("adam_w_mode", True))
            group.setdefault("adam_w_mode", torchs)
            group.setdefault("bias_correction", self.defaults.get("bias_correction", True))

    def _step_device(self, param: torch.Tensor) -> torch.device:
        return local_of(param).device if self._capturable else torch.device("cpu")

    def _check(self, group: Mapping[str, Any]) -> None:
        check_adamw(group)

    def _update(self, updates: Updates, grads: Tensors, group: Group, transfers: Transfers) -> None:
        update(updates, grads, group, transfers, fused_adamw, rounds_once=True)


def check_adamw(group: Mapping[str, Any], of: str = "MainWeightAdamW") -> None:
    """Raises ValueError or TypeError for hyperparameters out of range; ``of`` begins the text."""
    check_numbers(group, of, ("lr", "eps", "weight_decay"))
    betas = numbers_of("betas", group["betas"], 2, of)
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{of}: expected two betas in [0, 1), got {betas}")
    for name in ("adam_w_mode", "bias_correction"):
        check_flag(name, group[name], of)
    check_flag("maximize", group.get("maximize", False), of)
    if group.get("amsgrad"):
        raise ValueError(f"{of}: expected amsgrad=False, got True; use torch.optim.AdamW(amsgrad=True)")


def _check_capturable(formats: Iterable[MomentFormat], offload_fraction: float) -> None:
    if offload_fraction:
        raise ValueError(
            f"MainWeightAdamW(capturable=True): expected offload_fraction=0, got {offload_fraction}: a step waits for "
            "its transfers"
        )
    for moment in formats:
        if moment.dtype.itemsize == 1 or moment.dtype == torch.float16:
            raise ValueError(
                f"MainWeightAdamW(capturable=True): expected {moment.key}_dtype float32 or "
                f"bfloat16, got {moment.dtype}: storing a moment with scales needs the value of step "
                "on the CPU"
            )
