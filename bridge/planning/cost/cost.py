"""The plan of one model under one policy on one number of devices: the cost of each unit, and of all units.

model, policy ---cut---> kinds of units ---layouts---> bytes at rest, collectives, peak      each kind once
                                             x how many units are of the kind ---> totals
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from bridge.core.sharding import PolicyError, ShardingPolicy
from bridge.core.text import human_bytes
from bridge.core.views import Viewed
from bridge.planning.cost.at_rest import AtRest, at_rest
from bridge.planning.cost.buffers import GroupBuffers, buffers_of
from bridge.planning.cost.mesh import MeshShape
from bridge.planning.cost.moments import Placed, brought_together, staged
from bridge.planning.cost.offload import in_cpu_memory
from bridge.planning.cost.optimizers import ADAMW, Optimizer
from bridge.planning.cost.peak import Peak, step_peak
from bridge.planning.cost.peak_steps import StepUnit, steps_of
from bridge.planning.cost.traffic import Calls, Traffic, amax_calls, exchanges, step_calls
from bridge.planning.cost.units import UnitKind, cut
from bridge.planning.models.errors import PlanError
from bridge.planning.models.model import Model
from bridge.planning.models.models import resolve_models

LARGE_PADDING = 0.05
"""Padding of a unit, as a fraction of its parameters, above which a warning appears."""


@dataclass(frozen=True)
class Workload:
    """The work of one data rank in an optimizer step: ``microbatches`` of ``batch`` sequences of ``length`` tokens.

    A data rank is one device, or all places of the model axes together, which get the same sequences.
    """

    batch: int = 1
    length: int = 4096
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(f"{name}: expected an int >= 1, got {value!r}")

    def __str__(self) -> str:
        return f"{self.microbatches} x {self.batch} sequences of {self.length} tokens"

    def of(self, model: Model) -> str:
        """The work in words of ``model``: only a language model has sequences of tokens."""
        if model.activations:
            return str(self)
        return f"{self.microbatches} {'batch' if self.microbatches == 1 else 'batches'} of any size and shape"


@dataclass(frozen=True)
class UnitPlan:
    """Equal units, planned once. ``at_rest`` and ``calls`` describe one of them, on the plan's device.

    ``on_host``: names of the parameters in one unit whose moments are in CPU memory.
    """

    paths: tuple[str, ...]
    kind: UnitKind
    groups: tuple[GroupBuffers, ...]
    at_rest: AtRest
    calls: Calls
    on_host: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        return len(self.paths)

    @property
    def title(self) -> str:
        """The paths of the units, abbreviated."""
        first, last = (path or "(root)" for path in (self.paths[0], self.paths[-1]))
        return first if self.count == 1 else f"{first} ... {last} ({self.count})"

    @property
    def numel(self) -> int:
        """Elements of the parameters of one unit; for cut parameters, of one part."""
        return sum(group.numel for group in self.groups)

    @property
    def overhead(self) -> float:
        """Padding as a fraction of the parameters' elements."""
        padded = sum(group.padded for group in self.groups)
        return padded / self.numel - 1 if self.numel else 0.0


@dataclass(frozen=True, repr=False)
class CostPlan(Viewed):
    """``device``: the device that ``at_rest`` describes, row-major on the mesh; by default it is the fullest.

    ``exchanges``: collectives over model axes in a step, None if they are unknown; none without model axes.
    ``prefetch``: the policy's, or the default of both runtimes on accelerators, 1. It affects only the peak.
    """

    model: Model
    policy: str
    runtime: str
    mesh: MeshShape
    workload: Workload
    prefetch: int
    device: int
    units: tuple[UnitPlan, ...]
    exchanges: Calls | None = None
    optimizer: Optimizer = ADAMW

    @cached_property
    def at_rest(self) -> AtRest:
        """Bytes that the device holds between two steps."""
        return sum((unit.at_rest.times(unit.count) for unit in self.units), AtRest())

    @cached_property
    def traffic(self) -> Traffic:
        """Collectives of one optimizer step."""
        calls: Calls = Calls()
        for unit in self.units:
            calls.update({call: times * unit.count for call, times in unit.calls.items()})
            for layers in self._together(unit.paths) if self.runtime == "jax" else ():
                for group in unit.groups:
                    calls.update(amax_calls(group, layers))
        calls.update(self.exchanges or {})
        return Traffic(calls, int(self.runtime == "jax"))

    @cached_property
    def peak(self) -> Peak:
        """The most bytes that the device holds in a step."""
        units = [
            StepUnit(
                path, unit.groups, bool(unit.kind.recompute), (layer := self._layer_of(path)) and layer[0]
            )
            for unit in self.units
            for path in unit.paths
        ]
        units.sort(key=lambda unit: unit.path == "")
        work = self.workload
        moved = staged(self.optimizer, self.placed(), self.runtime, self.device)
        if self.runtime == "jax":
            moved += brought_together(self.optimizer, self.placed())
        # XLA chooses what an update that looks at shapes holds in addition to whole weights and gradients, and results
        # of products are not counted.
        known = self.runtime == "torch" or not self.optimizer.by_parameter
        known = known and not any(isinstance(unit.kind.recompute, str) for unit in self.units)
        return step_peak(
            list(steps_of(self.model, units, work.batch, work.length)),
            units,
            self.at_rest,
            self.runtime,
            work.microbatches,
            self.prefetch,
            moved,
            complete=known and bool(self.model.activations),
        )

    def placed(self) -> Iterator[Placed]:
        """All groups; groups that JAX stores in one array (of the layers of a stack) together."""
        for unit in self.units:
            for layers in self._together(unit.paths):
                yield from (Placed(group, unit.on_host, layers) for group in unit.groups)

    @property
    def peak_is_upper_bound(self) -> bool:
        """Whether the peak counts activations that do not exist: model axes cut some, frozen layers save fewer."""
        frozen = not all(parameter.trainable for parameter in self.model.parameters)
        return (self.mesh.model_ranks > 1 or frozen) and self.peak.complete

    @property
    def peak_in_words(self) -> str:
        """The peak in decimal units; < before an upper bound, > before the bytes at rest if it is incomplete."""
        if self.peak.complete:
            return f"{'< ' if self.peak_is_upper_bound else ''}{human_bytes(self.peak.total)}"
        return f"> {human_bytes(self.least)}"

    @property
    def least(self) -> int:
        """Bytes that a device needs in any case: at rest, with buffers. Kernels and compilers choose how many more."""
        return self.at_rest.total + self.model.buffers

    def _together(self, paths: Collection[str]) -> Collection[int]:
        """How many of equal units are one unit in JAX: the layers of a stack."""
        layers = {path: self._layer_of(path) for path in paths}
        return Counter((layer[0], layer[2]) if layer else path for path, layer in layers.items()).values()

    def _layer_of(self, path: str) -> tuple[str, str, str] | None:
        return self.model.layer_of(path) if self.runtime == "jax" else None

    @property
    def numel(self) -> int:
        """Elements of all parameters; for cut parameters, of one part."""
        return sum(unit.numel * unit.count for unit in self.units)

    @property
    def overhead(self) -> float:
        """Padding of all buffers as a fraction of the parameters' elements."""
        padded = sum(group.padded * unit.count for unit in self.units for group in unit.groups)
        return padded / self.numel - 1 if self.numel else 0.0

    def summary(self) -> str:
        """What each device holds and sends, then the warnings, one per line."""
        sent = human_bytes(self.traffic.wire_bytes())
        line = (
            f"{self.model.name}, {self.policy}, {self.runtime}, {self.mesh.devices} devices: "
            f"{human_bytes(self.at_rest.total)} at rest, peak {self.peak_in_words}, {sent} sent in a step"
        )
        return "\n".join([line, *(f"warning: {text}" for text in self.warnings())])

    def table(self) -> list[tuple[str, ...]]:
        """A heading, and a row for each kind of unit."""
        rows = [
            (
                *(unit.title, unit.kind.strategy.name, f"{unit.numel * unit.count:,}"),
                *(f"{100 * unit.overhead:.2f} %", human_bytes(unit.at_rest.total * unit.count)),
            )
            for unit in self.units
        ]
        return [("unit", "strategy", "parameters", "padded by", "at rest"), *rows]

    def warnings(self) -> list[str]:
        """Units with large padding, and buffers, which are not at rest by the policy."""
        buffers = f"buffers: {human_bytes(self.model.buffers)} more on each device, in any policy"
        return [buffers] * bool(self.model.buffers) + [
            f"unit {unit.title}: {100 * unit.overhead:.1f} % padding on {self.mesh.devices} devices; join small "
            "units, or shard them over fewer devices (hsdp)"
            for unit in self.units
            if unit.overhead > LARGE_PADDING
        ]


def load_policy(name_or_path: str | Path) -> ShardingPolicy:
    """A shipped policy by name, or a policy from a TOML file. Raises ``PlanError`` when there is no valid policy."""
    try:
        return ShardingPolicy.load(name_or_path)
    except PolicyError as error:
        raise PlanError(str(error)) from error


def parse_policy(text: str, source: str) -> ShardingPolicy:
    """A policy from TOML text. Raises ``PlanError`` if the text is not a valid policy."""
    try:
        return ShardingPolicy.parse(text, source)
    except PolicyError as error:
        raise PlanError(str(error)) from error


def make_plan(
    model: Model | str,
    policy: ShardingPolicy | str | Path,
    devices: int,
    runtime: str,
    workload: Workload,
    *,
    device: int | None = None,
    optimizer: Optimizer = ADAMW,
) -> CostPlan:
    """Plan ``model`` under ``policy``; nothing is allocated, and no device is needed.

    model, policy: objects, or names as ``resolve_models`` and ``load_policy`` take them.
    device: the device whose bytes at rest the plan gives; None: the first of the devices that hold the most.

    Raises ``PlanError`` if the policy does not fit the model or devices, or the runtime cannot run the optimizer.
    """
    if isinstance(model, str):
        model = resolve_models(model, (runtime,))[runtime]
    if not isinstance(policy, ShardingPolicy):
        policy = load_policy(policy)
    if reason := optimizer.why_not(runtime, model.stacks):
        raise PlanError(reason)
    if policy.model_axes and optimizer.looks_at_rows:
        raise PlanError(
            f"{policy.source}: expected an optimizer that treats all elements alike, since parameters are cut over "
            f"{' and '.join(policy.model_axes)}, got {optimizer}"
        )
    if policy.precision.store_param_remainders and runtime == "torch":
        _check_remainders(policy, optimizer)
    try:
        mesh = MeshShape.of(policy.mesh_sizes(devices))
    except ValueError as error:
        raise PlanError(str(error)) from error
    prefetch = 1 if policy.prefetch is None else policy.prefetch
    units_cut = cut(model, policy, runtime, dict(mesh.model), prefetch)
    moved = in_cpu_memory(model, units_cut, mesh, runtime, optimizer.offload)
    kinds = {
        (kind, on_host): (tuple(paths), buffers_of(kind, mesh))
        for (kind, on_host), paths in _kinds(units_cut, moved).items()
    }
    if device is None:
        held = sum(
            (
                len(paths) * group.main_bytes * group.real_by_device(group.strategy.optimizer)
                for paths, groups in kinds.values()
                for group in groups
            ),
            np.zeros(mesh.devices, np.int64),
        )
        device = int(np.argmax(held))
    if not 0 <= device < mesh.devices:
        raise PlanError(f"device: expected one of {mesh.devices}, got {device}")
    units = []
    for (kind, on_host), (paths, groups) in kinds.items():
        rest = at_rest(groups, runtime, device, optimizer, on_host)
        calls = step_calls(groups, runtime, workload.microbatches, kind.gathers)
        units.append(UnitPlan(paths, kind, groups, rest, calls, on_host))
    known = _exchanges(model, policy, mesh, runtime, workload)
    planned = policy.source, runtime, mesh, workload, prefetch, device
    return CostPlan(model, *planned, tuple(units), known, optimizer)


def _check_remainders(policy: ShardingPolicy, optimizer: Optimizer) -> None:
    if optimizer.name != "adamw" or policy.parallel:
        other = f"--optimizer {optimizer.name}" if optimizer.name != "adamw" else "[[parallel]]"
        raise PlanError(
            f"{policy.source}: [precision] store_param_remainders: expected --optimizer adamw and no [[parallel]] in "
            f"PyTorch, because only MainWeightAdamW updates remainders, only of parameters that no model axis cuts, "
            f"got {other}; plan JAX with --runtime jax"
        )


def _exchanges(
    model: Model, policy: ShardingPolicy, mesh: MeshShape, runtime: str, workload: Workload
) -> Calls | None:
    if mesh.model_ranks == 1:
        return Calls()
    # In JAX the compiler chooses them, and a user's model may have activations that do not depend on tokens. If some
    # results are saved, PyTorch chooses how far it runs forward again.
    selective = any(isinstance(unit.recompute, str) for unit in policy.units)
    if runtime == "jax" or not model.activations or selective:
        return None
    return exchanges(model, policy, dict(mesh.model), workload.batch * workload.length, workload.microbatches)


def _kinds(
    units: Mapping[str, UnitKind], moved: Collection[str]
) -> dict[tuple[UnitKind, frozenset[str]], list[str]]:
    """Paths of equal units, by their kind and the names in them whose moments are in CPU memory."""
    paths_by_kind: dict[tuple[UnitKind, frozenset[str]], list[str]] = {}
    for path, kind in units.items():
        names = (name for group in kind.groups for name in group.names) if moved else ()
        on_host = frozenset(name for name in names if f"{path}.{name}".lstrip(".") in moved)
        paths_by_kind.setdefault((kind, on_host), []).append(path)
    return paths_by_kind
