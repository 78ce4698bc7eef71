"""The self-test: faults that this batch and these weights could not reveal.

A comparison without findings is worth as much as the faults that it would find. So the self-test plants typical faults
in copies of the torch model, one at a time, and compares the module's output in float64 with the correct model's, over
the usual floor. The JAX model takes no part: if the two are the same, a fault of one is a fault of the other.

Each fault is small and common in ports: a norm's epsilon, a transposed matrix, slightly outdated weights, a bias left
out, two heads swapped, another rotary base, another activation, a mask that is off by one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bridge.parity.partners.rows import ratio_of
from bridge.parity.recorded.distance import FACTOR, distance, noise
from bridge.parity.recorded.recording import Call, Recording, Side
from bridge.parity.report_page.report import Revealed
from bridge.parity.torch.side import TorchSide

MOST_FAULTS = 60
"""Each fault costs one float64 forward of the whole model; a Llama of 32 layers has hundreds of faults."""


def plant_faults(
    side: Side, batch: Any, dtype: str = "float32", most: int = MOST_FAULTS
) -> Iterator[Revealed]:
    """Plant each typical fault in a copy of a torch model, and report whether ``batch`` reveals it.

    ``most``: the number of faults to try, spread evenly over the model. ``ValueError`` for a side that is not a torch
    model, such as a trace.
    """
    if not isinstance(side, TorchSide):
        raise ValueError(
            f"self_test: expected a torch model, in which faults can be planted, got {type(side).__name__}"
        )
    right = side.record(batch, "float64", backward=False)
    low = side.record(batch, dtype, backward=False)
    faults, owners = list(faults_of(side.model)), _owners(side)
    if len(faults) > most:
        # Evenly over the list, which follows the layers: with only the first faults, the deep half would stay untested.
        faults = [faults[number * len(faults) // most] for number in range(most)]
    for fault in faults:
        faulty = with_fault(side, fault).record(batch, "float64", backward=False)
        ratio = max(
            (_ratio(call, right, low, faulty, dtype) for call in _around(fault.module, right, owners)),
            default=0.0,
        )
        yield Revealed(fault.name, fault.module, ratio > FACTOR, ratio)


def with_fault(side: TorchSide, fault: Fault) -> TorchSide:
    """A side with a copy of the model that has the fault."""
    model = copy.deepcopy(side.model)
    fault.plant(model.get_submodule(fault.module))
    return TorchSide(model, side.loss, optimizer=side.optimizer)


def _owners(side: Side) -> set[str]:
    """Paths of modules that have parameters, their own or inside."""
    owners = {""}
    for name in side.weights():
        parts = name.split(".")[:-1]
        owners |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return owners


def _around(path: str, recording: Recording, owners: Container[str]) -> Sequence[Call]:
    """The module's calls; if it was not called (a table), the calls of the nearest enclosing module that was.

    A module without parameters has no partner in a comparison: its fault shows in the modules around it, or not.
    """
    if path not in owners:
        return [call for call in recording.calls if call.path in owners]
    while True:
        calls = [call for call in recording.calls if call.path == path]
        if calls or not path:
            return calls
        path = path.rpartition(".")[0]


def _ratio(call: Call, right: Recording, low: Recording, faulty: Recording, dtype: str) -> float:
    other, coarse = faulty.find(call.path, call.number), low.find(call.path, call.number)
    worst = 0.0
    for name, leaf in call.outputs.items():
        twin = None if other is None else other.outputs.get(name)
        if twin is None or twin.shape != leaf.shape:
            continue
        floor = noise(None if coarse is None else coarse.outputs.get(name), leaf, dtype)
        worst = max(worst, ratio_of(distance(leaf, twin, dtype), floor))
    return worst


_EPSILONS = ("eps", "epsilon", "variance_epsilon", "layer_norm_eps", "layer_norm_epsilon")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_STALE = 1e-3
"""A few training steps at usual rates move a weight by this fraction of its spread."""
_ROTARY = 50.0
"""From a base of 1e4 to Llama-3's of 5e5."""

Plant = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Fault:
    """``plant`` changes the module at the path ``module`` permanently: pass one of a copy."""

    name: str
    module: str
    plant: Plant


def faults_of(model: nn.Module) -> Iterator[Fault]:
    """All faults that this model can have, module by module."""
    for path, module in model.named_modules():
        for name in _EPSILONS:
            if isinstance(getattr(module, name, None), float):
                yield Fault(f"{name} ten times as large", path, partial(_enlarge, name))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1]:
                yield Fault(f"{name} transposed", path, _weight(name, lambda w: w.t().contiguous()))
            if parameter.ndim >= 2 and not isinstance(module, nn.Embedding):
                yield Fault(f"{name} a little old", path, _weight(name, _stale))
            if name == "bias" and parameter.is_floating_point():
                yield Fault("bias left out", path, _weight(name, torch.zeros_like))
        heads = _heads(model, module)
        if heads is not None:
            yield Fault("first two heads of the query swapped", path, _swap_heads(*heads))
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor):
            yield Fault(f"rotary base {_ROTARY:g} times as large", path, _rotary)
        if type(module).__name__ in _ACTIVATIONS:
            yield Fault("another activation", path, _activation)
        if "attention" in type(module).__name__.lower():
            yield Fault("mask off by one", path, _mask)


def _enlarge(name: str, module: nn.Module) -> None:
    setattr(module, name, 10 * getattr(module, name))


def _weight(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    def plant(module: nn.Module) -> None:
        parameter = module.get_parameter(name)
        with torch.no_grad():
            parameter.copy_(change(parameter.detach().clone()))

    return plant


def _stale(weight: torch.Tensor) -> torch.Tensor:
    # A separate generator: the model's random numbers stay those of the correct run.
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)
    return weight + _STALE * weight.std() * noise


def _heads(model: nn.Module, module: nn.Module) -> tuple[str, int] | None:
    """The query's projection below an attention module, and the number of heads."""
    query = next((n for n, _ in module.named_children() if n in ("q_proj", "query", "wq", "q")), None)
    if query is None or not isinstance(getattr(module.get_submodule(query), "weight", None), torch.Tensor):
        return None
    for owner in (module, getattr(model, "config", None)):
        for name in _HEADS:
            count = getattr(owner, name, None)
            if isinstance(count, int) and count > 1:
                rows = module.get_submodule(query).get_parameter("weight").shape[0]
                return (query, rows // count) if rows % count == 0 else None
    return None


def _swap_heads(query: str, size: int) -> Plant:
    def swapped(weight: torch.Tensor) -> torch.Tensor:
        return torch.cat((weight[size : 2 * size], weight[:size], weight[2 * size :]))

    return _weight(f"{query}.weight", swapped)


def _rotary(module: Any) -> None:
    count = module.inv_freq.shape[0]
    powers = torch.arange(count, dtype=torch.float64) / count
    module.inv_freq = (module.inv_freq.double() * _ROTARY**-powers).to(module.inv_freq)


_ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "SiLU": nn.functional.gelu,
    "SiLUActivation": nn.functional.gelu,
    "GELU": nn.functional.silu,
    "GELUActivation": nn.functional.silu,
    "NewGELUActivation": nn.functional.gelu,
    "GELUTanh": nn.functional.gelu,
    "PytorchGELUTanh": nn.functional.gelu,
    "ReLU": nn.functional.gelu,
}


def _activation(module: nn.Module) -> None:
    other = _ACTIVATIONS[type(module).__name__]
    module.register_forward_hook(lambda _, args, __: other(args[0]))


def _mask(module: nn.Module) -> None:
    module.register_forward_pre_hook(_shift_mask, with_kwargs=True)


def _shift_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    mask = kwargs.get("attention_mask")
    hidden = args[0] if args else kwargs.get("hidden_states")
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        return args, {**kwargs, "attention_mask": torch.roll(mask, 1, dims=-1)}
    # Fused attention that is causal by a flag.
    if mask is None and getattr(module, "is_causal", False) and isinstance(hidden, torch.Tensor):
        length = hidden.shape[1]
        least = torch.finfo(hidden.dtype).min
        hides = torch.full((length, length), least).triu().fill_diagonal_(0, wrap=False)
        mask = torch.roll(hides.to(hidden), 1, dims=-1)[None, None]
        return args, {**kwargs, "attention_mask": mask}
    return None
