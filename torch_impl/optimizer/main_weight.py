"""The common part of the optimizers of main weights: state, its location, and the checks before an update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_impl.dtensor.local import is_partial, local_of
from torch_impl.dtensor.refusals import described
from torch_impl.dtensor.remainders import written_with_remainders
from torch_impl.optimizer.arguments import check_group, check_no_remainders, check_params
from torch_impl.optimizer.moments import MomentFormat
from torch_impl.optimizer.offload import Share, Transfers, transfers_for
from torch_impl.optimizer.update import Group, ParameterUpdate, Tensors, Updates
from torch_impl.runtime.ground.ownership import taken_by


class MainWeightOptimizer(torch.optim.Optimizer):
    """An optimizer on this rank's rows of each parameter; subclasses define the moments and compute the update.

    Main weights are the parameters themselves: there is no second copy. Moments are DTensors placed like their
    parameter; ``step`` is a float32 scalar per parameter, on the CPU unless an optimizer says otherwise. Parameters
    without rows on this rank have (empty) moments like all others, so that all ranks have the same keys. Ordinary
    tensors are updated as well.
    """

    state_of: ClassVar[str]
    """The optimizer to which the state belongs, in messages."""
    updates_remainders: ClassVar[bool] = False
    """Whether weights may be stored with remainders."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        formats: Sequence[MomentFormat],
        offload_fraction: float,
    ) -> None:
        """``formats``: of all moments that a parameter may have. Raises the errors of ``add_param_group``."""
        check_params(params, type(self).__name__)
        self._formats = tuple(formats)
        self._share = Share(offload_fraction)
        self._offloaded: set[nn.Parameter] = set()
        self._updates: dict[nn.Parameter, ParameterUpdate] = {}
        self._transfers: dict[torch.device, Transfers] = {}
        super().__init__(params, defaults)

    @abstractmethod
    def _check(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError for hyperparameters out of range, TypeError for other types."""

    @abstractmethod
    def _update(self, updates: Updates, grads: Tensors, group: Group, transfers: Transfers) -> None:
        """Update parameters of one group on one device by local gradients; the steps already count this update."""

    def _formats_in(self, group: Mapping[str, Any]) -> tuple[MomentFormat, ...]:
        """The moments of this group's parameters."""
        return self._formats

    def _picked(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters of a new group whose state will be stored in CPU memory."""
        return [param for param in params if self._share.picks(param.numel())]

    def _step_device(self, param: torch.Tensor) -> torch.device:
        return torch.device("cpu")

    def _completed(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A parameter's saved state, completed with values that the stock optimizer of this kind does not keep."""
        return saved

    @property
    def moment_formats(self) -> tuple[MomentFormat, ...]:
        """The formats in which the moments are stored."""
        return self._formats

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Raises the errors of the constructor; then the group is not added."""
        check_group(param_group, type(self).__name__)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
            for index in range(len(group["params"])):
                _check_not_taken(group, index)
            if not self.updates_remainders:
                check_no_remainders(self, group["params"])
        except Exception:
            self.param_groups.pop()
            raise
        self._offloaded.update(self._picked(group["params"]))

    def offloads(self, param: torch.Tensor) -> bool:
        """Whether the state of this parameter is stored in CPU memory and fetched for the update."""
        return param in self._offloaded

    def init_state(self) -> None:
        """Create the state of all trainable parameters that have none: zero moments, step 0. Changes no weight."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad and not self.state.get(param):
                    self.state[param] = self._initial_state(param, group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch overloads it
        """Update all parameters that have a gradient; returns the result of ``closure``.

        Raises RuntimeError when gradients are not yet reduced over the ranks, or for parameters that ``fully_shard``
        took after this optimizer was built; then nothing is updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [self._with_gradients(group) for group in self.param_groups]
        for group, by_device in zip(self.param_groups, work, strict=True):
            for device, (updates, grads) in by_device.items():
                weights = [update.weight for update in updates]
                with written_with_remainders(weights):
                    # Also on ranks without rows: all ranks must agree that the weights have changed.
                    torch.autograd.graph.increment_version(weights)
                    torch._foreach_add_([update.step for update in updates], 1.0)
                    if device not in self._transfers:
                        self._transfers[device] = transfers_for(device)
                    self._update(updates, grads, group, self._transfers[device])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but moments are stored in this optimizer's formats, whatever dtypes they were saved in.

        Raises ValueError for moments that are not placed like their parameter, or for state of another kind of
        optimizer; then nothing is changed.
        """
        before = {"state": self.state, "param_groups": self.param_groups}
        # torch would convert all moments to the parameter's dtype and device; sealed, they reach _adopt unchanged.
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
        """Parameters that have a gradient, and their local gradients, by device; this makes all checks."""
        by_device: dict[torch.device, tuple[list[ParameterUpdate], list[torch.Tensor]]] = {}
        for index, param in enumerate(group["params"]):
            update = self._updates.get(param)
            if update is None or not update.made_by_unit:
                _check_not_taken(group, index)
            grad = param.grad
            if grad is None:
                continue
            # Schedulers may change options that determine the moments, such as whether there is momentum.
            formats = self._formats_in(group)
            if update is None or update.formats != formats or not update.is_current(self.state.get(param)):
                update = self._update_of(param, group)
            local = _checked_gradient(grad, update)
            device = update.weight.device
            updates, grads = by_device.setdefault(device, ([], []))
            updates.append(update)
            grads.append(local)
        return by_device

    def _initial_state(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        if param.is_complex():
            raise TypeError(
                f"parameter of shape {tuple(param.shape)}: expected real numbers, got {param.dtype}"
            )
        formats = self._formats_in(group)
        step = torch.zeros((), dtype=torch.float32, device=self._step_device(param))
        state = {"step": step} if formats else {}
        for moment in formats:
            state.update(moment.zeros(param, param in self._offloaded))
        return state

    def _update_of(self, param: nn.Parameter, group: Mapping[str, Any]) -> ParameterUpdate:
        formats = self._formats_in(group)
        if not self.state.get(param) and formats:
            self.state[param] = self._initial_state(param, group)
        update = ParameterUpdate(param, self.state[param], formats, param in self._offloaded)
        self._updates[param] = update
        return update

    def _adopt(self) -> None:
        """Convert the sealed state of a load to this optimizer's."""
        groups = {}
        for index, group in enumerate(self.param_groups):
            try:
                self._check(group)
            except (KeyError, TypeError) as error:
                wrong = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
                keys = ", ".join(sorted(map(str, group.keys() - {"params"})))
                raise ValueError(
                    f"load_state_dict: expected param_groups of {self.state_of}, got one of another kind of optimizer: "
                    f"{wrong} in group {index}, which has {keys}"
                ) from None
            groups.update(dict.fromkeys(group["params"], group))
        for param, sealed in self.state.items():
            saved = {key: value.content for key, value in sealed.items()}
            self.state[param] = self._adopted(param, groups[param], saved) if saved else {}

    def _adopted(
        self, param: torch.Tensor, group: Mapping[str, Any], saved: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        formats = self._formats_in(group)
        saved = self._completed(saved)
        needed = {"step", *(moment.key for moment in formats)}
        if not needed <= saved.keys() <= needed | {moment.scale_key for moment in formats}:
            raise ValueError(
                f"state of a parameter of shape {tuple(param.shape)}: expected {', '.join(sorted(needed))} (of "
                f"{self.state_of}), got {', '.join(sorted(saved))}"
            )
        step = torch.as_tensor(saved["step"]).detach().to(self._step_device(param), torch.float32)
        state = {"step": step}
        for moment in formats:
            stored, scale = saved[moment.key], saved.get(moment.scale_key)
            _check_placement(moment.key, stored, param)
            state.update(moment.adopt(param, stored, scale, int(step.item()), param in self._offloaded))
        return state


@dataclass(frozen=True)
class _Sealed:
    """Keeps a value of a state dict unchanged: torch converts only tensors and containers."""

    content: Any


def _sealed(loaded: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(loaded, Mapping) or not {"state", "param_groups"} <= set(loaded):
        keys = sorted(map(str, loaded)) if isinstance(loaded, Mapping) else type(loaded).__name__
        raise ValueError(
            f"load_state_dict: expected an optimizer's state_dict(), with 'state' and 'param_groups', got {keys}"
        )
    state = {key: {name: _Sealed(v) for name, v in own.items()} for key, own in loaded["state"].items()}
    return {**loaded, "state": state}


def _described(group: Mapping[str, Any], index: int) -> str:
    param, names = group["params"][index], group.get("param_names")
    return described(param, "parameter") if names is None else f"parameter {names[index]!r}"


def _check_not_taken(group: Mapping[str, Any], index: int) -> None:
    unit = taken_by(group["params"][index])
    if unit is not None:
        raise RuntimeError(
            f"{_described(group, index)} was collected before fully_shard took it into a {unit} unit, and is no longer "
            "trained: build the optimizer after sharding, from model.parameters()"
        )


def _checked_gradient(grad: torch.Tensor, update: ParameterUpdate) -> torch.Tensor:
    """The local gradient."""
    placements = grad.placements if isinstance(grad, DTensor) else None
    if placements != update.placements or grad.shape != update.shape:
        if is_partial(grad):
            raise RuntimeError(
                f"gradient of {described(update.param, 'a parameter')} is not reduced over the ranks: run the last "
                "backward of the step outside no_sync(), with set_is_last_backward(True) and "
                "set_requires_gradient_sync(True)"
            )
        _check_placement("gradient", grad, update.param)
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"gradient of {described(update.param, 'a parameter')}: expected a dense tensor, got {grad.layout}; use "
            "sparse=False or torch.optim.SparseAdam"
        )
    return local_of(grad)


def _check_placement(what: str, tensor: Any, param: Any) -> None:
    expected = param.placements if isinstance(param, DTensor) else None
    placements = tensor.placements if isinstance(tensor, DTensor) else None
    if expected != placements or tensor.shape != param.shape:
        raise ValueError(
            f"{what} of {described(param, 'a parameter')}: expected placements {expected}, got shape "
            f"{tuple(tensor.shape)} with placements {placements}"
        )
