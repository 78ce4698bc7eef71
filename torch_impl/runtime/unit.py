"""The life of one unit: gather before forward and backward, reduce and free after.

    at rest --pre_forward--> forward --post_forward--> at rest        parameters() shows the sharded main weights
    at rest --first gradient of an output--> backward --inputs done or end of backward--> at rest

No order is asserted: a unit may run forward several times before backward, run backward twice, never run, be called
inside another unit's backward (recompute), or be left behind by an exception. Whatever a backward leaves open is closed
by a callback at its end, and what an exception left open is dropped at the next forward.

Ranks agree on collectives as long as they call the same units in the same order, and equally often in training mode:
gradients are reduced when the gradients of those of the unit's inputs are complete that take part in the backward, or
at its end if none does, or for a unit that was called more than once or whose outputs are hidden in objects; not when
its own last gradient arrives, since ranks may use different parameters of a unit. A group (one dtype of a unit) none of
whose parameters got a gradient does not reduce, so a program must not leave a group without any gradient on some ranks
only.

The next unit's weights are gathered and the last one's gradients reduced meanwhile: see ``schedule``.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_impl.runtime import autograd, main_grad
from torch_impl.runtime.group import ParameterGroup
from torch_impl.runtime.pool import BufferPool
from torch_impl.runtime.precision import MixedPrecisionPolicy
from torch_impl.runtime.schedule import Schedule


class _Call(NamedTuple):
    """One forward call, and its inputs where gradients may be computed."""

    number: int
    inputs: autograd.WatchedInputs | None


class Unit:
    """State of a sharded module; holds no reference to the module itself."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        device: torch.device,
    ) -> None:
        self.groups = tuple(groups)
        self.reference = weakref.ref(self)
        self._labels = ("all-gather", "reduce")
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.last_backward = True
        self.exposes_main_grad = False
        self.forward_prefetch: tuple[weakref.ref[Unit], ...] | None = None
        self.backward_prefetch: tuple[weakref.ref[Unit], ...] | None = None
        self.schedule = Schedule(device)
        self._policy = policy
        self._rooted = False
        self._is_root = False
        self._registered_unsharded = False
        self._calls: list[_Call] = []
        self._backwards: dict[int, weakref.ref[Any]] = {}
        self._open_calls: set[int] = set()
        self._numbers = itertools.count()
        self._forwards = 0
        self._recomputed = False
        for group in self.groups:
            group.on_gradient(self._gradient_arrived)
        self._name = ""
        self._use_pool()

    def attach(self, module: nn.Module) -> None:
        """Register the sharded parameters and the hooks; cannot fail half-way."""
        for group in self.groups:
            group.register(unsharded=False)
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.post_forward)
        module.register_state_dict_pre_hook(self._show_sharded)
        module.register_load_state_dict_pre_hook(self._show_sharded)

    def materialize(self, device: torch.device) -> None:
        """Give weights that are on the meta device memory on ``device``."""
        for group in self.groups:
            if group.on_meta:
                group.materialize(device)
        self._use_pool()

    def start_unshard(self, refresh: bool = True) -> bool:
        """Begin to gather the compute weights; False if there is nothing to gather. Collective."""
        streams = self.schedule.streams
        with streams.range(self._labels[0]):
            started = [group.start_unshard(refresh, streams) for group in self.groups]
        return any(started)

    def unshard(self, refresh: bool = True) -> None:
        """Gather the compute weights and show them as the modules' parameters. Collective."""
        shown = self._registered_unsharded
        for group in self.groups:
            if not shown:
                group.check_registered()
            group.unshard(refresh, self.schedule.streams)
        self._show(unsharded=True)

    @property
    def pool(self) -> BufferPool:
        """Memory that the units below one root use in turn."""
        return self.schedule.pool

    @property
    def reads_weights(self) -> bool:
        """Whether compute weights may be read without another call of the runtime: in forward, after ``unshard``."""
        returns = bool(self._backwards) or self._recomputed
        return bool(self._calls) or (self._registered_unsharded and not returns)

    @property
    def has_weights(self) -> bool:
        """Whether compute weights are there or on their way."""
        return any(group.gathering or group.compute.allocated for group in self.groups)

    def drop_prefetched(self) -> None:
        """Free weights that were gathered for a forward or backward that did not come."""
        if not self._registered_unsharded:
            for group in self.groups:
                if group.gathering and group.strategy.shard_parameters:
                    group.free()

    def reshard(self) -> None:
        """Show the main weights and free the compute weights, unless the strategy keeps them."""
        for group in self.groups:
            if group.strategy.shard_parameters:
                group.free()
        self._show(unsharded=False)

    def _show(self, unsharded: bool) -> None:
        if unsharded != self._registered_unsharded:
            for group in self.groups:
                group.register(unsharded)
            self._registered_unsharded = unsharded

    def _show_sharded(self, *_: Any) -> None:
        self._show(unsharded=False)

    @autograd.eager
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        in_backward = autograd.current_backward() is not None
        if not self._rooted:
            self._become_root(module)
        if in_backward:
            # The backward of what is recomputed now comes next.
            self._recomputed = torch.is_grad_enabled()
            self.schedule.rest_at_end(self)
        elif self._backwards or self._recomputed:
            self.abandon_backward()
        self._begin(in_backward)
        # Reentrant checkpointing runs its forward without gradients, evaluation does not train.
        if not in_backward and (torch.is_grad_enabled() or module.training):
            self._forwards += 1
        if self._policy.cast_forward_inputs and self._policy.param_dtype is not None:
            args, kwargs = autograd.map_floating((args, kwargs), self._policy.param_dtype)
        number, inputs = next(self._numbers), None
        if torch.is_grad_enabled():
            inputs = autograd.WatchedInputs(partial(_call_done, self.reference, number))
            args, kwargs = inputs.watch((args, kwargs))
        self._calls.append(_Call(number, inputs))
        self.schedule.open_forwards += 1
        return args, kwargs

    def _become_root(self, module: nn.Module) -> None:
        """Share this unit's schedule with all units below, which runs before them for the first time."""
        self._is_root = True
        for name, child in module.named_modules():
            unit = getattr(child, "_unit", None)
            if isinstance(unit, Unit):
                unit._join(self.schedule, name, is_root=unit is self)

    def _join(self, schedule: Schedule, name: str, is_root: bool) -> None:
        if self.schedule is not schedule:
            self.schedule.finish_reduction()
        self.schedule = schedule
        schedule.units.append(self.reference)
        self._labels = (f"{name} all-gather".lstrip(), f"{name} reduce".lstrip())
        self._rooted, self._is_root = True, is_root
        self._name = name or "root"
        self._use_pool()

    def _use_pool(self) -> None:
        for index, group in enumerate(self.groups):
            group.weights.pinned = partial(_pinned, self.reference)
            group.gradient.make_room = autograd.weakly(self.schedule.make_room)
            for buffer in (group.weights, group.gradient.memory):
                buffer.pool = self.schedule.pool
                buffer.name = f"{self._name} group {index}" if len(self.groups) > 1 else self._name

    def _begin(self, in_backward: bool) -> None:
        """Gather this unit's weights, then begin with the next one's: backends hold a second copy meanwhile."""
        # Recompute in backward must see the weights that the forward saw.
        refresh = not in_backward
        following: list[Unit] = []
        if not self._registered_unsharded:
            self.start_unshard(refresh)
            begins = self.schedule.backward_begins if in_backward else self.schedule.forward_begins
            following = begins(self)
        self.unshard(refresh)
        self.schedule.prefetch(following, refresh)

    @autograd.eager
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        call = self._calls.pop()
        self.schedule.open_forwards -= 1
        if self._policy.output_dtype is not None:
            output = autograd.map_floating(output, self._policy.output_dtype)
        output = self._copy_weights_in(output, module)
        seen = True
        if call.inputs is not None:
            seen = autograd.watch_outputs(
                output, call.inputs, partial(_backward_started, self.reference, call)
            )
            output = call.inputs.release(output)
        self._leave_forward(free=seen and self._frees_after_forward)
        return output

    def _copy_weights_in(self, output: Any, module: nn.Module) -> Any:
        """Weights that a module returns must outlive the memory that a reshard frees."""
        freed = [group.compute.flat for group in self.groups if group.strategy.shard_parameters]
        storages = {flat.untyped_storage().data_ptr() for flat in freed if flat.numel()}
        output, left = autograd.copy_aliases(output, storages) if storages else (output, False)
        if left:
            raise RuntimeError(
                f"{type(module).__name__}: an output shares memory with the sharded parameters, inside an object that "
                "is no tuple, list or dict; return a clone() of it"
            )
        return output

    @property
    def open_calls(self) -> int:
        """How many forwards of the module are running."""
        return len(self._calls)

    def interrupted(self, open_calls: int) -> None:
        """Drop what a forward left open that raised; ``open_calls`` were running before it."""
        self.schedule.open_forwards -= len(self._calls) - open_calls
        del self._calls[open_calls:]
        # Else it raised before anything was shown, perhaps because someone replaced a parameter.
        if self._registered_unsharded:
            self._recomputed = False
            self._leave_forward(free=True)

    def _leave_forward(self, free: bool) -> None:
        if not self._calls and not self._backwards and not self._recomputed:
            if free:
                self.reshard()
            else:
                self._show(unsharded=False)
        self.schedule.forward_ended(self)

    @property
    def _frees_after_forward(self) -> bool:
        if self.reshard_after_forward is None:
            # The root's backward begins when its forward has ended, if there is one.
            return not self._is_root or not torch.is_grad_enabled()
        return self.reshard_after_forward

    def _backward_started(self, call: _Call) -> None:
        self._enter_backward()
        if call.inputs is not None and call.number not in self._open_calls and call.inputs.expect():
            self._open_calls.add(call.number)
        self._begin(in_backward=True)

    def _enter_backward(self) -> None:
        task = autograd.current_backward()
        if task is None or task in self._backwards:
            return
        # The engine drops a backward that raised, and its callbacks with it; an outer one is still held.
        if self._raised:
            self._drop_backward()
        self._backwards[task] = self.schedule.join_backward(self, task)
        if self.exposes_main_grad:
            for group in self.groups:
                main_grad.expose(group.unsharded, group.gradient, self._keeps_gradient(group))

    def _gradient_arrived(self, group: ParameterGroup, index: int) -> None:
        self._enter_backward()
        param = group.unsharded[index]
        if param.grad is not None:
            with torch.no_grad():
                if not main_grad.written(param):
                    group.gradient.add(index, param.grad, self._keeps_gradient(group))
            param.grad = None

    @property
    def _reduces_all(self) -> bool:
        return self.last_backward and self.requires_all_reduce

    def _keeps_gradient(self, group: ParameterGroup) -> bool:
        return not self.requires_gradient_sync or not (self._reduces_all or group.strategy.gradients)

    def _call_done(self, number: int) -> None:
        self._open_calls.discard(number)
        if self._open_calls or not self._backwards:
            return
        # Another call's backward may be still to come. Counted calls, unlike gradients, are the same on all ranks.
        if self._forwards <= 1:
            self._rest()
            self._finish_gradients()

    def backward_ended(self, task: int) -> None:
        """A backward that this unit took part in has computed all gradients."""
        self._backwards.pop(task, None)
        # A nested backward (reentrant checkpointing) ends inside one that still needs the weights.
        if not self._backwards:
            self._rest()
            self._finish_gradients()
            self._open_calls.clear()
            self._forwards = 0

    def rest_after_recompute(self) -> None:
        """All backwards have ended: if none followed what was recomputed, its weights are still there."""
        if self._recomputed and not self._backwards:
            self._rest()

    def _finish_gradients(self) -> None:
        """Reduce or keep what was collected; after weights were freed, since backends copy what they reduce."""
        with torch.no_grad(), self.schedule.streams.range(self._labels[1]):
            for group in self.groups:
                if self.exposes_main_grad:
                    main_grad.withdraw(group.unsharded, group.gradient)
                if self._keeps_gradient(group):
                    group.gradient.keep()
                else:
                    self.schedule.reduce(group.gradient, self._reduces_all)

    def reduce_waiting(self) -> None:
        """A backward has ended: reduce what earlier ones left, in case this unit took no part in it."""
        last = self._reduces_all
        waiting = [g for g in self.groups if g.gradient.waits(last) and not self._keeps_gradient(g)]
        if waiting:
            with torch.no_grad(), self.schedule.streams.range(self._labels[1]):
                for group in waiting:
                    self.schedule.reduce(group.gradient, last, idle=True)

    def _rest(self) -> None:
        if self._calls:
            return
        self._recomputed = False
        if self.reshard_after_backward:
            self.reshard()
        else:
            self._show(unsharded=False)

    @property
    def _raised(self) -> bool:
        return bool(self._backwards) and all(ended() is None for ended in self._backwards.values())

    def drop_raised(self) -> None:
        """Drop what a backward left that raised, if one did."""
        if self._raised:
            self.abandon_backward()

    def abandon_backward(self) -> None:
        self._drop_backward()
        self._rest()

    def _drop_backward(self) -> None:
        self._backwards.clear()
        self._open_calls.clear()
        self._forwards = 0
        for group in self.groups:
            main_grad.withdraw(group.unsharded, None)
            group.gradient.abandon()
            for param in group.unsharded:
                param.grad = None


def _pinned(reference: weakref.ref[Unit]) -> bool:
    unit = reference()
    return unit is not None and unit.reads_weights


# Graphs outlive deleted models, and units own hooks: what is called back from a graph holds its unit weakly.
def _call_done(reference: weakref.ref[Unit], number: int) -> None:
    unit = reference()
    if unit is not None:
        unit._call_done(number)


def _backward_started(reference: weakref.ref[Unit], call: _Call) -> None:
    unit = reference()
    if unit is not None:
        unit._backward_started(call)
