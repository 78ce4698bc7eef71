"""A group of parameters with extensions of the all-gather: see ``extension`` for what these are.

A gather asks each parameter what to gather, and fills tensors that stay the same ones, so that whole parameters, which
share their memory with them or are filled from them, stay the same too. While the weights are free, only the storages
are empty. What is written there again counts as a change for autograd only if main weights have changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Placement

from bridge.sharding.layout import Layout
from bridge.sharding.strategy import Strategy
from torch_impl.comm import collectives
from torch_impl.comm.collectives import Work
from torch_impl.comm.mesh import DataParallelMesh
from torch_impl.comm.streams import Step
from torch_impl.dtensor.local import local_of, plain_parts
from torch_impl.dtensor.tensor import make_dtensor
from torch_impl.runtime import autograd
from torch_impl.runtime.context import UnitContext
from torch_impl.runtime.extension import WAY_OUT, ExtendedWeight, as_matrix
from torch_impl.runtime.group import ParameterGroup, Version
from torch_impl.runtime.host_memory import HOST, HostMemory
from torch_impl.runtime.ownership import OwnedParameter
from torch_impl.runtime.precision import GroupDtypes, MixedPrecisionPolicy


class _ComputeWeights:
    """The whole parameters of a group: ``unsharded``, which ``make`` makes of what the first gather brings.

    Then ``on_made`` is called.
    """

    def __init__(
        self,
        weights: Sequence[ExtendedWeight],
        unsharded: list[nn.Parameter],
        make: Callable[[int, torch.Tensor], nn.Parameter],
        dtype: torch.dtype,
    ) -> None:
        self._weights, self._unsharded, self._dtype = weights, unsharded, dtype
        self._make = weakref.WeakMethod(make)
        self.on_made: Callable[[], None] | None = None
        self.allocated = self.aside = False
        self._made = self._changed = False
        self._versions: list[tuple[torch.Tensor, int]] = []

    def prepare(self, changed: bool) -> None:
        """Memory to gather into; see ``PooledWeights.prepare``."""
        # Filling the memory again counts as a change, which autograd must take for one only where values change.
        if not self.aside:
            known = [*self.tensors, *self._unsharded]
            known += [part for one in self._unsharded for part in plain_parts(one)]
            self._versions = [(one, one._version) for one in known] if self._made else []
            self._changed = False
        self._changed |= changed
        for one in self._weights:
            one.allocate()
        self.allocated = self.aside = True

    def settle(self) -> None:
        """Make whole parameters of what has arrived, before they are read."""
        if not self.aside:
            return
        self.aside = False
        # A first evaluation may run in inference mode; training steps could not write to tensors made there.
        with torch.inference_mode(False), torch.no_grad():
            for index, one in enumerate(self._weights):
                whole = one.post(self._dtype, self._unsharded[index] if self._made else None)
                make = self._make()
                if not self._made and make is not None:
                    self._unsharded[index] = make(index, whole)
        if not self._made:
            self._made = True
            if self.on_made is not None:
                self.on_made()
        self._count()

    def release(self) -> None:
        """Forget the contents and free the memory."""
        if self.aside:
            self._count()
        self.allocated = self.aside = False
        for one in self._weights:
            one.free()

    def _count(self) -> None:
        if self._versions:
            tensors, versions = zip(*self._versions, strict=True)
            autograd.set_versions(tensors, [version + self._changed for version in versions])
            self._versions = []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Plain tensors over their memory."""
        return [tensor for one in self._weights for tensor in one.held]


class ExtendedGroup(ParameterGroup):
    """A group of parameters with extensions; ``shards`` are their own rows, see ``own_rows``.

    There are no flat main weights and no flat compute weights.
    """

    def __init__(
        self,
        owned: Sequence[OwnedParameter],
        shards: Sequence[torch.Tensor],
        layout: Layout,
        mesh: DataParallelMesh,
        device: torch.device,
        strategy: Strategy,
        dtypes: GroupDtypes,
        divisor: float,
        context: UnitContext,
        suffix: str,
        host: HostMemory | None,
        policy: MixedPrecisionPolicy,
    ) -> None:
        axis = mesh.mesh if mesh.ndim == 1 else mesh.mesh[(mesh.mesh.mesh_dim_names or ())[-1]]
        ranks = mesh.sizes[0]
        self._extended = [
            ExtendedWeight(one, shard, axis, ranks) for one, shard in zip(owned, shards, strict=True)
        ]
        # Inner tensors of a wrapper are attributes too, which a copy of the wrapper has.
        self._marks = [
            {key: value for key, value in vars(one.param).items() if key not in vars(one.param.detach())}
            for one in owned
        ]
        self._policy = policy
        self._agreed: list[list[tuple[tuple[int, ...], str]]] | None = None
        super().__init__(owned, layout, mesh, device, strategy, dtypes, divisor, context, suffix, host)

    @property
    def on_meta(self) -> bool:
        return self._extended[0].shard.is_meta

    @property
    def allocated(self) -> bool:
        return self._whole_weights.allocated

    @property
    def gathers(self) -> bool:
        return True

    @property
    def has_own_weights(self) -> bool:
        return True

    @property
    def resident(self) -> None:
        return None

    @property
    def main_tensors(self) -> list[torch.Tensor]:
        return [part for one in self._extended for part in plain_parts(one.shard)]

    @property
    def real_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.main_tensors)

    @property
    def weight_tensors(self) -> list[torch.Tensor]:
        return self._whole_weights.tensors

    @property
    def gather_bytes(self) -> int:
        """What a gather fills; 0 before the first one."""
        return sum(one.numel() * one.element_size() for weight in self._extended for one in weight.outputs)

    @property
    def compute_device(self) -> torch.device:
        return self._device

    @property
    def _main_version(self) -> Version:
        # A program may write to the inner tensors, whose wrapper counts nothing of that.
        shards = [*map(local_of, self.params), *(one.shard for one in self._extended), *self.main_tensors]
        return tuple(one._version for one in shards)

    def _allocate(self, device: torch.device, given: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        place = HOST if self.host is not None and device.type != "meta" else device
        self._device = device
        for one in self._extended:
            if one.shard.is_meta and place.type != "meta":
                one.shard = torch.empty_like(one.shard, device=place)
                for part in plain_parts(one.shard):
                    part.zero_()
            elif one.shard.device != place:
                one.shard = one.shard.to(place)
        self.params = [self._sharded(index, param) for index, (param, _) in enumerate(given)]
        # Their class is known only when they are made of what is gathered first.
        self.unsharded = [nn.Parameter(torch.empty(0), requires_grad=False) for _ in self.params]
        for param, marks in zip(self.params, self._marks, strict=True):
            vars(param).update(marks)

    def _sharded(self, index: int, param: nn.Parameter) -> nn.Parameter:
        name, given, mesh = self.names[index], self.tensor_parallel[index], self.mesh.mesh
        others: tuple[Placement, ...] = ()
        if given is not None:
            mesh, others = given.joint_mesh(mesh), given.placements
        with torch.no_grad():
            tensor = make_dtensor(
                as_matrix(self._extended[index].shard),
                mesh,
                param.shape,
                self.levels.row_bounds(1, name),
                axes=1,
                tensor_parallel=others,
            )
        return nn.Parameter(tensor, requires_grad=param.requires_grad)

    def _whole(self, index: int, whole: torch.Tensor) -> nn.Parameter:
        others = self.tensor_parallel[index]
        param = nn.Parameter(
            whole if others is None else others.wrap(whole),
            requires_grad=whole.is_floating_point() or whole.is_complex(),
        )
        vars(param).update(self._marks[index])
        return param

    def _connect_weights(self) -> None:
        before = getattr(self, "_whole_weights", None)
        self._whole_weights = _ComputeWeights(
            self._extended, self.unsharded, self._whole, self.dtypes.compute
        )
        self._whole_weights.on_made = None if before is None else before.on_made
        self.weights = self._whole_weights

    def when_made(self, callback: Callable[[], None]) -> None:
        self._whole_weights.on_made = callback

    def _steps(self, changed: bool) -> list[Step]:
        # As in ``_ComputeWeights.settle``.
        with torch.inference_mode(False), torch.no_grad():
            self._ask()
            self._whole_weights.prepare(changed)
        sources = [tensor for one in self._extended for tensor in one.inputs]
        outputs = [tensor for one in self._extended for tensor in one.outputs]
        return [("gather", partial(self._gather, _as_bytes(outputs), _as_bytes(sources)))]

    def _ask(self) -> None:
        cause: Exception | None = None
        wanted: list[Any] = []
        for one in self._extended:
            try:
                wanted.append(one.pre(self._policy, self._context.device))
            except Exception as error:
                if self._agreed is not None:
                    raise
                cause = error
                wanted.append(f"{type(error).__name__}: {error}")
        if self._agreed is None:
            self._agree(wanted, cause)
            self._agreed = wanted
        for one, sizes, agreed in zip(self._extended, wanted, self._agreed, strict=True):
            if sizes != agreed:
                raise RuntimeError(
                    f"{one.name}: expected fsdp_pre_all_gather to return tensors of the sizes of its first call, "
                    f"{agreed}, got {sizes}"
                )

    def _agree(self, wanted: list[Any], cause: Exception | None) -> None:
        """Once: other sizes on another rank would hang its gather, or fill it with what belongs elsewhere."""
        everyone: list[Any] = [None] * self.mesh.sizes[0]
        dist.all_gather_object(everyone, wanted, group=self.mesh.groups[0])
        for index, one in enumerate(self._extended):
            for rank, theirs in enumerate(everyone):
                if isinstance(theirs[index], str) or theirs[index] != everyone[0][index]:
                    raise RuntimeError(
                        f"{one.name}: expected fsdp_pre_all_gather to return tensors of equal sizes on all ranks, rows "
                        f"padded to those of the first rank, got {everyone[0][index]} on rank 0 of the axis and "
                        f"{theirs[index]} on rank {rank}; {WAY_OUT}"
                    ) from cause

    def _gather(
        self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], async_op: bool
    ) -> Work | None:
        if self.mesh.sizes[0] > 1:
            return collectives.all_gather(outputs, sources, self.mesh.groups[0], async_op)
        for output, source in zip(outputs, sources, strict=True):
            output.copy_(source)
        return None


def _as_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Backends do not know every dtype that a class may gather.
    return [one.detach().reshape(-1).view(torch.uint8) for one in tensors if one.numel()]
