"""Muon on the main weights of sharded modules. ``torch_impl.optimizer.muon_update`` describes the computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bridge.core.sharding.layout.matrices import MUON_DIMENSIONS
from torch_impl.optimizer.arguments import check_flag, check_group, check_number, check_numbers, numbers_of
from torch_impl.optimizer.main_weight import MainWeightOptimizer
from torch_impl.optimizer.main_weight_adamw import check_adamw
from torch_impl.optimizer.moments import MomentFormat
from torch_impl.optimizer.muon_update import update_matrices
from torch_impl.optimizer.offload import Transfers
from torch_impl.optimizer.update import Group, Tensors, Updates, fused_adamw, update

_ADJUSTMENTS = (None, "original", "match_rms_adamw")
# Options that AdamW groups do not use.
_OF_MUON = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")


def is_matrix(name: str | None, param: torch.Tensor) -> bool:
    """Whether a parameter is a matrix, or a stack of matrices such as the weights of experts."""
    return param.ndim in MUON_DIMENSIONS["torch"]


class MainWeightMuon(MainWeightOptimizer):
    """Muon for matrices, ``torch.optim.Muon``'s arithmetic on whole matrices for any sharding; AdamW for the rest.

    A parameter group is for Muon or for AdamW. A group sets this by ``"use_muon": True`` or ``False``; a group without
    ``use_muon`` is split in two by the rule ``use_muon``. Embeddings and output heads are matrices too, which Muon's
    authors leave to AdamW: exclude them by groups, or by names::

        MainWeightMuon(
            model.named_parameters(),
            lr=2e-2,
            adamw_lr=3e-4,
            use_muon=lambda name, param: param.ndim == 2 and "embed" not in name and "head" not in name,
        )

    In a parameter of three dimensions each matrix is updated separately. Muon's state is ``momentum_buffer`` and
    ``step``; AdamW's state is the same as in ``MainWeightAdamW``. Matrices cut over ranks are sent in bfloat16 in each
    step; with ``granularity="tensor"`` each matrix is whole on one rank, and nothing is sent
    (``optimizer.muon_update``). All ranks must call ``step``, and have gradients for the same parameters.
    """

    state_of = "Muon, or of AdamW without amsgrad where use_muon is False"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: Callable[[str | None, torch.Tensor], bool] = is_matrix,
        adamw_lr: float | torch.Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
        momentum_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        offload_fraction: float = 0.0,
    ) -> None:
        """``params``, ``lr``, ... as in ``torch.optim.Muon``.

        use_muon: whether a parameter is for Muon, by its name (None unless ``params`` are named) and the parameter;
            called for groups without ``use_muon``. By default, all parameters of two and three dimensions.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay: for the other parameters, as ``lr``, ... in
            ``MainWeightAdamW``; ``adamw_lr`` is ``lr`` by default.
        momentum_dtype, exp_avg_dtype, exp_avg_sq_dtype: the dtype in which moments are stored between steps: float32
            (float64 for float64 parameters), bfloat16, or, with a scale per row, float16, float8_e4m3fn or float8_e5m2
            (``optimizer.moments``).
        offload_fraction: as in ``MainWeightAdamW``.

        Raises ValueError for hyperparameters out of range, 100 or more ``ns_steps``, another ``adjust_lr_fn``, another
        dtype, a fraction outside [0, 1], and for a parameter with fewer than two dimensions in a Muon group; TypeError
        for other types; RuntimeError for parameters that were collected before ``fully_shard`` took them.
        """
        formats = (
            MomentFormat("momentum_buffer", momentum_dtype, option="momentum_dtype"),
            MomentFormat("exp_avg", exp_avg_dtype),
            MomentFormat("exp_avg_sq", exp_avg_sq_dtype, positive=True),
        )
        if not callable(use_muon):
            raise TypeError(
                "MainWeightMuon: use_muon: expected a function of a parameter's name and the parameter, such as "
                f"lambda name, param: param.ndim == 2, got {use_muon!r}"
            )
        self._use_muon = use_muon
        self._chosen: set[nn.Parameter] | None = None
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": numbers_of("ns_coefficients", ns_coefficients, 3, "MainWeightMuon"),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        of_adamw = {"adamw_lr": adamw_lr, "adamw_eps": adamw_eps, "adamw_weight_decay": adamw_weight_decay}
        for name, number in of_adamw.items():
            if name != "adamw_lr" or number is not None:
                check_number(name, number, "MainWeightMuon")
        self._adamw = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "betas": numbers_of("adamw_betas", adamw_betas, 2, "MainWeightMuon"),
            "eps": adamw_eps,
            "weight_decay": adamw_weight_decay,
            "adam_w_mode": True,
            "bias_correction": True,
            "maximize": False,
        }
        self._check({**defaults, "use_muon": True, "params": ()})
        self._check({**self._adamw, "use_muon": False})
        super().__init__(params, defaults, formats, offload_fraction)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; a group without ``use_muon`` becomes one or two. Raises the constructor's errors."""
        check_group(param_group, "MainWeightMuon")
        if "use_muon" in param_group:
            self._add(param_group)
            return
        params_or_tensor = param_group["params"]
        listed = [params_or_tensor] if isinstance(params_or_tensor, torch.Tensor) else list(params_or_tensor)
        before = len(self.param_groups)
        # In the caller's order, as with other optimizers.
        params: list[Any] = [entry[1] if isinstance(entry, tuple) else entry for entry in listed]
        self._chosen = set(super()._picked(params))
        try:
            for use_muon in (True, False):
                own = [entry for entry in listed if self._is_for_muon(entry) == use_muon]
                if own:
                    self._add({**param_group, "params": own, "use_muon": use_muon})
        except Exception:
            del self.param_groups[before:]
            raise
        finally:
            self._chosen = None

    def _picked(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        if self._chosen is None:
            return super()._picked(params)
        return [param for param in params if param in self._chosen]

    def _is_for_muon(self, entry: Any) -> bool:
        name, param = entry if isinstance(entry, tuple) else (None, entry)
        return bool(self._use_muon(name, param))

    def _add(self, group: dict[str, Any]) -> None:
        use_muon = group["use_muon"]
        super().add_param_group(group if use_muon else {**self._adamw, **group})
        # torch gives every group all defaults.
        for key in () if use_muon else _OF_MUON:
            self.param_groups[-1].pop(key, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_use_muon": self._use_muon, "_adamw": self._adamw, "_chosen": None}

    def _check(self, group: Mapping[str, Any]) -> None:
        if "use_muon" not in group:
            raise ValueError(
                "MainWeightMuon: expected groups that have the option use_muon, got the groups of another optimizer"
            )
        if not group["use_muon"]:
            check_adamw(group, "MainWeightMuon, group with use_muon=False")
            return
        check_numbers(group, "MainWeightMuon", ("lr", "weight_decay", "momentum"))
        check_number("eps", group["eps"], "MainWeightMuon")
        check_flag("nesterov", group["nesterov"], "MainWeightMuon")
        if isinstance(group["ns_steps"], bool) or not isinstance(group["ns_steps"], int):
            raise TypeError(f"MainWeightMuon: ns_steps: expected an integer, got {group['ns_steps']!r}")
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(
                f"MainWeightMuon: adjust_lr_fn: expected one of {_ADJUSTMENTS}, got {group['adjust_lr_fn']!r}"
            )
        if not 0 <= group["ns_steps"] < 100 or len(group["ns_coefficients"]) != 3:
            raise ValueError(
                "MainWeightMuon: expected 0 <= ns_steps < 100 and three ns_coefficients, got "
                f"{group['ns_steps']} and {group['ns_coefficients']}"
            )
        for param in group["params"]:
            if param.ndim < 2:
                raise ValueError(
                    f"MainWeightMuon: expected matrices where use_muon is True, got a parameter of shape "
                    f"{tuple(param.shape)}; put it into a group with use_muon=False"
                )

    def _formats_in(self, group: Mapping[str, Any]) -> tuple[MomentFormat, ...]:
        return self._formats[:1] if group["use_muon"] else self._formats[1:]

    def _completed(self, saved: dict[str, Any]) -> dict[str, Any]:
        # torch.optim.Muon counts no steps.
        return {"step": 1.0, **saved} if "momentum_buffer" in saved else saved

    def _update(self, updates: Updates, grads: Tensors, group: Group, transfers: Transfers) -> None:
        if group["use_muon"]:
            update_matrices(updates, grads, group, transfers)
        else:
            update(updates, grads, group, transfers, fused_adamw, rounds_once=True)
