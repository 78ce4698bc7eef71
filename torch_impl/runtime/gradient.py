"""The gradients of one parameter group, from the backward of each rank to what the optimizer reads.

    backward            collect     |g0 g0 g0|g1 g1|g2 g2 g2|. .|   unsharded, in one buffer
    end of the unit     reduce                  |g1 g2|             over the axes that gradients are sharded over,
                                                                    in the last microbatch over the others as well
                     or keep                                        local sums of several microbatches

The state between two backwards is ``.grad`` of the sharded parameters and nothing else, so that ``zero_grad`` in both
modes, or setting a gradient by hand, means what it says:

* None: no gradient yet
* a DTensor placed like the parameter: the reduced gradient, averaged over the ranks
* a DTensor placed ``Partial`` on some axes: sums that are not reduced over them yet, of microbatches before the last.
  Reading it raises.

Sums are divided when they are reduced over the last axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from bridge.sharding.strategy import Strategy
from torch_impl.comm.streams import Step, Streams, Transfer
from torch_impl.dtensor.local import is_partial, local_of
from torch_impl.dtensor.placement import row_placement
from torch_impl.dtensor.tensor import RowDTensor, make_partial, wrap_like
from torch_impl.runtime.levels import ShardLevels
from torch_impl.runtime.pool import PooledGradient
from torch_impl.runtime.precision import GroupDtypes
from torch_impl.runtime.tensor_parallel import TensorParallel

# Of a unit's gradients, what is held before they get their buffer. Both are in use together when it is made, so more
# would raise the peak at the end of a unit; less, that at its beginning.
_HELD = 0.5


class _Pending(NamedTuple):
    """A reduction under way: where its sums will be, and whether it is the last one, over all axes."""

    transfer: Transfer
    sums: torch.Tensor
    last: bool


def _nothing() -> None:
    pass


class GroupGradient:
    """Collects the gradients of ``params`` (the sharded ones, named ``names`` in the layout)."""

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        tensor_parallel: Sequence[TensorParallel | None],
        levels: ShardLevels,
        strategy: Strategy,
        dtypes: GroupDtypes,
        divisor: float,
    ) -> None:
        self.divisor = divisor
        self._names, self._params, self._tensor_parallel = list(names), list(params), list(tensor_parallel)
        self._levels, self._strategy, self._dtypes = levels, strategy, dtypes
        self._whole: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._untouched: set[int] = set()
        self._held: dict[int, torch.Tensor] = {}
        self._held_numel = 0
        self._scaled = False
        # Whether to look at every .grad after a backward, which costs too much to be done always.
        self._left_partial = False
        self._pending: _Pending | None = None
        self.make_room: Callable[[], None] = _nothing
        device = local_of(params[0]).device
        self.memory = PooledGradient(levels.size(0), dtypes.reduce, device)
        if dtypes.grad != dtypes.main:
            for param in params:
                param.grad_dtype = dtypes.grad

    @property
    def only_waits(self) -> bool:
        """Whether to finish the reduction under way only means to wait for it, see ``streams.Transfer``."""
        return self._pending is not None and self._pending.transfer.only_waits

    @property
    def collecting(self) -> list[torch.Tensor]:
        """Gradients of a backward that is under way; the buffer may hold the sums of earlier microbatches too."""
        return [*self._held.values()] if self._whole is None else [self._whole]

    def add(self, index: int, grad: torch.Tensor, keep: bool) -> None:
        """Take the unsharded gradient of parameter ``index``, which nobody else holds. ``keep``: it is not reduced.

        The buffer is made when enough has come: where most of a unit's gradients come late, as an embedding's
        beside an output layer, it would be in use through all of backward. If all have come by then, it waits for the
        reduction, before which the unit's weights are freed.
        """
        given = self._tensor_parallel[index]
        if given is not None:
            grad = given.local_gradient(grad)
        if self._whole is None:
            if not self._held:
                self.finish()
            if keep or index in self._held or (not self._held and self._kept()):
                self._start(keep)
            else:
                self._held[index] = grad
                self._held_numel += grad.numel()
                if self._held_numel > _HELD * self._levels.size(0):
                    if len(self._held) == len(self._names):
                        self.make_room()
                    else:
                        self._start(keep)
                return
        self._put(index, grad)

    def _put(self, index: int, grad: torch.Tensor) -> None:
        view = self._views[index]
        if index in self._untouched:
            self._untouched.discard(index)
            if self._scaled:
                torch.mul(grad, 1 / self.divisor, out=view)
            else:
                view.copy_(grad)
        else:
            view.add_(grad, alpha=1 / self.divisor if self._scaled else 1)

    def direct_view(self, index: int, keep: bool) -> tuple[torch.Tensor, bool]:
        """Where to write the unsharded gradient of parameter ``index``, unscaled, and whether nothing is there yet."""
        if self._whole is None:
            self.finish()
            self._start(keep)
            self._scaled = False
        return self._views[index], index in self._untouched

    def mark_written(self, index: int) -> None:
        """What ``direct_view`` gave was written."""
        self._untouched.discard(index)

    def keep(self) -> None:
        """Leave what was collected in ``.grad``, unreduced; nothing if nothing came."""
        if not self._came:
            self.drop()
            return
        whole = self._complete(keep=True)
        if self.memory.pooled:
            whole = whole.clone()
        self._leave_partial(self._levels.views(0, whole), level=0)
        self._forget_collected()
        self.memory.release()

    def waits(self, last: bool) -> bool:
        """Whether sums of earlier microbatches are there that a reduction, over all axes if ``last``, would reduce."""
        if not self._left_partial:
            return False
        grads = [param.grad for param in self._params if param.requires_grad]
        cuts = [_cut_of(grad) for grad in grads if grad is not None]
        self._left_partial = any(partial_sums for _, partial_sums in cuts)
        return any(partial_sums and (last or axes == 0) for axes, partial_sums in cuts)

    def start(self, last: bool, streams: Streams, idle: bool = False) -> bool:
        """Begin to reduce what was collected; nothing (False) if nothing came, else a collective.

        Parameters of the group that got no gradient count as zero. ``last``: over all axes, not only those that
        gradients are sharded over. ``idle``: nothing came, but sums wait, see ``waits``. ``finish`` puts the result
        into ``.grad``.
        """
        if not self._came and not idle:
            self.drop()
            return False
        self.finish()
        values = self._complete(keep=False).to(self._dtypes.reduce)
        if self._prescaled and not self._scaled:
            values = values / self.divisor
        if values is not self._whole:
            self.memory.release()
        self._forget_collected()
        last = last or self._strategy.gradients == self._levels.mesh.ndim
        steps, sums = self._steps(values, last)
        self._pending = _Pending(streams.start(steps), sums, last)
        return True

    def finish(self) -> None:
        """Wait for the reduction that began, if one did, and put its result into ``.grad``."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.transfer.finish()
            self.memory.release()
            if pending.last:
                self._publish_reduced(pending.sums)
            else:
                self._publish_partial(pending.sums)

    def drop(self) -> None:
        """Forget what was collected in a backward that did not finish.

        Gradients are added to the sums of earlier microbatches in place: if those are kept, what arrived in the
        unfinished backward stays in them until ``zero_grad``.
        """
        self._forget_collected()
        self.memory.release()

    def abandon(self) -> None:
        """Forget also what is being reduced."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.transfer.finish()
        self.drop()

    def _forget_collected(self) -> None:
        self._whole, self._views, self._untouched, self._scaled = None, [], set(), False
        self._held, self._held_numel = {}, 0

    @property
    def _came(self) -> bool:
        """Whether any gradient has come, or sums of earlier microbatches are in the buffer."""
        return bool(self._held) or (self._whole is not None and len(self._untouched) < len(self._names))

    @property
    def _prescaled(self) -> bool:
        # float16 sums overflow over many ranks, so they are averaged before; other dtypes after, which is exact.
        return self._dtypes.reduce == torch.float16

    def _start(self, keep: bool) -> None:
        self.make_room()
        kept = self._kept()
        flat = self._flat_of(kept)
        dtype = self._dtypes.grad if keep or kept else self._dtypes.reduce
        # Where nothing is scattered, the reduced gradients stay in this buffer.
        if flat is None and not keep and not kept and self._strategy.optimizer:
            flat = self.memory.take()
        elif flat is None:
            flat = torch.empty(self._levels.size(0), dtype=dtype, device=local_of(self._params[0]).device)
        self._whole = flat
        self._views = self._levels.views(0, flat)
        self._untouched = set(range(len(self._names))).difference(kept)
        self._scaled = self._prescaled and not keep and not kept
        for index, local in kept.items():
            if local.data_ptr() != self._views[index].data_ptr():
                self._views[index].copy_(local)
        held, self._held, self._held_numel = self._held, {}, 0
        while held:
            self._put(*held.popitem())

    def _complete(self, keep: bool) -> torch.Tensor:
        """The buffer that was collected, with zeros where no gradient came."""
        if self._whole is None:
            self._start(keep)
        assert self._whole is not None
        for index in self._untouched:
            self._views[index].zero_()
        return self._whole

    def _kept(self) -> dict[int, torch.Tensor]:
        """The sums of earlier microbatches that are not reduced over any axis, by parameter."""
        grads = [param.grad for param in self._params]
        return {
            index: local_of(grad)
            for index, grad in enumerate(grads)
            if grad is not None and _cut_of(grad) == (0, True)
        }

    def _flat_of(self, kept: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """The flat buffer whose views these sums are; None if they are not, since a program may set ``.grad``."""
        filled = [(index, local) for index, local in kept.items() if local.numel()]
        if not filled:
            return None
        storage = filled[0][1].untyped_storage()
        size, dtype = self._levels.size(0), self._dtypes.grad
        whole = self._levels.layouts[0]
        for index, local in filled:
            placed = local.untyped_storage().data_ptr(), local.storage_offset(), local.is_contiguous()
            if placed != (storage.data_ptr(), whole.start(self._names[index]), True):
                return None
        if storage.nbytes() != size * dtype.itemsize or filled[0][1].dtype != dtype:
            return None
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (size,), (1,))

    def _leave_partial(self, views: Sequence[torch.Tensor], level: int) -> None:
        """Make ``views``, sums of a level that are not reduced over the other axes, the gradients."""
        mesh = self._levels.mesh
        self._left_partial = True
        for name, param, given, view in zip(
            self._names, self._params, self._tensor_parallel, views, strict=True
        ):
            if not param.requires_grad:
                continue
            # Sums that are not reduced at all were collected together with the new ones.
            if param.grad is not None and _cut_of(param.grad) != (0, True):
                self._add_to_partial(view, name, param.grad, level)
            bounds = self._levels.row_bounds(level, name) if level else None
            param.grad = make_partial(
                view,
                mesh.mesh if given is None else given.joint_mesh(mesh.mesh),
                param.shape,
                self.divisor == mesh.size,
                bounds=bounds,
                axes=level,
                tensor_parallel=() if given is None else given.placements,
            )

    def _add_to_partial(self, view: torch.Tensor, name: str, grad: torch.Tensor, level: int) -> None:
        """Add a gradient that is reduced as far as ``view`` or further, as its share of a sum to be made."""
        mesh, local = self._levels.mesh, local_of(grad)
        axes, partial_sums = _cut_of(grad)
        # A mean stands for the sum times the divisor, which the ranks that hold the same rows contribute together.
        share = 1.0 if partial_sums else self.divisor * mesh.shards(max(axes, level)) / mesh.size
        if axes == level:
            view.add_(local, alpha=share)
            return
        bounds, here = self._levels.row_bounds(axes, name), mesh.index(axes)
        first = self._levels.row_bounds(level, name)[mesh.index(level)]
        r0, r1 = bounds[here] - first, bounds[here + 1] - first
        if r1 > r0:
            view.view(-1, *local.shape[1:])[r0:r1].add_(local, alpha=share)

    def _steps(self, values: torch.Tensor, last: bool) -> tuple[list[Step], torch.Tensor]:
        """What sums ``values``, of level 0, over the axes one by one, and where the sums will be."""
        strategy, levels = self._strategy, self._levels
        steps: list[Step] = []
        # All memory is allocated here: see ``streams``.
        for axis in range(levels.mesh.ndim if last else strategy.gradients):
            lane = "reduce" if axis == 0 else "outer"
            if axis == strategy.gradients and axis > 0:
                steps.append((lane, partial(self._add_waiting, values)))
            if axis < strategy.optimizer:
                shard = values.new_empty(levels.size(axis + 1))
                steps.append((lane, partial(levels.reduce, axis, shard, values)))
                values = shard
            else:
                steps.append((lane, partial(levels.sum, axis, values)))
        return steps, values

    def _add_waiting(self, values: torch.Tensor, async_op: bool) -> None:
        """Add to ``values`` the sums of earlier microbatches that were not reduced over the outer axes."""
        level = self._strategy.gradients
        for param, view in zip(self._params, self._levels.views(level, values), strict=True):
            if param.grad is not None and _cut_of(param.grad) == (level, True):
                view.add_(local_of(param.grad), alpha=1 / self.divisor if self._prescaled else 1)

    def _publish_partial(self, sums: torch.Tensor) -> None:
        level = self._strategy.gradients
        sums = sums.to(self._dtypes.grad)
        if self._prescaled:
            sums *= self.divisor
        self._leave_partial(self._levels.views(level, sums), level)

    def _publish_reduced(self, sums: torch.Tensor) -> None:
        reduced = sums.to(self._dtypes.grad)
        if not self._prescaled and self.divisor != 1:
            reduced /= self.divisor
        views = self._levels.views(self._strategy.optimizer, reduced)
        fresh = [(p, view) for p, view in zip(self._params, views, strict=True) if p.requires_grad]
        present = [
            (local_of(p.grad), view) for p, view in fresh if p.grad is not None and not _cut_of(p.grad)[1]
        ]
        if len(present) == len(fresh):
            torch._foreach_add_([grad for grad, _ in present], [view for _, view in present])
        else:
            for grad, view in present:
                view.add_(grad)
            for param, view in fresh:
                param.grad = wrap_like(param, view)
        for param, _ in fresh:
            _run_hooks(param)


def _run_hooks(param: nn.Parameter) -> None:
    """The user's ``register_post_accumulate_grad_hook``, which autograd runs only where it accumulates itself."""
    for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def _cut_of(grad: torch.Tensor) -> tuple[int, bool]:
    """Over how many axes a gradient is cut, and whether sums over others are missing in it."""
    if not isinstance(grad, RowDTensor):
        raise TypeError(
            f"gradient of a sharded parameter: expected a DTensor placed like the parameter, got {type(grad).__name__} "
            f"of shape {tuple(grad.shape)}; set .grad to None or to torch.zeros_like(param)"
        )
    rows = row_placement(grad.placements)
    return 0 if rows is None else rows.axes, is_partial(grad)
