"""From a group's collected gradients to ``.grad``: reductions, and sums that wait for a reduction.

The only state between two backwards is ``.grad`` of the sharded parameters, so ``zero_grad`` in both
modes and setting a gradient by hand work as expected:

* None: no gradient yet, since no rank has used the parameter
* a DTensor placed like the parameter: the reduced gradient, averaged over the ranks
* a DTensor placed ``Partial`` on some axes: sums of microbatches before the last, which are not yet
  reduced over these axes. Reading it raises.

Sums are divided when they are reduced over the last axis.

Ranks may use different parameters of a group. A parameter that some rank used gets a gradient on every rank, whether it
has rows there or not. A parameter that no rank used gets no gradient. The reason: gradients are clipped by collectives,
so ranks must hold gradients of the same parameters. "Ranks" means the ranks of the group's mesh. Ranks that hold other
parts of a parameter, by tensor or expert parallelism, are not asked, and must use the same parameters. The buffer that
is reduced has a flag for each parameter (``buffer``). The flag is 1 on ranks that used the parameter in this microbatch
or in one whose sums wait. Any sum of flags except 0 means used, however it is rounded. Hooks do not see flags.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from bridge.core.sharding.policy.strategy_collectives import collectives_of
from torch_impl.comm.streams import Step, Transfer
from torch_impl.dtensor.local import local_of
from torch_impl.dtensor.placement import RowShard
from torch_impl.dtensor.refusals import described
from torch_impl.dtensor.tensor import RowDTensor, make_partial, wrap_like
from torch_impl.runtime.ground.group_spec import GroupSpec
from torch_impl.runtime.weights.context import UnitContext


class _UnderWay(NamedTuple):
    """Where the sums will be, whether over all axes, and which parameters this rank used."""

    transfer: Transfer
    sums: torch.Tensor
    last: bool
    used: frozenset[int]


class GroupReduction:
    """Reduces collected gradients into ``.grad`` of the sharded ``params``; ``release`` gives their buffer back."""

    def __init__(
        self,
        spec: GroupSpec,
        params: Sequence[nn.Parameter],
        release: Callable[[], None],
        context: UnitContext,
    ) -> None:
        self._group_spec, self._params, self._release, self._context = spec, params, release, context
        # Whether to check every .grad after a backward, which is too slow to do always.
        self._left_partial = False
        self._under_way: _UnderWay | None = None
        # torch refuses a .grad of another dtype, unless the parameter names that dtype.
        for param in params:
            if spec.dtypes.grad != param.dtype:
                param.grad_dtype = spec.dtypes.grad

    @property
    def under_way(self) -> bool:
        return self._under_way is not None

    @property
    def only_waits(self) -> bool:
        """Whether finishing the reduction only waits for it, see ``streams.Transfer``."""
        return self._under_way is None or self._under_way.transfer.only_waits

    def start(self, values: torch.Tensor, last: bool, used: frozenset[int]) -> None:
        """Begin to sum ``values``, of level 0, over the ranks. Collective.

        ``last``: over all axes, not only those that shard gradients. ``used``: the parameters that
        this rank used, in this microbatch or in earlier ones whose sums are in ``values``.
        """
        spec, levels = self._group_spec, self._group_spec.levels
        last = last or spec.strategy.gradients == levels.axes
        if spec.order is not None:
            spec.order.begin(
                f"gradients of {spec.names[0]!r} (unit {self._context.name or 'root'}) are reduced "
                f"over {'all axes' if last else 'the inner axis'}"
            )
        # Until now the flags' memory is arbitrary, and a NaN in it would spread to sums.
        flags = levels.flags(0, values).zero_()
        _add_flags(flags, used)
        steps, sums = self._steps(values, last)
        shared = self._context.schedule
        self._under_way = _UnderWay(shared.streams.start(steps), sums, last, used)
        # From here on only the backend holds the buffer. gloo has copied the buffer when the call returns: part of the
        # change that took the benchmark's peak on one rank from 1351 to 1273 MB.
        if shared.streams.copies:
            self._release()
        shared.reductions.add(self)

    def finish(self) -> None:
        """Wait for the reduction in progress, if there is one, and put its result into ``.grad``."""
        if self._under_way is not None:
            done, self._under_way = self._under_way, None
            # Before ``release``: until then the backend reads memory that the pool would reuse.
            done.transfer.finish()
            self._release()
            used = self._used_anywhere(done)
            if done.last:
                self._publish_reduced(done.sums, used)
            else:
                self._publish_partial(done.sums, used)

    def _used_anywhere(self, done: _UnderWay) -> frozenset[int]:
        """The parameters that were used on any of the ranks over which ``done`` has reduced."""
        spec = self._group_spec
        trained = {index for index, param in enumerate(self._params) if param.requires_grad}
        # Reading flags waits for the device. A rank that used all parameters needs no flags.
        if done.used >= trained:
            return done.used
        level = spec.strategy.optimizer if done.last else spec.strategy.gradients
        counts = spec.levels.flags(level, done.sums).ne(0).any(0).tolist()
        used = frozenset(index for index, count in enumerate(counts) if count)
        if done.last and spec.hook.function is not None:
            self._check_hooked(trained - used, spec.levels.views(level, done.sums))
        return used

    def _check_hooked(self, unused: Collection[int], sums: Sequence[torch.Tensor]) -> None:
        """RuntimeError for a gradient that only a hook added: ranks without rows cannot know of it."""
        for index in unused:
            if sums[index].ne(0).any():
                raise RuntimeError(
                    f"set_all_reduce_hook: parameter {self._group_spec.names[index]!r} was used on "
                    "no rank of this mesh, but has a gradient after the hook: expected all "
                    "replicas over which the hook reduces to use the same parameters; use it in "
                    "each replica's loss, if necessary times 0"
                )

    def abandon(self) -> None:
        """Discard the reduction in progress."""
        if self._under_way is not None:
            done, self._under_way = self._under_way, None
            # Until then the backend may use the buffer that is released here.
            done.transfer.finish()
            self._release()

    def waits(self, last: bool) -> bool:
        """Whether sums of earlier microbatches wait for a reduction, over all axes if ``last``."""
        if not self._left_partial:
            return False
        grads = [param.grad for param in self._params if param.requires_grad]
        cuts = [_cut_of(grad) for grad in grads if grad is not None]
        self._left_partial = any(partial_sums for _, partial_sums in cuts)
        return any(partial_sums and (last or axes == 0) for axes, partial_sums in cuts)

    def kept_whole(self) -> dict[int, torch.Tensor]:
        """The sums of earlier microbatches that are not reduced over any axis, by parameter."""
        grads = [param.grad for param in self._params]
        return {
            index: local_of(grad)
            for index, grad in enumerate(grads)
            if grad is not None and _cut_of(grad) == (0, True)
        }

    def flat_of(self, kept: dict[int, torch.Tensor]) -> torch.Tensor | None:
        """The flat buffer that these sums are views of; None if a program has set ``.grad``."""
        # The address of a parameter without elements is arbitrary.
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
        # Matching views of a longer buffer, or of another dtype, were made by the program.
        if storage.nbytes() != size * dtype.itemsize or filled[0][1].dtype != dtype:
            return None
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (size,), (1,))

    def leave_partial(self, sums: torch.Tensor, level: int, used: frozenset[int]) -> None:
        """Set ``sums``, a buffer of a level, as gradients that are not reduced over the other axes.

        A gradient that is None stays None if its parameter is not ``used``.
        """
        spec = self._group_spec
        views, is_mean = spec.levels.views(level, sums), spec.divisor == spec.levels.mesh.size
        self._left_partial = True
        for index, (name, param, view) in enumerate(zip(spec.names, self._params, views, strict=True)):
            # Frozen after sharding: autograd leaves no gradient on such a parameter either.
            if not param.requires_grad or (param.grad is None and index not in used):
                continue
            # Sums that are not reduced at all were already collected together with the new ones.
            if param.grad is not None and _cut_of(param.grad) != (0, True):
                if param._backward_hooks and not _cut_of(param.grad)[1]:
                    raise RuntimeError(
                        f"{described(param)} has a hook (register_hook), which has already seen its "
                        "reduced gradient and would see it again in the sum of microbatches: call "
                        "zero_grad() before the first microbatch, with set_to_none=True"
                    )
                self._add_to_partial(view, name, param.grad, level)
            bounds = spec.levels.row_bounds(level, name) if level else None
            mesh, others = spec.placed(index)
            param.grad = make_partial(
                view, mesh, param.shape, is_mean, bounds=bounds, axes=level, tensor_parallel=others
            )

    def _add_to_partial(self, view: torch.Tensor, name: str, grad: torch.Tensor, level: int) -> None:
        """Add a gradient that is reduced as far as ``view`` or further, as a share of a sum."""
        levels, local = self._group_spec.levels, local_of(grad)
        axes, partial_sums = _cut_of(grad)
        # A mean is the sum divided by the divisor; ranks with the same rows add their shares together.
        mean_of = self._group_spec.divisor * levels.mesh.shards(max(axes, level)) / levels.mesh.size
        share = 1.0 if partial_sums else mean_of
        if axes == level:
            view.add_(local, alpha=share)
            return
        # It is reduced further, so it is cut more finely: its rows are some of the view's.
        bounds, here = levels.row_bounds(axes, name), levels.mesh.index(axes)
        first = levels.row_bounds(level, name)[levels.mesh.index(level)]
        r0, r1 = bounds[here] - first, bounds[here + 1] - first
        if r1 > r0:
            view.view(-1, *local.shape[1:])[r0:r1].add_(local, alpha=share)

    def _steps(self, values: torch.Tensor, last: bool) -> tuple[list[Step], torch.Tensor]:
        """The steps that sum ``values``, of level 0, axis by axis, and the tensor with the result."""
        strategy, levels = self._group_spec.strategy, self._group_spec.levels
        transfers, steps = collectives_of(strategy, levels.axes), list[Step]()
        # All memory is allocated here: see ``streams``.
        for axis in transfers.reduced_last if last else transfers.scattered:
            lane = "reduce" if axis == 0 else "outer"
            # Earlier microbatches were reduced up to here; on axis 0 all were collected together.
            if axis == strategy.gradients and axis > 0:
                steps.append((lane, partial(self._add_waiting, values)))
            # With one rank on the axis, its collected gradient already is the sum and the shard.
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
            # Without flags, which a hook that scales or clips would mistake for gradients.
            sums = values[: levels.size(strategy.optimizer)]
            steps.append(("outer", partial(self._group_spec.hook.run, sums)))
        if self._group_spec.host is not None:
            step, values = self._group_spec.host.send(values)
            steps.append(step)
        return steps, values

    def _add_waiting(self, values: torch.Tensor, async_op: bool) -> None:
        """Add to ``values`` the sums of earlier microbatches that wait for the outer axes."""
        spec = self._group_spec
        level, waited = spec.strategy.gradients, set[int]()
        for index, (param, view) in enumerate(
            zip(self._params, spec.levels.views(level, values), strict=True)
        ):
            if param.grad is not None and _cut_of(param.grad) == (level, True):
                waiting = local_of(param.grad).to(view.device)
                view.add_(waiting, alpha=1 / spec.divisor if spec.divides_first else 1)
                waited.add(index)
        if waited:
            _add_flags(spec.levels.flags(level, values), waited)

    def _publish_partial(self, sums: torch.Tensor, used: frozenset[int]) -> None:
        sums = sums.to(self._group_spec.dtypes.grad)
        # Waiting sums are undivided in every dtype, so that kept and reduced sums can be added.
        if self._group_spec.divides_first:
            sums *= self._group_spec.divisor
        self.leave_partial(sums, self._group_spec.strategy.gradients, used)

    def _publish_reduced(self, sums: torch.Tensor, used: frozenset[int]) -> None:
        spec = self._group_spec
        if not spec.divides_first and spec.divisor != 1:
            # In the wider of both dtypes, so that a narrow gradient is rounded once.
            sums = sums.to(torch.promote_types(sums.dtype, spec.dtypes.grad))
            sums /= spec.divisor
        reduced = sums.to(spec.dtypes.grad)
        views = spec.levels.views(spec.strategy.optimizer, reduced)
        fresh: list[tuple[Any, torch.Tensor]] = [
            (p, view)
            for index, (p, view) in enumerate(zip(self._params, views, strict=True))
            if p.requires_grad and index in used
        ]
        # Before the sum with an earlier gradient: such a hook sees the gradient of this backward.
        for param, view in fresh:
            _run_tensor_hooks(param, view)
        # Partial sums were already added; a reduced gradient is older, or was set by hand.
        present = [
            (p.grad._local_tensor, view) for p, view in fresh if p.grad is not None and not _cut_of(p.grad)[1]
        ]
        if fresh and len(present) == len(fresh):
            # After zero_grad(set_to_none=False), or later microbatches: one kernel, no buffer.
            torch._foreach_add_([grad for grad, _ in present], [view for _, view in present])
        else:
            for grad, view in present:
                view.add_(grad)
            for param, view in fresh:
                param.grad = wrap_like(param, view)
        # Last: such a hook may make the parameter's step, and free ``.grad``.
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
    """The user's ``Tensor.register_hook``: each may replace this reduced gradient."""
    for hook in list((param._backward_hooks or {}).values()):
        replacement = hook(wrap_like(param, view))
        if replacement is not None:
            if _cut_of(replacement) != _cut_of(wrap_like(param, view)) or replacement.shape != param.shape:
                raise ValueError(
                    f"hook of {described(param)}: expected None or a gradient placed like the "
                    f"parameter, got {replacement!r}"
                )
            view.copy_(local_of(replacement))


def _run_hooks(param: nn.Parameter) -> None:
    """Run the user's ``register_post_accumulate_grad_hook``: autograd runs only its own hooks."""
    for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def _cut_of(grad: torch.Tensor) -> tuple[int, bool]:
    """The number of axes over which a gradient is cut, and whether it lacks sums over other axes."""
    if not isinstance(grad, RowDTensor):
        raise TypeError(
            "gradient of a sharded parameter: expected a DTensor placed like the parameter, got "
            f"{type(grad).__name__} of shape {tuple(grad.shape)}; set .grad to None or to "
            "torch.zeros_like(param)"
        )
    # A loop over attributes, because this runs for every gradient of every backward.
    axes, partial_sums = 0, False
    for placement in grad.placements:
        if isinstance(placement, RowShard):
            axes = placement.axes
        elif placement.is_partial():
            partial_sums = True
    return axes, partial_sums
