"""The gradients of one parameter group, from the backward of each rank to what the optimizer reads.

    backward            collect     |g0 g0 g0|g1 g1|g2 g2 g2|. .|   unsharded, zeros where no gradient came
    end of the unit     reduce                  |g1 g2|             reduce-scatter (or all-reduce), then average
                     or keep                                        local sums of several microbatches

The state between two backwards is ``.grad`` of the sharded parameters and nothing else, so that ``zero_grad`` in both
modes, or setting a gradient by hand, means what it says:

* None: no gradient yet
* a DTensor placed like the parameter: the reduced gradient, averaged over the ranks
* a DTensor placed ``Partial``: sums that are not reduced yet, of microbatches before the last. Reading it raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from torch_impl import collectives
from torch_impl.buffer import FlatBuffer
from torch_impl.dtensor import RowDTensor, local_of, make_partial, row_range_of, wrap_like
from torch_impl.layout import Layout
from torch_impl.precision import GroupDtypes


class GroupGradient:
    """Collects the gradients of ``params`` (the sharded ones, named ``names`` in the layout)."""

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[torch.nn.Parameter],
        layout: Layout,
        mesh: DeviceMesh,
        sharded: bool,
        dtypes: GroupDtypes,
        divisor: float,
    ) -> None:
        self.divisor = divisor
        self._names, self._params = list(names), list(params)
        self._layout, self._mesh, self._sharded, self._dtypes = layout, mesh, sharded, dtypes
        self._whole: FlatBuffer | None = None
        self._views: list[torch.Tensor] = []
        self._untouched: set[int] = set()
        if dtypes.grad != dtypes.main:
            for param in params:
                param.grad_dtype = dtypes.grad

    @property
    def collecting(self) -> list[torch.Tensor]:
        """The buffer of a backward that is under way; it may hold the sums of earlier microbatches too."""
        return [] if self._whole is None else [self._whole.flat]

    def add(self, index: int, grad: torch.Tensor, keep: bool) -> None:
        """Take the unsharded gradient of parameter ``index``. ``keep``: it will be kept, not reduced."""
        if self._whole is None:
            self._start(self._dtypes.grad if keep else self._dtypes.reduce)
        if index in self._untouched:
            self._untouched.discard(index)
            self._views[index].copy_(grad)
        else:
            self._views[index].add_(grad)

    def finish(self, keep: bool) -> None:
        """Reduce what was collected into ``.grad``, or keep it there unreduced; nothing if nothing came.

        Parameters of the group that got no gradient count as zero. A collective unless ``keep``.
        """
        if self._whole is None:
            return
        if keep:
            self._keep(self._whole)
        else:
            self._reduce(self._whole)
        self.drop()

    def drop(self) -> None:
        """Forget what was collected in a backward that did not finish.

        Gradients are added to the sums of earlier microbatches in place: if those are kept, what arrived in the
        unfinished backward stays in them until ``zero_grad``.
        """
        self._whole, self._views, self._untouched = None, [], set()

    def _trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(n, p) for n, p in zip(self._names, self._params, strict=True) if p.requires_grad]

    def _start(self, dtype: torch.dtype) -> None:
        device = local_of(self._params[0]).device
        kept = self._kept()
        flat = self._flat_of(kept)
        if kept:
            dtype = self._dtypes.grad
        self._whole = FlatBuffer(self._layout, dtype, device, None, flat)
        self._views = [self._whole.view(name) for name in self._names]
        self._untouched = set(range(len(self._names))) - set(kept)
        if flat is None:
            for index, local in kept.items():
                self._views[index].copy_(local)
        else:
            for index in self._untouched:
                self._views[index].zero_()

    def _kept(self) -> dict[int, torch.Tensor]:
        """The unreduced sums of earlier microbatches, by parameter."""
        grads = [param.grad for param in self._params]
        return {
            index: local_of(grad)
            for index, grad in enumerate(grads)
            if isinstance(grad, RowDTensor) and _is_partial(grad)
        }

    def _flat_of(self, kept: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """The flat buffer whose views these sums are; None if they are not, since a program may set ``.grad``."""
        filled = [(index, local) for index, local in kept.items() if local.numel()]
        if not filled:
            return None
        storage = filled[0][1].untyped_storage()
        size, dtype = self._layout.padded_size, self._dtypes.grad
        for index, local in filled:
            placed = local.untyped_storage().data_ptr(), local.storage_offset(), local.is_contiguous()
            if placed != (storage.data_ptr(), self._layout.start(self._names[index]), True):
                return None
        if storage.nbytes() != size * dtype.itemsize or filled[0][1].dtype != dtype:
            return None
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (size,), (1,))

    def _keep(self, whole: FlatBuffer) -> None:
        for name, param in self._trainable():
            view = whole.view(name)
            if param.grad is not None and not _is_partial(param.grad):
                self._unreduce(view, param.grad)
            mean = self.divisor == self._mesh.size()
            param.grad = make_partial(view, self._mesh, view.shape, mean)

    def _unreduce(self, view: torch.Tensor, reduced: torch.Tensor) -> None:
        """Turn a gradient that was reduced earlier into this rank's share of a sum that is still to be reduced."""
        local = local_of(reduced)
        if self._sharded:
            r0, r1 = row_range_of(reduced)
            if r1 > r0:
                view.view(-1, *local.shape[1:])[r0:r1].add_(local, alpha=self.divisor)
        else:
            view.add_(local, alpha=self.divisor / self._mesh.size())

    def _reduce(self, whole: FlatBuffer) -> None:
        values = whole.flat.to(self._dtypes.reduce)
        # float16 sums overflow over many ranks, so they are averaged before; other dtypes after, which is exact.
        before = self._dtypes.reduce == torch.float16
        if before:
            values = values / self.divisor
        if self._sharded:
            reduced = values.new_empty(self._layout.shard_size)
            slices = self._layout.buffer_slices()
            shards = [reduced[part] for _, part in slices]
            collectives.reduce_scatter(
                shards, [values[of_all] for of_all, _ in slices], self._mesh.get_group()
            )
        else:
            reduced = values
            collectives.all_reduce(reduced, self._mesh.get_group())
        reduced = reduced.to(self._dtypes.grad)
        if not before:
            reduced /= self.divisor
        self._publish(reduced)

    def _publish(self, reduced: torch.Tensor) -> None:
        rank = self._mesh.get_local_rank() if self._sharded else None
        shard = FlatBuffer(self._layout, reduced.dtype, reduced.device, rank, reduced)
        trainable = self._trainable()
        earlier = [None if p.grad is None or _is_partial(p.grad) else p.grad for _, p in trainable]
        present = [local_of(grad) for grad in earlier if grad is not None]
        if len(present) == len(trainable):
            torch._foreach_add_(present, [shard.view(name) for name, _ in trainable])
        else:
            for (name, param), grad in zip(trainable, earlier, strict=True):
                view = shard.view(name)
                if grad is not None:
                    view.add_(local_of(grad))
                param.grad = wrap_like(param, view)
        for _, param in trainable:
            _run_hooks(param)


def _run_hooks(param: torch.nn.Parameter) -> None:
    """The user's ``register_post_accumulate_grad_hook``, which autograd runs only where it accumulates itself."""
    for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def _is_partial(grad: torch.Tensor) -> bool:
    if not isinstance(grad, RowDTensor):
        raise TypeError(
            f"gradient of a sharded parameter: expected a DTensor placed like the parameter, got {type(grad).__name__} "
            f"of shape {tuple(grad.shape)}; set .grad to None or to torch.zeros_like(param)"
        )
    return grad.placements[0].is_partial()
