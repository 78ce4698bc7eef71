"""The layouts in which PyTorch programs save a model with its optimizer: how each is made, and how it is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tests.support.bridge.trainings import Model

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
State = dict[str, Any]
Step = Callable[[torch.Tensor], Any]


def _named(model: Model, optimizer: torch.optim.Optimizer, options: StateDictOptions | None) -> State:
    weights, state = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": state}


def _load_named(options: StateDictOptions | None) -> Callable[[Model, torch.optim.Optimizer, State], None]:
    def load(model: Model, optimizer: torch.optim.Optimizer, state: State) -> None:
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )

    return load


def _at_root(model: Model, optimizer: torch.optim.Optimizer) -> State:
    state = _named(model, optimizer, _FLAT)
    return {**state["model"], **state["optimizer"]}


def _load_at_root(model: Model, optimizer: torch.optim.Optimizer, state: State) -> None:
    optim = {name: value for name, value in state.items() if name.startswith(("state.", "param_groups."))}
    weights = {name: value for name, value in state.items() if name not in optim}
    _load_named(_FLAT)(model, optimizer, {"model": weights, "optimizer": optim})


def _numbered(step: Step, *, in_group: bool = False) -> Callable[[Model, torch.optim.Optimizer], State]:
    """``optimizer.state_dict()``, with another form of the step, or with one for each group."""

    def save(model: Model, optimizer: torch.optim.Optimizer) -> State:
        state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        kept = state["optimizer"]["state"]
        for group in state["optimizer"]["param_groups"]:
            for number in group["params"]:
                if "step" in kept.get(number, {}):
                    value = step(kept[number].pop("step"))
                    (group if in_group else kept[number])["step"] = value
        return state

    return save


def _load_numbered(model: Model, optimizer: torch.optim.Optimizer, state: State) -> None:
    model.load_state_dict(state["model"])
    optim = copy.deepcopy(state["optimizer"])
    for group in optim["param_groups"]:
        of_group = group.pop("step", None)
        for number in group["params"]:
            kept = optim["state"].get(number, {})
            # Stock DCP puts a loaded Python number below the key as text.
            kept.update(optim["state"].pop(str(number), {}))
            if "exp_avg" in kept:
                kept["step"] = torch.as_tensor(kept.get("step", of_group), dtype=torch.float32).reshape(())
    optimizer.load_state_dict(optim)


@dataclass(frozen=True)
class Layout:
    """save: the state dict of a model and its optimizer. load: puts it back."""

    name: str
    save: Callable[[Model, torch.optim.Optimizer], State]
    load: Callable[[Model, torch.optim.Optimizer, State], None]
    numbered: bool = False

    def __str__(self) -> str:
        return self.name

    def write(self, model: Model, optimizer: torch.optim.Optimizer, path: Path) -> None:
        """With torch.save for a path that ends in .pt, else as DCP."""
        state = self.save(model, optimizer)
        if path.suffix == ".pt":
            torch.save(state, path)
        else:
            dcp.save(state, checkpoint_id=path, no_dist=True)

    def read(self, model: Model, optimizer: torch.optim.Optimizer, path: Path) -> None:
        """By stock DCP, into a state dict that the program makes."""
        state = self.save(model, optimizer)
        dcp.load(state, checkpoint_id=path, no_dist=True)
        self.load(model, optimizer, state)


def _lightning(model: Model, optimizer: torch.optim.Optimizer) -> State:
    state = _numbered(_same)(model, optimizer)
    return {"state_dict": state["model"], "optimizer_states": [state["optimizer"]], "epoch": 1}


def _load_lightning(model: Model, optimizer: torch.optim.Optimizer, state: State) -> None:
    _load_numbered(
        model, optimizer, {"model": state["state_dict"], "optimizer": state["optimizer_states"][0]}
    )


def _in_ddp(model: Model, optimizer: torch.optim.Optimizer) -> State:
    state = _numbered(_same)(model, optimizer)
    return {**state, "model": {f"module.{name}": value for name, value in state["model"].items()}}


def _load_in_ddp(model: Model, optimizer: torch.optim.Optimizer, state: State) -> None:
    weights = {name.removeprefix("module."): value for name, value in state["model"].items()}
    _load_numbered(model, optimizer, {**state, "model": weights})


def _same(step: torch.Tensor) -> torch.Tensor:
    return step


LAYOUTS = (
    Layout("by name", lambda m, o: _named(m, o, None), _load_named(None)),
    Layout("flattened", lambda m, o: _named(m, o, _FLAT), _load_named(_FLAT)),
    Layout("flattened, at the root", _at_root, _load_at_root),
    Layout("numbered", _numbered(_same), _load_numbered, numbered=True),
    Layout("step is an int", _numbered(lambda step: int(step)), _load_numbered, numbered=True),
    Layout("step of shape [1]", _numbered(lambda step: step.reshape(1)), _load_numbered, numbered=True),
    Layout(
        "step in the group", _numbered(lambda step: int(step), in_group=True), _load_numbered, numbered=True
    ),
    Layout("Lightning", _lightning, _load_lightning, numbered=True),
    Layout("in DistributedDataParallel", _in_ddp, _load_in_ddp, numbered=True),
)
