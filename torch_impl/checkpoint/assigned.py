"""``load_state_dict(assign=True)`` into sharded modules.

Torch would put the given tensors in place of the sharded parameters. But sharded parameters are views of their unit's
buffers, and an optimizer may hold them. So the values are copied into the parameters instead, and torch assigns the
parameters to themselves::

    state["weight"]  DTensor placed like the parameter  --copy_-->  parameter, on the meta device given memory first
    anything else                                       --------->  RuntimeError; no unit of the module is changed

A hook of each sharded module does this, for all units below, before torch loads the module. Sibling units in a module
that is not itself sharded are loaded one after the other, so units that were loaded before an error stay loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_impl.fsdp_module import FSDPModule
from torch_impl.runtime.unit.group import ParameterGroup
from torch_impl.runtime.unit.unit import Unit

_DISTRIBUTE = (
    "make it a DTensor with torch.distributed.tensor.distribute_tensor(whole, param.device_mesh, param.placements), or "
    "load whole tensors without assign=True"
)


def load_assigned(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """A hook before ``module`` loads ``state``, a copy of the program's; see ``register_load_state_dict_pre_hook``."""
    if not metadata.get("assign_to_params_buffers", False):
        return
    names: dict[nn.Module, list[str]] = {}
    for name, below in module.named_modules(remove_duplicate=False):
        names.setdefault(below, []).append(f"{prefix}{name}." if name else prefix)
    units = dict.fromkeys(submodule._unit for submodule in names if isinstance(submodule, FSDPModule))
    loads = [_Load(unit) for unit in units]
    for load in loads:
        load.collect(names, state)
    # After all checks: an error leaves the model as it was.
    for load in loads:
        load.run()
    for load in loads:
        state.update(load.keys)


@dataclass
class _Load:
    """What a state dict has for the parameters of one unit: values by parameter; parameters by key of the state dict.

    groups: the groups that get their memory from this load.
    """

    unit: Unit
    values: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    keys: dict[str, nn.Parameter] = field(default_factory=dict)
    groups: list[ParameterGroup] = field(default_factory=list)

    def collect(self, names: Mapping[nn.Module, list[str]], state: Mapping[str, Any]) -> None:
        """RuntimeError for a value that does not fit its parameter, or if values for part of a group are missing."""
        for group in self.unit.groups:
            for param, key in _keys(group, names):
                if key in state:
                    _check(key, state[key], param)
                    self.keys[key] = param
                    if not state[key].is_meta:
                        self.values[param] = state[key]
            if group.weights.on_meta and any(param in self.values for param in group.params):
                self._check_complete(group)
                self.groups.append(group)

    def _check_complete(self, group: ParameterGroup) -> None:
        for name, param in zip(group.names, group.params, strict=True):
            if param.is_meta and param not in self.values:
                raise RuntimeError(
                    f"parameter {name!r} is on the meta device: expected values of all parameters of its group (same "
                    "unit, same dtype, all trained or all frozen), which get memory together, but the state dict lacks "
                    "this one; call model.to_empty(device=...) first, and initialize what the state dict lacks"
                )

    def run(self) -> None:
        self.unit.materialize(self.unit.device, self.groups)
        with torch.no_grad():
            for param, value in self.values.items():
                param.copy_(value)


def _keys(group: ParameterGroup, names: Mapping[nn.Module, list[str]]) -> Iterator[tuple[nn.Parameter, str]]:
    for index, module, attr in group.places():
        for name in names.get(module, ()):
            yield group.params[index], f"{name}{attr}"


def _check(key: str, value: object, param: nn.Parameter) -> None:
    """RuntimeError unless the value is a DTensor like the sharded parameter; its dtype may differ."""
    assert isinstance(param, DTensor)
    if not isinstance(value, DTensor):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        fault = f"a plain {type(value).__name__}{shape}; {_DISTRIBUTE}"
    elif value.shape != param.shape:
        fault = f"a DTensor of shape {tuple(value.shape)}"
    elif value.device_mesh != param.device_mesh:
        fault = f"a DTensor on {value.device_mesh}, not on {param.device_mesh}; {_DISTRIBUTE}"
    elif tuple(value.placements) != tuple(param.placements):
        fault = f"a DTensor placed as {value.placements}, not as {param.placements}; {_DISTRIBUTE}"
    elif value.is_meta and not param.is_meta:
        fault = "a DTensor on the meta device, which has no values"
    else:
        return
    raise RuntimeError(
        f"load_state_dict(assign=True): {key}: expected a DTensor of shape {tuple(param.shape)} placed like the "
        f"sharded parameter, got {fault}"
    )
