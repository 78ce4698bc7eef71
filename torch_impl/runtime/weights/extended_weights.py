"""The weights of a group of parameters with extensions of the all-gather: see ``extension``.

A gather asks each parameter what to gather, and fills tensors that stay the same objects. Whole parameters share memory
with these tensors or are filled from them, so they stay the same objects, too. While the weights are free, only the
storages are empty. Filling them again counts as a change for autograd only if main weights have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_impl.comm import collectives
from torch_impl.comm.collectives import Work
from torch_impl.comm.streams import Step
from torch_impl.dtensor.local import local_of, plain_parts
from torch_impl.dtensor.tensor import make_dtensor
from torch_impl.runtime.ground import autograd
from torch_impl.runtime.ground.group_spec import GroupSpec
from torch_impl.runtime.ground.host_memory import HOST
from torch_impl.runtime.ground.ownership import OwnedParameter
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy
from torch_impl.runtime.weights.context import UnitContext
from torch_impl.runtime.weights.extension import WAY_OUT, ExtendedWeight, as_matrix, zeros_on
from torch_impl.runtime.weights.flat_parameters import GivenParameter
from torch_impl.runtime.weights.group_weights import GroupWeights, Version


class ExtendedWeights(GroupWeights):
    """``shards``: this rank's rows of the parameters ``owned``, see ``own_rows``.

    There are no flat main weights and no flat compute weights, so this object is also the memory of
    the compute weights.
    """

    separate = gathers = True

    def __init__(
        self,
        spec: GroupSpec,
        context: UnitContext,
        owned: Sequence[OwnedParameter],
        shards: Sequence[torch.Tensor],
        policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__(spec, context)
        mesh = spec.levels.mesh
        axis = mesh.mesh if mesh.ndim == 1 else mesh.mesh[(mesh.mesh.mesh_dim_names or ())[-1]]
        self._extended = [
            ExtendedWeight(parameter, shard, axis, mesh.sizes[0])
            for parameter, shard in zip(owned, shards, strict=True)
        ]
        # Inner tensors of a wrapper are attributes too. A copy of the wrapper has them, so they are left out.
        self._marks = [
            {
                key: value
                for key, value in vars(parameter.param).items()
                if key not in vars(parameter.param.detach())
            }
            for parameter in owned
        ]
        self._policy = policy
        self._agreed: list[list[tuple[tuple[int, ...], str]]] | None = None

    @property
    def compute(self) -> ExtendedWeights:
        return self

    def _allocate(self, device: torch.device, originals: Sequence[GivenParameter]) -> None:
        # The rows were already cut from the values.
        main_device = HOST if self._group_spec.host is not None and device.type != "meta" else device
        self.compute_device = device
        for weight in self._extended:
            if weight.shard.is_meta and main_device.type != "meta":
                weight.shard = zeros_on(weight.shard, main_device)
            elif weight.shard.device != main_device:
                weight.shard = weight.shard.to(main_device)
        self.params = [self._sharded(index, param) for index, (param, _) in enumerate(originals)]
        self.on_meta = self._extended[0].shard.is_meta
        # Their class is known only after the first gather, when they are made.
        self.unsharded = [nn.Parameter(torch.empty(0), requires_grad=False) for _ in self.params]
        for param, marks in zip(self.params, self._marks, strict=True):
            vars(param).update(marks)
        self.allocated = self.aside = False
        self._made = self._changed = False
        self._versions: list[tuple[torch.Tensor, int]] = []

    def _sharded(self, index: int, param: nn.Parameter) -> nn.Parameter:
        spec = self._group_spec
        bounds, (mesh, others) = spec.levels.row_bounds(1, spec.names[index]), spec.placed(index)
        with torch.no_grad():
            rows = as_matrix(self._extended[index].shard)
            tensor = make_dtensor(rows, mesh, param.shape, bounds, axes=1, tensor_parallel=others)
        return nn.Parameter(tensor, requires_grad=param.requires_grad)

    def _whole(self, index: int, whole: torch.Tensor) -> nn.Parameter:
        param = self._group_spec.whole_parameter(index, whole)
        vars(param).update(self._marks[index])
        return param

    @property
    def main_tensors(self) -> list[torch.Tensor]:
        return [part for weight in self._extended for part in plain_parts(weight.shard)]

    @property
    def main_version(self) -> Version:
        # A program may write to the inner tensors, which the wrapper does not count.
        shards = [
            *map(local_of, self.params),
            *(tensor.shard for tensor in self._extended),
            *self.main_tensors,
        ]
        return tuple(tensor._version for tensor in shards)

    @property
    def real_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.main_tensors)

    @property
    def compute_tensors(self) -> list[torch.Tensor]:
        return [tensor for weight in self._extended for tensor in weight.held]

    @property
    def gather_bytes(self) -> int:
        """The bytes that a gather fills; 0 before the first one."""
        return sum(
            output.numel() * output.element_size() for weight in self._extended for output in weight.outputs
        )

    def _steps(self, changed: bool, current: bool) -> list[Step]:
        # No shard is kept from the last gather, so ``current`` changes nothing. Contexts as in ``settle``.
        with torch.inference_mode(False), torch.no_grad():
            self._ask()
            self._prepare(changed)
        sources = [tensor for weight in self._extended for tensor in weight.inputs]
        outputs = [tensor for weight in self._extended for tensor in weight.outputs]
        return [("gather", partial(self._gather, _as_bytes(outputs), _as_bytes(sources)))]

    def _ask(self) -> None:
        cause: Exception | None = None
        wanted: list[Any] = []
        for weight in self._extended:
            try:
                wanted.append(weight.pre(self._policy, self._context.device))
            except Exception as error:
                if self._agreed is not None:
                    raise
                cause = error
                wanted.append(f"{type(error).__name__}: {error}")
        if self._agreed is None:
            self._agree(wanted, cause)
            self._agreed = wanted
        for weight, sizes, agreed in zip(self._extended, wanted, self._agreed, strict=True):
            if sizes != agreed:
                raise RuntimeError(
                    f"{weight.name}: expected fsdp_pre_all_gather to return tensors with the sizes "
                    f"of its first call, {agreed}, got {sizes}"
                )

    def _agree(self, wanted: list[Any], cause: Exception | None) -> None:
        """Once: other sizes on another rank would hang its gather, or fill it wrongly."""
        mesh = self._group_spec.levels.mesh
        everyone: list[Any] = [None] * mesh.sizes[0]
        dist.all_gather_object(everyone, wanted, group=mesh.groups[0])
        for index, weight in enumerate(self._extended):
            for rank, theirs in enumerate(everyone):
                if isinstance(theirs[index], str) or theirs[index] != everyone[0][index]:
                    raise RuntimeError(
                        f"{weight.name}: expected fsdp_pre_all_gather to return tensors of equal "
                        "sizes on all ranks, with rows padded to the number on the first rank, got "
                        f"{everyone[0][index]} on rank 0 of the axis and {theirs[index]} on rank "
                        f"{rank}; {WAY_OUT}"
                    ) from cause

    def _prepare(self, changed: bool) -> None:
        """Memory to gather into."""
        # Filling memory counts as a change, but autograd must see one only if values change.
        if not self._versions:
            self._note_versions()
        self._changed |= changed
        for weight in self._extended:
            weight.allocate()
        self.allocated = self.aside = True

    def _gather(
        self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], async_op: bool
    ) -> Work | None:
        mesh = self._group_spec.levels.mesh
        if mesh.sizes[0] > 1:
            return collectives.all_gather(outputs, sources, mesh.groups[0], async_op)
        for output, source in zip(outputs, sources, strict=True):
            output.copy_(source)
        return None

    def settle(self) -> None:
        """Make whole parameters from the gathered tensors, before they are read."""
        if not self.aside:
            return
        self.aside = False
        # In inference mode, as in a first evaluation, tensors could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            for index, weight in enumerate(self._extended):
                whole = weight.post(
                    self._group_spec.dtypes.compute, self.unsharded[index] if self._made else None
                )
                if not self._made:
                    self.unsharded[index] = self._whole(index, whole)
        if not self._made:
            self._made = True
            if self._on_made is not None:
                self._on_made()
        self._count()

    def free(self) -> None:
        """Drop the contents and free the memory; until it is filled autograd refuses views."""
        # Otherwise the gather would write to memory that others use by then.
        self.finish_gather()
        if not self._versions:
            self._note_versions()
        # One more than the graph has saved marks lost contents; ``_count`` reverts it.
        torch.autograd.graph.increment_version([weight for weight, _ in self._versions])
        self.allocated = self.aside = False
        for weight in self._extended:
            weight.free()

    def _note_versions(self) -> None:
        # A class may share small tensors, such as a table of codes, between shards and whole weights.
        # These tensors are not freed, and their versions show changes of the main weights.
        shared = {tensor.untyped_storage().data_ptr() for tensor in self.main_tensors} - {0}
        parts = [part for tensor in (*self.compute_tensors, *self.unsharded) for part in plain_parts(tensor)]
        known = [*self.unsharded, *(p for p in parts if p.untyped_storage().data_ptr() not in shared)]
        distinct = {id(tensor): tensor for tensor in known} if self._made else {}
        self._versions = [(tensor, tensor._version) for tensor in distinct.values()]
        self._changed = False

    def _count(self) -> None:
        if self._versions:
            tensors, versions = zip(*self._versions, strict=True)
            # By two, since an increase by one marks lost contents.
            autograd.set_versions(tensors, [version + 2 * self._changed for version in versions])
            self._versions = []


def _as_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Backends do not support every dtype that a class may gather.
    return [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
