"""Collecting the gradients of one parameter group on each rank, from backward to the reduction.

    backward            collect     |g0 g0 g0|g1 g1|g2 g2 g2|. .|   unsharded, in one buffer
    end of the unit     reduce                  |g1 g2|             over the axes that shard gradients,
                                                                    in the last microbatch over the others as well
                     or keep                                        local sums of several microbatches

``reduction`` describes the contents of ``.grad`` between two backwards.

Fused kernels may write gradients themselves, without a gradient from autograd. On request,
unsharded parameters have three attributes while their unit runs backward, with the names that the
kernels of TransformerEngine and Megatron expect:

    main_grad                  view of the buffer that will be reduced, shaped like the parameter (or this rank's part,
                               under tensor parallelism), in ``reduce_dtype``, or in ``grad_dtype`` when it is kept
    overwrite_main_grad        True: the view is still empty, so the first write overwrites; False: add to it
    grad_added_to_main_grad    False; a kernel sets it to True when it has written; later writes add

For such a parameter, a gradient that autograd then delivers is a placeholder and is ignored; without a placeholder the
attribute alone counts. If a parameter's kernels do not use these attributes, its gradient is copied as usual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torch_impl.comm import collectives
from torch_impl.runtime.gradients.reduction import GroupReduction
from torch_impl.runtime.ground.group_spec import GroupSpec
from torch_impl.runtime.ground.tensor_parallel import SUMMED
from torch_impl.runtime.memory.pool import Slot
from torch_impl.runtime.weights.context import UnitContext

# The part of a unit's gradients that is held before they get their buffer, unless the buffer takes
# the place of weights. While the buffer is made, both are in use, so a larger part would raise the
# peak at the end of a unit, and a smaller part the peak at its beginning.
_HELD = 0.5

_MAIN_GRAD = ("main_grad", "overwrite_main_grad", "grad_added_to_main_grad")


class GradientBuffer:
    """The buffer in which gradients of a group are collected and reduced: ``size`` elements."""

    purpose = "gradients"

    def __init__(
        self, size: int, dtype: torch.dtype, device: torch.device, context: UnitContext, suffix: str
    ) -> None:
        self.nbytes, self.device = size * dtype.itemsize, device
        self._context, self._suffix = context, suffix
        self._size, self._dtype = size, dtype
        self._slot: Slot | None = None

    @property
    def name(self) -> str:
        return self._context.name + self._suffix

    @property
    def shares(self) -> bool:
        # A backend that reduces a copy no longer needs the gradient's memory once the reduction began.
        return not self._context.schedule.streams.copies

    @property
    def pooled(self) -> bool:
        """Whether the taken buffer belongs to the pool, which others use after its release."""
        return self._slot is not None

    def take(self) -> torch.Tensor:
        """The buffer, with arbitrary contents."""
        self._context.schedule.pool.begin_use(self)
        flat = torch.empty(0, dtype=self._dtype, device=self.device)
        slot = self._context.schedule.pool.slot_of(self)
        # A program that deviates from the plan may find the slot in use.
        if slot is not None and slot.take(self):
            self._slot = slot
            return flat.set_(slot.storage, 0, (self._size,), (1,))
        return flat.new_empty(self._size)

    def release(self) -> None:
        """Give the buffer back; does nothing if it was not taken."""
        self._context.schedule.pool.end_use(self)
        if self._slot is not None:
            slot, self._slot = self._slot, None
            slot.leave(self)

    def lose_contents(self) -> None:
        """Nobody reads a gradient buffer after its release."""


class GroupGradient:
    """Collects the gradients of ``unsharded`` in ``memory``, for ``reduction``."""

    def __init__(
        self,
        spec: GroupSpec,
        unsharded: Sequence[nn.Parameter],
        memory: GradientBuffer,
        reduction: GroupReduction,
        context: UnitContext,
    ) -> None:
        self.reduction = reduction
        self._group_spec, self._unsharded, self._memory, self._context = spec, unsharded, memory, context
        self._whole: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._untouched: set[int] = set()
        self._held: dict[int, torch.Tensor] = {}
        self._held_numel = 0
        self._divided = False
        self._exposed = False

    @property
    def collecting(self) -> list[torch.Tensor]:
        """Gradients of a backward in progress; the buffer may hold sums of earlier microbatches."""
        return [*self._held.values()] if self._whole is None else [self._whole]

    def add_gradient(self, index: int, keep: bool, frees: bool) -> None:
        """Take the complete gradient of unsharded parameter ``index``.

        ``keep``: it will not be reduced. ``frees``: the unit's weights are freed before the reduction.
        """
        param = self._unsharded[index]
        # A fused kernel may have left no placeholder.
        if param.grad is not None:
            if not _kernel_wrote(param):
                # Views of the buffer are written in place, which autograd must not record.
                with torch.no_grad():
                    self._add(index, param.grad, keep, frees)
            # The next backward would add to it, and it is as large as the unsharded parameter.
            param.grad = None

    def _add(self, index: int, grad: torch.Tensor, keep: bool, frees: bool) -> None:
        """Take a gradient that nobody else holds.

        If the unit's weights are freed before the reduction, the buffer is made after they are freed, to take their
        place. Otherwise the buffer is made when enough gradients have come. If most of a unit's gradients come late,
        for example an embedding's next to an output layer, an early buffer would be in use through all of backward.
        """
        grad = self._over_model_axes(index, grad)
        if self._whole is None:
            if not self._held:
                # An earlier call of the unit may still be reducing the group's memory.
                self.reduction.finish()
            # Kept sums are added to in place, and a parameter's second gradient needs the first.
            if keep or index in self._held or (not self._held and self.reduction.kept_whole()):
                self._context.schedule.reductions.make_room()
                self._make_buffer(keep)
            else:
                self._held[index] = grad
                self._held_numel += grad.numel()
                if self._held_numel > _HELD * self._group_spec.levels.size(0):
                    self._context.schedule.reductions.make_room()
                    # With ``frees`` the weights are freed first, and the buffer takes their place: part
                    # of the change that took the benchmark's peak on 4 gloo ranks from 616 to 606 MB.
                    if not frees and len(self._held) < len(self._group_spec.names):
                        self._make_buffer(keep)
                return
        self._put(index, grad)

    def _over_model_axes(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient whose terms are on several ranks of model axes."""
        spec = self._group_spec
        # float16 sums that are not divided yet would overflow.
        reduce = grad.dtype if spec.divides_first else spec.dtypes.reduce
        placed = spec.tensor_parallel[index]
        # Autograd may place the gradient of a tensor-parallel weight differently from the weight.
        if placed is not None:
            return placed.local_gradient(grad, reduce)
        group = vars(self._unsharded[index]).get(SUMMED)
        if group is None:
            return grad
        grad = grad.to(reduce, copy=True, memory_format=torch.contiguous_format)
        collectives.all_reduce(grad, group)
        return grad

    def _put(self, index: int, grad: torch.Tensor) -> None:
        view, divisor = self._views[index], self._group_spec.divisor
        # Memory of the buffer is arbitrary until the first write.
        if index in self._untouched:
            self._untouched.discard(index)
            if self._divided:
                torch.mul(grad, 1 / divisor, out=view)
            else:
                view.copy_(grad)
        else:
            view.add_(grad, alpha=1 / divisor if self._divided else 1)

    def attach_main_grads(self, keep: bool) -> None:
        """Give the unsharded parameters their main gradients; ``keep``: see ``add_gradient``."""
        self._exposed = True
        for index, param in enumerate(self._unsharded):
            if param.requires_grad and not hasattr(param, "main_grad"):
                if self._whole is None:
                    self.reduction.finish()
                    self._context.schedule.reductions.make_room()
                    self._make_buffer(keep)
                    # Kernels write gradients that are not divided.
                    self._divided = False
                values = (self._views[index], index in self._untouched, False)
                vars(param).update(zip(_MAIN_GRAD, values, strict=True))

    def _detach_main_grads(self) -> None:
        """Remove the main gradients, and record which of them were written."""
        if self._exposed:
            self._exposed = False
            for index, param in enumerate(self._unsharded):
                if _kernel_wrote(param):
                    self._untouched.discard(index)
                for name in _MAIN_GRAD:
                    vars(param).pop(name, None)

    def leave_unreduced(self) -> None:
        """Leave the collected gradients in ``.grad``, unreduced; does nothing without any."""
        self._detach_main_grads()
        if not self._has_gradients:
            self._drop()
            return
        whole = self._complete(keep=True)
        used = self._used
        host = self._group_spec.host
        # Others use the pool's memory before these sums are reduced.
        if host is not None:
            whole = host.copy_of(whole)
        elif self._memory.pooled:
            whole = whole.clone()
        self.reduction.leave_partial(whole, level=0, used=used)
        self._drop()

    def reduce(self, last: bool, idle: bool = False) -> None:
        """Begin to reduce the collected gradients, a collective; does nothing without any.

        Parameters of the group without a gradient on this rank count as zero; they get a gradient if they have one on
        another rank. ``last``: reduce over all axes, not only those that shard gradients. ``idle``: reduce even without
        collected gradients, because sums wait, see ``GroupReduction.waits``, or because other ranks may have gradients.

        ``.grad`` has the result when the reduction is finished: before the next reduction of another
        unit, see ``wait_for_others``, or at the end of the backward.
        """
        self._detach_main_grads()
        if not self._has_gradients and not idle:
            self._drop()
            return
        values = self._complete(keep=False).to(self._group_spec.dtypes.reduce)
        if self._group_spec.divides_first and not self._divided:
            values = values / self._group_spec.divisor
        # A cast has copied the values, so the buffer is free before the collective begins. Otherwise it is in use until
        # the reduction is finished.
        if values is not self._whole:
            self._memory.release()
        used = self._used
        self._forget()
        self.reduction.start(values, last, used)

    def wait_for_others(self) -> None:
        """Finish the reductions of another unit, before the first one of this unit begins."""
        self._context.schedule.reductions.finish()

    def abandon(self) -> None:
        """Discard the gradients collected in a backward that raised, and reductions in progress.

        Gradients are added in place to the sums of earlier microbatches. If those sums are kept,
        gradients that came in the unfinished backward stay in them until ``zero_grad``.
        """
        self._detach_main_grads()
        self.reduction.abandon()
        self._drop()
        for param in self._unsharded:
            param.grad = None

    def _drop(self) -> None:
        self._forget()
        self._memory.release()

    def _forget(self) -> None:
        self._whole, self._views, self._untouched, self._divided = None, [], set(), False
        self._held, self._held_numel = {}, 0

    @property
    def _has_gradients(self) -> bool:
        """Whether any gradient has come, or the buffer contains sums of earlier microbatches."""
        return bool(self._held) or (
            self._whole is not None and len(self._untouched) < len(self._group_spec.names)
        )

    @property
    def _used(self) -> frozenset[int]:
        """The parameters whose gradients came, or have earlier sums; valid once the buffer is made."""
        return frozenset(range(len(self._group_spec.names))).difference(self._untouched)

    def _complete(self, keep: bool) -> torch.Tensor:
        """The buffer, with zeros in the padding, which hooks read, and where no gradient came."""
        if self._whole is None:
            # Reductions of other units are finished, and those of this unit continue.
            self._make_buffer(keep)
        assert self._whole is not None
        unwritten = [self._views[index] for index in self._untouched]
        unwritten += self._group_spec.levels.padding(self._whole)
        if unwritten:
            torch._foreach_zero_(unwritten)
        return self._whole

    def _make_buffer(self, keep: bool) -> None:
        """Make the buffer, and copy the sums of earlier microbatches and the held gradients to it."""
        spec = self._group_spec
        kept = self.reduction.kept_whole()
        flat = None if spec.host is not None else self.reduction.flat_of(kept)
        # Sums of several microbatches are accumulated in the dtype that the optimizer reads.
        dtype = spec.dtypes.grad if keep or kept else spec.dtypes.reduce
        # If nothing is scattered, the reduced gradients stay in this buffer.
        if flat is None and not keep and not kept and spec.scatters:
            flat = self._memory.take()
        elif flat is None:
            flat = torch.empty(spec.levels.gradient_size(0), dtype=dtype, device=self._memory.device)
        self._whole = flat
        self._views = spec.levels.views(0, flat)
        self._untouched = set(range(len(spec.names))).difference(kept)
        self._divided = spec.divides_first and not keep and not kept
        # Sums that a program has set by hand, or that wait on the host, are stored elsewhere.
        for index, local in kept.items():
            if local.data_ptr() != self._views[index].data_ptr():
                self._views[index].copy_(local)
        held, self._held, self._held_numel = self._held, {}, 0
        # One at a time: a gradient's memory is free when it has been copied.
        while held:
            self._put(*held.popitem())


def _kernel_wrote(param: torch.Tensor) -> bool:
    """Whether a kernel has written this parameter's main gradient."""
    return getattr(param, "grad_added_to_main_grad", False)
