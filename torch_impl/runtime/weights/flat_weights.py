"""The weights of a group in flat buffers, of which parameters are views: see the note of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import Placement

from bridge.core.sharding.policy.strategy_collectives import computes_with_main
from torch_impl.comm.streams import Step
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.remainders import attach, split, written_with_remainders
from torch_impl.dtensor.tensor import make_dtensor
from torch_impl.runtime.gather.float8 import QuantizedGather
from torch_impl.runtime.gather.gather import CastGather, SplitGather, WeightGather
from torch_impl.runtime.ground import tensor_parallel
from torch_impl.runtime.ground.host_memory import HOST
from torch_impl.runtime.memory.pool import PooledWeights
from torch_impl.runtime.weights.group_weights import GivenParameter, GroupSpec, Version


class FlatWeights:
    """See ``GroupWeights``. ``main`` and ``compute`` are one buffer under no_shard, if nothing is cast."""

    def __init__(self, spec: GroupSpec) -> None:
        self._group_spec = spec
        self.params: list[nn.Parameter]
        self.unsharded: list[nn.Parameter]

    def allocate(
        self, device: torch.device, given: Sequence[GivenParameter], finish: Callable[[], None]
    ) -> None:
        """See ``GroupWeights``."""
        spec = self._group_spec
        strategy, dtypes, levels = spec.strategy, spec.dtypes, spec.levels
        place, pinned = device, False
        if spec.host is not None and device.type != "meta":
            place, pinned = HOST, spec.host.pinned
        stored = torch.int16 if dtypes.remainders else dtypes.main
        self.main = levels.buffer(strategy.optimizer, stored, place, pinned)
        self.gather = self._gather_on(device)
        # Weights in the host's memory have to be fetched, also where nothing else is between them and their use.
        if computes_with_main(strategy, dtypes) and spec.host is None:
            self.compute = self.main
            views = [self.main.view(name) for name in spec.names]
        else:
            self.compute = levels.buffer(0, dtypes.compute, device)
            # .data: writing the gathered weights must not count as a change of the tensors that autograd saved.
            views = [self.compute.view(name).data for name in spec.names]
        # From the values as given: main weights built from weights cast to bfloat16 train to other losses.
        self.params = [
            self._main_parameter(index, *one, view, finish)
            for index, (one, view) in enumerate(zip(given, views, strict=True))
        ]
        # On the meta device nothing is to be freed.
        if not (self.compute is self.main or dtypes.remainders or self.on_meta):
            self.compute.free()
        self.unsharded = [
            nn.Parameter(
                view if others is None else others.wrap(view),
                requires_grad=view.is_floating_point() or view.is_complex(),
            )
            for view, others in zip(views, spec.tensor_parallel, strict=True)
        ]
        # Marks that a program put on its parameters steer optimizers, and kernels.
        for (param, _), *copies in zip(given, self.params, self.unsharded, strict=True):
            marks = {key: value for key, value in vars(param).items() if key != tensor_parallel.MARK}
            for copy in copies:
                vars(copy).update(marks)
        for unsharded in self.unsharded:
            # Its gradient is collected by this group, which adds up what model axes spread.
            setattr(unsharded, tensor_parallel.SUMMED, None)
        self.pooled = PooledWeights(
            spec.names, self.compute, self.unsharded, finish, spec.context, spec.suffix
        )

    def _gather_on(self, device: torch.device) -> WeightGather:
        spec = self._group_spec
        levels, strategy, dtypes, fetches = spec.levels, spec.strategy, spec.dtypes, spec.host is not None
        if dtypes.remainders:
            return SplitGather(levels, strategy)
        if dtypes.gather is not None:
            return QuantizedGather(levels, strategy, dtypes.gather, device, spec.tensor_parallel, fetches)
        return CastGather(levels, strategy, dtypes.compute, device, fetches)

    def _main_parameter(
        self,
        index: int,
        param: nn.Parameter,
        local: torch.Tensor,
        whole: torch.Tensor,
        finish: Callable[[], None],
    ) -> nn.Parameter:
        spec = self._group_spec
        axes, given, name = spec.strategy.optimizer, spec.tensor_parallel[index], spec.names[index]
        stored, bounds, here = self.main.view(name), None, spec.levels.mesh.index(axes)
        if axes:
            bounds = spec.levels.row_bounds(axes, name)
        view = stored
        if spec.dtypes.remainders:
            first = 0 if bounds is None else bounds[here] * spec.layout.slot(name).row_size
            view = whole.view(-1)[first : first + stored.numel()].view(stored.shape)
        if bounds is not None and not local.is_meta:
            local = (
                local.reshape(-1, *view.shape[1:])[bounds[here] : bounds[here + 1]] if view.numel() else view
            )
        if spec.dtypes.remainders:
            if not local.is_meta:
                split(local.to(spec.dtypes.main), view, stored)
            attach(view, stored, finish)
        elif not local.is_meta:
            view.copy_(local)
        mesh = spec.levels.mesh.mesh
        others: tuple[Placement, ...] = ()
        if given is not None:
            mesh, others = given.joint_mesh(mesh), given.placements
        tensor = make_dtensor(view, mesh, param.shape, bounds, axes=max(axes, 1), tensor_parallel=others)
        return nn.Parameter(tensor, requires_grad=param.requires_grad)

    def when_made(self, callback: Callable[[], None]) -> None:
        """Nothing: ``unsharded`` stay the same."""

    @property
    def on_meta(self) -> bool:
        return self.main.flat.is_meta

    @property
    def main_tensors(self) -> list[torch.Tensor]:
        return [self.main.flat]

    @property
    def main_version(self) -> Version:
        if self._group_spec.dtypes.remainders:
            return tuple(local_of(param)._version for param in self.params)
        return (self.main.flat._version,)

    @property
    def real_bytes(self) -> int:
        return sum(local_of(param).numel() for param in self.params) * self.main.flat.element_size()

    @property
    def resident(self) -> torch.Tensor | None:
        return self.gather.resident

    @property
    def separate(self) -> bool:
        return self.compute is not self.main

    @property
    def gathers(self) -> bool:
        spec = self._group_spec
        return self.separate and (spec.strategy.optimizer > 0 or not spec.dtypes.remainders)

    @property
    def compute_tensors(self) -> list[torch.Tensor]:
        return [self.compute.flat]

    @property
    def compute_device(self) -> torch.device:
        return self.compute.flat.device

    @property
    def allocated(self) -> bool:
        return self.compute.allocated

    @property
    def aside(self) -> bool:
        return self.pooled.aside

    def steps(self, changed: bool, current: bool) -> list[Step]:
        """See ``GroupWeights``."""
        with written_with_remainders(map(local_of, self.params)):
            target = self.pooled.prepare(changed)
        return self.gather.steps(self.main.flat, target, current)

    def settle(self) -> None:
        self.pooled.settle()

    def release(self) -> None:
        self.pooled.release()
