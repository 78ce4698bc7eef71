"""From a group's collected gradients to ``.grad``: the reduction over the ranks, and sums that wait for theirs.

The state between two backwards is ``.grad`` of the sharded parameters and nothing else, so that ``zero_grad`` in both
modes, or setting a gradient by hand, means what it says:

* None: no gradient yet, since no rank has used the parameter
* a DTensor placed like the parameter: the reduced gradient, averaged over the ranks
* a DTensor placed ``Partial`` on some axes: sums that are not reduced over them yet, of microbatches before the last.
  Reading it raises.

Sums are divided when they are reduced over the last axis.

Ranks may use different parameters of a group. A parameter that some rank used gets a gradient on every rank, and one
that none used on no rank, whether it has rows there or not: gradients are clipped by collectives, for which ranks must
hold the same ones. Ranks are those of the group's mesh: ranks that hold other parts of a parameter, by tensor or expert
parallelism, are not asked, and must use the same ones. The buffer that is reduced has a flag for each parameter
(``buffer``), 1 on ranks that used it in this microbatch or in one whose sums wait. Any sum of flags but 0 means used,
however it is rounded. Hooks of the program do not see flags.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import nn

from bridge.core.sharding.policy.strategy_collectives import collectives_of
from torch_impl.comm.collective_order import CollectiveOrder
from torch_impl.comm.streams import Step, Streams, Transfer
from torch_impl.dtensor.local import is_partial, local_of
from torch_impl.dtensor.placement import row_placement
from torch_impl.dtensor.refusals import described
from torch_impl.dtensor.tensor import RowDTensor, make_partial, wrap_like
from torch_impl.runtime.gradients.gradient_spec import GradientSpec
from torch_impl.runtime.memory.pool import PooledGradient


class Reductions:
    """The reductions under way, of one unit of all below a root: so two units' buffers are in use at most."""

    def __init__(self) -> None:
        # Weakly: a deleted model frees its gradients at once, also those that are being reduced.
        self._under_way: list[weakref.ref[GroupReduction]] = []

    def begun(self, reduction: GroupReduction) -> None:
        """Remember a reduction; those of other units are finished."""
        self._under_way.append(weakref.ref(reduction))

    def finish(self) -> None:
        """Wait for the reductions under way, in the order in which they began, and publish their results."""
        for reduction in self._take():
            reduction.finish()

    def make_room(self) -> None:
        """A gradient buffer is about to be allocated: free those of reductions under way, if that costs nothing."""
        alive = [one for reference in self._under_way if (one := reference()) is not None]
        if all(reduction.only_waits for reduction in alive):
            self.finish()

    def abandon(self) -> None:
        """Forget the reductions under way: the backward that began them has raised."""
        for reduction in self._take():
            reduction.abandon()

    def _take(self) -> list[GroupReduction]:
        references, self._under_way = self._under_way, []
        return [one for reference in references if (one := reference()) is not None]


class Host(Protocol):
    """What a reduction asks of its unit, at each use, since its root may change."""

    @property
    def name(self) -> str: ...

    @property
    def streams(self) -> Streams: ...

    @property
    def reductions(self) -> Reductions: ...


class _UnderWay(NamedTuple):
    """Where the sums will be, whether they are reduced over all axes then, and which parameters this rank used."""

    transfer: Transfer
    sums: torch.Tensor
    last: bool
    used: frozenset[int]


class GroupReduction:
    """Reduces what was collected in ``memory``, and keeps ``.grad`` of sharded parameters. ``order``: the group's."""

    def __init__(
        self, spec: GradientSpec, memory: PooledGradient, host: Host, order: CollectiveOrder
    ) -> None:
        self._group_spec, self._memory, self._host, self._order = spec, memory, host, order
        # Whether to look at every .grad after a backward, which costs too much to be done always.
        self._left_partial = False
        self._under_way: _UnderWay | None = None
        # torch refuses a .grad of another dtype than the parameter's, unless the parameter names that dtype.
        for param in spec.params:
            if spec.dtypes.grad != param.dtype:
                param.grad_dtype = spec.dtypes.grad

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    @property
    def only_waits(self) -> bool:
        """Whether to finish the reduction under way, if any, only means to wait for it, see ``streams.Transfer``."""
        return self._under_way is None or self._under_way.transfer.only_waits

    def start(self, values: torch.Tensor, last: bool, used: frozenset[int]) -> None:
        """Begin to sum ``values`` (level 0, in the dtype of the reduction) over the ranks. Collective.

        ``last``: over all axes, not only those that gradients are sharded over. ``used``: the parameters that this rank
        used, in this microbatch or in earlier ones whose sums are in ``values``.
        """
        levels = self._group_spec.levels
        last = last or self._group_spec.strategy.gradients == levels.axes
        self._order.begin(
            f"gradients of {self._group_spec.names[0]!r} (unit {self._host.name or 'root'}) are reduced over "
            f"{'all axes' if last else 'the inner axis'}"
        )
        flags = levels.flags(0, values).zero_()
        _add_flags(flags, used)
        steps, sums = self._steps(values, last)
        self._under_way = _UnderWay(self._host.streams.start(steps), sums, last, used)
        # Nobody but the backend holds the buffer then.
        if self._host.streams.copies:
            self._memory.release()
        self._host.reductions.begun(self)

    def finish(self) -> None:
        """Wait for the reduction under way, if there is one, and put its result into ``.grad``."""
        if self._under_way is not None:
            done, self._under_way = self._under_way, None
            done.transfer.finish()
            self._memory.release()
            used = self._used_anywhere(done)
            if done.last:
                self._publish_reduced(done.sums, used)
            else:
                self._publish_partial(done.sums, used)

    def _used_anywhere(self, done: _UnderWay) -> frozenset[int]:
        """The parameters that were used on any of the ranks that ``done`` has reduced over."""
        spec = self._group_spec
        trained = {index for index, param in enumerate(spec.params) if param.requires_grad}
        # To read flags makes the program wait for the device. Of what this rank used it need not ask.
        if done.used >= trained:
            return done.used
        level = spec.strategy.optimizer if done.last else spec.strategy.gradients
        counts = spec.levels.flags(level, done.sums).ne(0).any(0).tolist()
        used = frozenset(index for index, count in enumerate(counts) if count)
        if done.last and spec.hook.function is not None:
            self._check_hooked(trained - used, spec.levels.views(level, done.sums))
        return used

    def _check_hooked(self, unused: Collection[int], sums: Sequence[torch.Tensor]) -> None:
        """RuntimeError for a gradient that a hook brought from elsewhere: ranks without rows do not know of it."""
        for index in unused:
            if sums[index].ne(0).any():
                raise RuntimeError(
                    f"set_all_reduce_hook: parameter {self._group_spec.names[index]!r} was used on no rank of this "
                    "mesh, and has a gradient after the hook: expected all replicas that the hook reduces over to use "
                    "the same parameters; use it in each replica's loss, if only times 0"
                )

    def abandon(self) -> None:
        """Forget what is being reduced."""
        if self._under_way is not None:
            done, self._under_way = self._under_way, None
            # Until then the backend may use the buffer that is released here.
            done.transfer.finish()
            self._memory.release()

    def waits(self, last: bool) -> bool:
        """Whether sums of earlier microbatches are there that a reduction, over all axes if ``last``, would reduce."""
        if not self._left_partial:
            return False
        grads = [param.grad for param in self._group_spec.params if param.requires_grad]
        cuts = [_cut_of(grad) for grad in grads if grad is not None]
        self._left_partial = any(partial_sums for _, partial_sums in cuts)
        return any(partial_sums and (last or axes == 0) for axes, partial_sums in cuts)

    def kept_whole(self) -> dict[int, torch.Tensor]:
        """The sums of earlier microbatches that are not reduced over any axis, by parameter."""
        grads = [param.grad for param in self._group_spec.params]
        return {
            index: local_of(grad)
            for index, grad in enumerate(grads)
            if grad is not None and _cut_of(grad) == (0, True)
        }

    def flat_of(self, kept: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """The flat buffer whose views these sums are; None if they are not, since a program may set ``.grad``."""
        # A parameter without elements lies anywhere.
        filled = [(index, local) for index, local in kept.items() if local.numel()]
        if not filled:
            return None
        spec, storage = self._group_spec, filled[0][1].untyped_storage()
        size, dtype = spec.levels.gradient_size(0), spec.dtypes.grad
        whole = spec.levels.layouts[0]
        for index, local in filled:
            placed = local.untyped_storage().data_ptr(), local.storage_offset(), local.is_contiguous()
            if placed != (storage.data_ptr(), whole.start(spec.names[index]), True):
                return None
        # All views at the right offsets of a longer buffer, or of one in another dtype, are the program's own work.
        if storage.nbytes() != size * dtype.itemsize or filled[0][1].dtype != dtype:
            return None
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (size,), (1,))

    def leave_partial(self, sums: torch.Tensor, level: int, used: frozenset[int]) -> None:
        """Make ``sums``, a buffer of a level that is not reduced over the other axes, the gradients.

        Those of parameters that are not ``used`` stay None if they are.
        """
        spec = self._group_spec
        mesh, views = spec.levels.mesh, spec.levels.views(level, sums)
        self._left_partial = True
        for index, (name, param, given, view) in enumerate(
            zip(spec.names, spec.params, spec.tensor_parallel, views, strict=True)
        ):
            # Frozen after sharding: autograd leaves no gradient on such a parameter either.
            if not param.requires_grad or (param.grad is None and index not in used):
                continue
            # Sums that are not reduced at all were collected together with the new ones.
            if param.grad is not None and _cut_of(param.grad) != (0, True):
                if param._backward_hooks and not _cut_of(param.grad)[1]:
                    raise RuntimeError(
                        f"{described(param)} has a hook (register_hook), which has seen its reduced gradient and would "
                        "see it again in the sum of microbatches: call zero_grad() before the first microbatch, with "
                        "set_to_none=True"
                    )
                self._add_to_partial(view, name, param.grad, level)
            bounds = spec.levels.row_bounds(level, name) if level else None
            param.grad = make_partial(
                view,
                mesh.mesh if given is None else given.joint_mesh(mesh.mesh),
                param.shape,
                spec.divisor.value == mesh.size,
                bounds=bounds,
                axes=level,
                tensor_parallel=() if given is None else given.placements,
            )

    def _add_to_partial(self, view: torch.Tensor, name: str, grad: torch.Tensor, level: int) -> None:
        """Add a gradient that is reduced as far as ``view`` or further, as its share of a sum to be made."""
        levels, local = self._group_spec.levels, local_of(grad)
        axes, partial_sums = _cut_of(grad)
        # A mean stands for the sum times the divisor, which the ranks that hold the same rows contribute together.
        mean_of = self._group_spec.divisor.value * levels.mesh.shards(max(axes, level)) / levels.mesh.size
        share = 1.0 if partial_sums else mean_of
        if axes == level:
            view.add_(local, alpha=share)
            return
        # Reduced further, so cut more finely: its rows are some of the view's.
        bounds, here = levels.row_bounds(axes, name), levels.mesh.index(axes)
        first = levels.row_bounds(level, name)[levels.mesh.index(level)]
        r0, r1 = bounds[here] - first, bounds[here + 1] - first
        if r1 > r0:
            view.view(-1, *local.shape[1:])[r0:r1].add_(local, alpha=share)

    def _steps(self, values: torch.Tensor, last: bool) -> tuple[list[Step], torch.Tensor]:
        """What sums ``values``, of level 0, over the axes one by one, and where the sums will be."""
        strategy, levels = self._group_spec.strategy, self._group_spec.levels
        transfers, steps = collectives_of(strategy, levels.axes), list[Step]()
        # All memory is allocated here: see ``streams``.
        for axis in transfers.reduced(last=last):
            lane = "reduce" if axis == 0 else "outer"
            # Earlier microbatches were reduced up to this axis; on axis 0 they were collected together with this one.
            if axis == strategy.gradients and axis > 0:
                steps.append((lane, partial(self._add_waiting, values)))
            # What one rank has collected is the sum, and its shard.
            if levels.mesh.sizes[axis] == 1:
                continue
            if axis not in transfers.summed_once:
                shard = values.new_empty(levels.gradient_size(axis + 1))
                steps.append((lane, partial(levels.reduce, axis, shard, values)))
                values = shard
            else:
                # The optimizer state is replicated on this axis, and every replica needs the sums.
                steps.append((lane, partial(levels.sum, axis, values)))
        if last and self._group_spec.hook.function is not None:
            # Without flags, which a hook that scales or clips would take for gradients.
            sums = values[: levels.size(strategy.optimizer)]
            steps.append(("outer", partial(self._group_spec.hook.run, sums)))
        if self._group_spec.host is not None:
            step, values = self._group_spec.host.send(values)
            steps.append(step)
        return steps, values

    def _add_waiting(self, values: torch.Tensor, async_op: bool) -> None:
        """Add to ``values`` the sums of earlier microbatches that were not reduced over the outer axes."""
        spec = self._group_spec
        level, waited = spec.strategy.gradients, set[int]()
        for index, (param, view) in enumerate(
            zip(spec.params, spec.levels.views(level, values), strict=True)
        ):
            if param.grad is not None and _cut_of(param.grad) == (level, True):
                waiting = local_of(param.grad).to(view.device)
                view.add_(waiting, alpha=1 / spec.divisor.value if spec.divides_first else 1)
                waited.add(index)
        if waited:
            _add_flags(spec.levels.flags(level, values), waited)

    def _publish_partial(self, sums: torch.Tensor, used: frozenset[int]) -> None:
        sums = sums.to(self._group_spec.dtypes.grad)
        # Sums that wait are undivided in every dtype of the reduction, so that kept and reduced ones can be added.
        if self._group_spec.divides_first:
            sums *= self._group_spec.divisor.value
        self.leave_partial(sums, self._group_spec.strategy.gradients, used)

    def _publish_reduced(self, sums: torch.Tensor, used: frozenset[int]) -> None:
        spec = self._group_spec
        if not spec.divides_first and spec.divisor.value != 1:
            # In the wider of both dtypes, so that a narrow gradient is rounded once.
            sums = sums.to(torch.promote_types(sums.dtype, spec.dtypes.grad))
            sums /= spec.divisor.value
        reduced = sums.to(spec.dtypes.grad)
        views = spec.levels.views(spec.strategy.optimizer, reduced)
        fresh = [
            (p, view)
            for index, (p, view) in enumerate(zip(spec.params, views, strict=True))
            if p.requires_grad and index in used
        ]
        for param, view in fresh:
            _run_tensor_hooks(param, view)
        # Partial sums were added on the way; a reduced gradient is of an earlier backward, or was set by hand.
        present = [
            (local_of(p.grad), view) for p, view in fresh if p.grad is not None and not _cut_of(p.grad)[1]
        ]
        if fresh and len(present) == len(fresh):
            # As after zero_grad(set_to_none=False), or in a second microbatch: one kernel, and the buffer goes.
            torch._foreach_add_([grad for grad, _ in present], [view for _, view in present])
        else:
            for grad, view in present:
                view.add_(grad)
            for param, view in fresh:
                param.grad = wrap_like(param, view)
        for param, _ in fresh:
            _run_hooks(param)


def _add_flags(flags: torch.Tensor, used: Collection[int]) -> None:
    """Add 1 to the columns of ``flags`` (shards, parameters) of the parameters that are ``used``.

    Each run of neighbours is one kernel: a copy of flags from the CPU would make the program wait for the device.
    """
    ordered = sorted(used)
    first = 0
    for position, index in enumerate(ordered, start=1):
        if position == len(ordered) or ordered[position] != index + 1:
            flags[:, ordered[first] : index + 1].add_(1)
            first = position


def _run_tensor_hooks(param: nn.Parameter, view: torch.Tensor) -> None:
    """The user's ``Tensor.register_hook``: each may give another gradient in place of this reduced one."""
    for hook in list((param._backward_hooks or {}).values()):
        given = hook(wrap_like(param, view))
        if given is not None:
            if _cut_of(given) != _cut_of(wrap_like(param, view)) or given.shape != param.shape:
                raise ValueError(
                    f"hook of {described(param)}: expected None or a gradient placed like the parameter, got {given!r}"
                )
            view.copy_(local_of(given))


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
