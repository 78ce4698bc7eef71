"""The weights of a group: main weights, compute weights, and the gather between them.

``FlatWeights`` stores both in flat buffers; parameters are views of them, see the note of the
package. ``extended_weights`` stores the weights whose class determines what is gathered.

Compute weights may be kept, if parameters are not sharded or with ``reshard_after_forward=False``. Kept weights are
gathered again by the first forward after a backward that reduced gradients over all axes, unless the whole group is
frozen. Whether this rank's main weights have changed does not matter then, since an optimizer may skip empty rows or
rows without a gradient, on some ranks only. Other changes (a loaded state dict, an edit between two forwards) are
detected by the version counter that torch keeps for the buffer. Every change through a DTensor, an optimizer or
``to_local()`` counts on every rank that makes it, also on ranks whose rows of the tensor are empty;
``tensor.to_local().data`` hides changes from the counter. Ranks whose counters disagree get an error that names them,
see ``require_all_ranks``.

A gather after a change also counts as an in-place change of the compute weights, so a backward through a forward that
used the older weights raises autograd's error instead of yielding wrong gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import nn

from bridge.core.sharding.policy.strategy_collectives import computes_with_main, keeps_shard
from bridge.core.text import first_of
from torch_impl.comm.agreement import require_all_ranks
from torch_impl.comm.streams import Step, Transfer
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.remainders import written_with_remainders
from torch_impl.runtime.gather.float8 import QuantizedGather
from torch_impl.runtime.ground import autograd
from torch_impl.runtime.ground.buffer import CastGather, FlatBuffer, SplitGather, WeightGather
from torch_impl.runtime.ground.group_spec import GroupSpec
from torch_impl.runtime.ground.host_memory import HOST
from torch_impl.runtime.weights.compute_buffer import ComputeBuffer
from torch_impl.runtime.weights.context import UnitContext
from torch_impl.runtime.weights.flat_parameters import (
    GivenParameter,
    sharded_parameters,
    unsharded_parameters,
)

Version: TypeAlias = tuple[int, ...]


class ComputeMemory(Protocol):
    """The memory of a group's compute weights."""

    @property
    def allocated(self) -> bool: ...

    @property
    def aside(self) -> bool: ...

    def settle(self) -> None: ...

    def free(self) -> None: ...


class GroupWeights(ABC):
    """The main weights and the compute weights of a group, and the parameters over both."""

    params: list[nn.Parameter]
    """Sharded, over the main weights."""
    unsharded: list[nn.Parameter]
    """Over the compute weights."""
    on_meta: bool
    """Whether the weights have shapes, but no memory yet."""
    separate: bool
    """Whether the compute weights are separate from the main weights."""
    gathers: bool
    """Whether compute weights come from a gather; under no_shard they are the main weights."""
    compute_device: torch.device

    def __init__(self, spec: GroupSpec, context: UnitContext) -> None:
        self._group_spec, self._context = spec, context
        self._keeps_shard = keeps_shard(spec.strategy)
        # Weak: buffers and remainders hold the callback, and a cycle would keep a deleted model's
        # memory until the garbage collector runs.
        self._finish = autograd.weakly(self.finish_gather)
        self._on_made: Callable[[], None] | None = None
        # Which parameters train: the combinations on which all ranks were found to agree.
        self._agreed_trainable: set[tuple[bool, ...]] = set()

    @property
    @abstractmethod
    def compute(self) -> ComputeMemory:
        """The memory of the compute weights."""

    @property
    @abstractmethod
    def main_version(self) -> Version:
        """A value that changes with each write to the main weights."""

    @property
    @abstractmethod
    def main_tensors(self) -> list[torch.Tensor]:
        """The memory of the main weights."""

    @property
    @abstractmethod
    def compute_tensors(self) -> list[torch.Tensor]:
        """The memory of the compute weights."""

    @property
    @abstractmethod
    def real_bytes(self) -> int:
        """Bytes of the main weights without padding."""

    @property
    def resident(self) -> torch.Tensor | None:
        """See the note of the package."""
        return None

    @abstractmethod
    def _allocate(self, device: torch.device, originals: Sequence[GivenParameter]) -> None: ...

    @abstractmethod
    def _steps(self, changed: bool, current: bool) -> list[Step]:
        """The steps that gather the main weights.

        ``changed``: they differ from the last gather's. ``current``: a gather of the same main
        weights was completed, so its kept shard is still valid.
        """

    def when_made(self, callback: Callable[[], None]) -> None:
        """Call back when ``unsharded`` is made, if it is unknown before the first gather."""
        self._on_made = callback

    def allocate(self, device: torch.device, originals: Sequence[GivenParameter]) -> None:
        """Make weights and parameters like ``originals``, with their values, if any."""
        self._transfer: Transfer | None = None
        # Whether the next forward gathers in any case: equal on all ranks.
        self._due = False
        self._gathered_version: Version | None = None
        self._kept_version: Version | None = None
        self._started_version: Version | None = None
        self._agreed_trainable = self._agreed_trainable or {tuple(p.requires_grad for p, _ in originals)}
        self._allocate(device, originals)

    @property
    def gathering(self) -> bool:
        """Whether a gather of the compute weights is in progress."""
        return self._transfer is not None or self.compute.aside

    def step_may_follow(self) -> None:
        """A backward left reduced gradients: rows on any rank may change until the next forward.

        No optimizer changes a group that is frozen, see ``_require_same_trainable``.
        """
        trains = any(param.requires_grad for param in (*self.params, *self.unsharded))
        spec = self._group_spec
        self._due |= trains and spec.strategy.optimizer > 0 and spec.levels.mesh.size > 1

    def start_gather(self, refresh: bool) -> bool:
        """Begin to fill compute weights that are freed or, with ``refresh``, older than main weights.

        A collective when it returns True; otherwise nothing is to be done, or it has already begun.
        """
        # A second gather into the same memory would race with the first.
        if not self.gathers or self._transfer is not None:
            return False
        version, gathered = self.main_version, self._gathered_version
        changed, current = version != gathered, version == self._kept_version and not self._due
        # Freed weights have no contents; after an interrupted gather the contents are arbitrary.
        kept = self.compute.allocated and gathered is not None
        if kept and not (refresh and (changed or self._due)):
            return False
        spec = self._group_spec
        # Other ranks gather anyway, unless whole weights or resident shards are kept.
        resident = self._kept_version is not None and self._keeps_shard
        if changed and not self._due and (kept or resident):
            self._require_change_everywhere()
        # Before the gather, not after: a rank that waits in a collective cannot receive an error.
        self._require_same_trainable()
        if spec.order is not None:
            spec.order.begin(f"weights of {spec.names[0]!r} (unit {self.unit_name}) are gathered")
        self._due = False
        self._gathered_version = None  # until it has succeeded
        if not current:
            self._kept_version = None
        # Gathered memory is filled by copies and collectives, which autograd must not record.
        with torch.no_grad():
            steps = self._steps(changed, current)
            # With remainders, own rows are in the gathered memory, and share its version.
            version = self.main_version
            self._transfer = self._context.schedule.streams.start(steps)
        self._started_version = version
        return True

    def gather(self, refresh: bool) -> None:
        """Fill the compute weights, see ``start_gather``, and wait for them. Collective."""
        if self._transfer is not None or self.start_gather(refresh):
            self.finish_gather()
            # A gather ahead may have begun before the program changed the main weights.
            if refresh and self.start_gather(refresh):
                self.finish_gather()
        # After the wait: weights that were gathered aside are then copied to their slot.
        self.compute.settle()

    def finish_gather(self) -> None:
        """Wait for the gather in progress, if there is one."""
        if self._transfer is not None:
            transfer, self._transfer = self._transfer, None
            # ``finish`` must be called once, even if the wait is interrupted.
            transfer.finish()
            # The version at the start: later changes are not in the gathered weights.
            self._gathered_version = self._kept_version = self._started_version

    @property
    def unit_name(self) -> str:
        """The name of the unit's module below its root, or ``"root"`` for the root itself."""
        return self._context.name or "root"

    def _require_change_everywhere(self) -> None:
        """RuntimeError if only some ranks have changed their main weights, and would gather."""
        spec = self._group_spec
        if spec.strategy.optimizer > 0 and spec.levels.mesh.size > 1:
            require_all_ranks(
                f"main weights of {spec.names[0]!r} (unit {self.unit_name}) were changed between forwards",
                spec.levels.mesh,
                "a change outside of a training step must be made on all ranks, also if their rows "
                "are empty: write to the DTensor, or to to_local() without a condition on its "
                "size or values",
            )

    def _require_same_trainable(self) -> None:
        """RuntimeError if only some ranks have frozen parameters, and would not reduce with others."""
        spec, trainable = self._group_spec, tuple(param.requires_grad for param in self.params)
        if trainable in self._agreed_trainable or spec.levels.mesh.size == 1:
            return
        frozen = [name for name, trains in zip(spec.names, trainable, strict=True) if not trains]
        require_all_ranks(
            f"{len(frozen)} of {len(spec.names)} parameters of unit {self.unit_name} are frozen "
            f"({first_of(frozen)})",
            spec.levels.mesh,
            "call requires_grad_() with the same value for a parameter on all ranks, before the same forward",
        )
        self._agreed_trainable.add(trainable)


class FlatWeights(GroupWeights):
    """Main and compute weights in flat buffers; under no_shard one buffer if nothing is cast."""

    def _allocate(self, device: torch.device, originals: Sequence[GivenParameter]) -> None:
        spec = self._group_spec
        strategy, dtypes, levels = spec.strategy, spec.dtypes, spec.levels
        main_device, pinned = device, False
        if spec.host is not None and device.type != "meta":
            main_device, pinned = HOST, spec.host.pinned
        stored = torch.int16 if dtypes.remainders else dtypes.main
        self.main = levels.buffer(strategy.optimizer, stored, main_device, pinned)
        self._gather = self._gather_on(device)
        # Weights in the host's memory must be fetched in any case.
        self.separate = not computes_with_main(strategy, dtypes) or spec.host is not None
        self.gathers = self.separate and (strategy.optimizer > 0 or not dtypes.remainders)
        self.on_meta, self.compute_device = self.main.flat.is_meta, device
        if not self.separate:
            self._compute = self.main
            views = [self.main.view(name) for name in spec.names]
        else:
            self._compute = self._pooled = ComputeBuffer(
                levels.layouts[0], dtypes.compute, device, self._finish, self._context, spec.suffix
            )
            # .data: a gather must not count as a change of tensors that autograd saved.
            views = [self._compute.view(name).data for name in spec.names]
        self.params = sharded_parameters(spec, self.main, originals, views, self._finish)
        self.unsharded = unsharded_parameters(spec, originals, self.params, views)
        if self.separate:
            self._pooled.set_views(self.unsharded)
            # The meta device has no memory; with remainders own rows are in the whole weights.
            if not (dtypes.remainders or self.on_meta):
                self._pooled.free()

    def _gather_on(self, device: torch.device) -> WeightGather:
        spec = self._group_spec
        levels, strategy, dtypes, fetches = spec.levels, spec.strategy, spec.dtypes, spec.host is not None
        if dtypes.remainders:
            return SplitGather(levels, strategy)
        if dtypes.gather is not None:
            return QuantizedGather(levels, strategy, dtypes.gather, device, spec.tensor_parallel, fetches)
        return CastGather(levels, strategy, dtypes.compute, device, fetches)

    @property
    def compute(self) -> FlatBuffer:
        return self._compute

    @property
    def main_version(self) -> Version:
        if self._group_spec.dtypes.remainders:
            return tuple(local_of(param)._version for param in self.params)
        return (self.main.flat._version,)

    @property
    def main_tensors(self) -> list[torch.Tensor]:
        return [self.main.flat]

    @property
    def compute_tensors(self) -> list[torch.Tensor]:
        return [self._compute.flat]

    @property
    def real_bytes(self) -> int:
        return sum(local_of(param).numel() for param in self.params) * self.main.flat.element_size()

    @property
    def resident(self) -> torch.Tensor | None:
        return self._gather.resident

    def _steps(self, changed: bool, current: bool) -> list[Step]:
        if not self._group_spec.dtypes.remainders:
            target = self._pooled.allocate(changed)
        else:
            # A gather overwrites own rows with equal bits, a change that must not zero remainders.
            with written_with_remainders(map(local_of, self.params)):
                target = self._pooled.allocate(changed)
        return self._gather.steps(self.main.flat, target, current)
