"""The life of one unit: gather before forward and backward, reduce and free afterwards.

    at rest --pre_forward--> forward --post_forward--> at rest        parameters() shows the sharded main weights
    at rest --first gradient of an output--> backward --inputs done or end of backward--> at rest

After a forward that does not reshard, ``module.weight`` is whole until the end of the next backward, as in FSDP2.

``phase`` lists all phases and transitions. A callback at the end of a backward closes what the
backward leaves open. State that an exception leaves open is dropped at once, or at the next forward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from torch_impl.runtime.ground import autograd
from torch_impl.runtime.ground.autograd import outside_transforms
from torch_impl.runtime.ground.phase import LEGAL, Event, Phase, refuse_transition
from torch_impl.runtime.ground.precision import MixedPrecisionPolicy, input_dtype
from torch_impl.runtime.ground.transforms import refuse_recording
from torch_impl.runtime.ground.trees import map_floating
from torch_impl.runtime.unit.group import ParameterGroup
from torch_impl.runtime.unit.outputs import copy_weights_in, shows_weights
from torch_impl.runtime.unit.shown import Shown
from torch_impl.runtime.unit.unit_backward import UnitBackwards, UnitGradients
from torch_impl.runtime.weights.context import UnitContext
from torch_impl.runtime.weights.schedule import Schedule, ScheduledUnit


class Unit:
    """The state of a sharded module, without a reference to the module."""

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        context: UnitContext,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.groups = tuple(groups)
        self.reference = weakref.ref(self)
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.gradients = UnitGradients(self.groups)
        self.forward_prefetch: tuple[weakref.ref[Unit], ...] | None = None
        self.backward_prefetch: tuple[weakref.ref[Unit], ...] | None = None
        self._context, self._policy = context, policy
        self.device, self.has_parameters = context.device, bool(self.groups)
        # None until a forward has shown which unit is the root.
        self._is_root: bool | None = None
        # Inputs of the running calls, if gradients may be computed.
        self._calls: list[autograd.WatchedInputs | None] = []
        self._backwards = UnitBackwards()
        self._numbers = itertools.count()
        autograd.register(self)
        for index, group in enumerate(self.groups):
            self._watch_gradients(index)
            group.weights.when_made(autograd.weakly(self._watch_gradients, index))

    def attach(self, module: nn.Module) -> None:
        """Register the sharded parameters and the hooks; cannot fail half-way."""
        for group in self.groups:
            group.attach()
        # Before all other hooks, because they may read parameters.
        module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
        # ``FSDPModule.__call__`` handles errors, because it knows how many calls were open before.
        module.register_forward_hook(self.post_forward)
        # State dicts read ``_parameters``, which may have whole weights after ``unshard()``.
        module.register_state_dict_pre_hook(self.show_sharded)
        module.register_load_state_dict_pre_hook(self.show_sharded)

    def materialize(self, device: torch.device, groups: Sequence[ParameterGroup] | None = None) -> None:
        """Give weights of these groups, or all, that are on the meta device memory on ``device``."""
        for index, group in enumerate(self.groups):
            if group.weights.on_meta and (groups is None or group in groups):
                group.materialize(device)
                self._watch_gradients(index)

    def collect_apart(self) -> None:
        """Take weights to which inner modules gave memory by a separate ``to_empty``."""
        if apart := [group for group in self.groups if group.has_memory_apart]:
            self.materialize(self.device, apart)

    def _watch_gradients(self, index: int) -> None:
        """Get a call for each complete gradient of a group; hooks live as long as the whole parameters."""
        for k, param in enumerate(self.groups[index].unsharded):
            # Weak: the whole parameter lives in graphs, which must not keep the unit.
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(autograd.weakly(self._collect_gradient, index, k))

    @property
    def schedule(self) -> Schedule:
        """The state that units below one root share; a unit's own until a root runs forward."""
        return self._context.schedule

    @property
    def phase(self) -> Phase:
        return self._context.phase

    def _enter(self, event: Event, phase: Phase) -> None:
        """Change to ``phase``; RuntimeError if the table forbids it. No other code changes it."""
        before = self._context.phase
        if (before, phase) not in LEGAL[event]:
            refuse_transition(event, before, phase)
        self._context.phase = phase

    def start_unshard(self, refresh: bool = True) -> bool:
        """Begin to gather the compute weights; False if there is nothing to gather. Collective."""
        self.collect_apart()
        with self._range("all-gather"):
            started = [group.weights.start_gather(refresh) for group in self.groups]
        return any(started)

    def unshard(self) -> None:
        """Gather the compute weights and show them as the modules' parameters. Collective."""
        self.collect_apart()
        self._gather(refresh=True)
        if self.phase is Phase.REST and self._backwards:
            # The end of the backward will free them.
            self._enter(Event.UNSHARD, Phase.BACKWARD)
        elif self.phase in (Phase.REST, Phase.KEPT):
            self._enter(Event.UNSHARD, Phase.UNSHARDED)
        else:
            self._enter(Event.UNSHARD, self.phase)

    def _gather(self, refresh: bool) -> None:
        for group in self.groups:
            group.unshard(refresh)
        # All or none: a program that continues after an error sees the sharded parameters.
        for group in self.groups:
            group.show(Shown.WHOLE)

    @property
    def has_weights(self) -> bool:
        """Whether compute weights are gathered or are being gathered."""
        return any(group.weights.gathering or group.weights.compute.allocated for group in self.groups)

    def drop_prefetched(self) -> None:
        """Free weights that were gathered for a forward or backward that did not come."""
        if self.phase is Phase.REST:
            for group in self.groups:
                # Weights that have arrived were kept, for example by a root.
                if group.shard_parameters and group.weights.gathering:
                    group.weights.compute.free()

    def reshard(self) -> None:
        """Show the main weights and free the compute weights, unless the strategy keeps them."""
        self._enter(Event.RESHARD, self.phase if self._calls else Phase.REST)
        self._hide(free=True)

    def _hide(self, free: bool) -> None:
        for group in self.groups:
            if free and group.shard_parameters:
                group.weights.compute.free()
            group.show(Shown.MAIN)

    def show_sharded(self, *_: Any) -> None:
        """Show the main weights, unless a forward reads compute weights, which then stay in memory."""
        rests = self.phase in (Phase.UNSHARDED, Phase.KEPT, Phase.BACKWARD)
        self._enter(Event.STATE_DICT, Phase.REST if rests else self.phase)
        self._hide(free=False)

    @autograd.eager
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        in_backward = autograd.current_backward() is not None
        refuse_recording(self._context.name or "root")
        if self._is_root is None:
            self._become_root(module)
        event, phase = Event.FORWARD_BEGINS, Phase.FORWARD
        if in_backward:
            # A backward follows a recomputation with gradients, and needs the weights again.
            if torch.is_grad_enabled():
                event, phase = Event.RECOMPUTE_BEGINS, Phase.RECOMPUTE
            self.schedule.rest_at_end(self)
        elif self._backwards or self.phase in (Phase.RECOMPUTE, Phase.RECOMPUTED):
            # No backward runs on this thread, so the backward that left this state has raised.
            self.abandon_backward()
        self._begin(event, phase, in_backward)
        # Reentrant checkpointing runs its forward without gradients, but in training mode;
        # evaluation is not in training mode.
        if not in_backward and (torch.is_grad_enabled() or module.training):
            self._backwards.count_forward()
        if (cast := input_dtype(self._policy)) is not None:
            args, kwargs = map_floating((args, kwargs), cast)
        number, inputs = next(self._numbers), None
        if torch.is_grad_enabled():
            done = autograd.weakly(self._complete_call, number)
            inputs = autograd.WatchedInputs(done, autograd.weakly(self._start_backward, number))
            args, kwargs = inputs.watch((args, kwargs))
        self._calls.append(inputs)
        self.schedule.open_forwards += 1
        return args, kwargs

    def _become_root(self, module: nn.Module) -> None:
        """Share this unit's schedule with all units below, since it is the first to run."""
        for name, child in module.named_modules():
            unit = getattr(child, "_unit", None)
            if isinstance(unit, Unit):
                unit._context.join(self.schedule, name)
                self.schedule.add(unit)
                unit._is_root = unit is self

    def _range(self, what: str) -> AbstractContextManager[Any]:
        # Counters of collectives also read the unit's name from here; the root has none.
        name = "" if self._is_root else self._context.name
        return self.schedule.streams.range(f"{name} {what}".lstrip())

    @outside_transforms
    def _begin(self, event: Event, phase: Phase, in_backward: bool) -> None:
        """Gather this unit's weights, then begin with the next unit's."""
        # Recomputation in backward must see the weights that the forward saw.
        refresh = not in_backward
        following: Sequence[ScheduledUnit] = ()
        # Otherwise the shown weights are already gathered, and their unit is already in the order.
        if self.phase in (Phase.REST, Phase.KEPT):
            begins = self.schedule.begin_backward if in_backward else self.schedule.begin_forward
            # The pool's record of a step begins with the root's weights.
            expected = begins(self)
            self.start_unshard(refresh)
            named = self.backward_prefetch if in_backward else self.forward_prefetch
            following = expected if named is None else [unit for ref in named if (unit := ref())]
        # After this unit's own weights have come, not at the same time: backends hold a copy of what they gather. With
        # gradients that wait for freed weights, this took the benchmark's peak on 2 gloo ranks from 898 to 833 MB.
        self._gather(refresh)
        self._enter(event, phase)
        self.schedule.prefetch(following, refresh)

    @autograd.eager
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        inputs = self._calls.pop()
        self.schedule.open_forwards -= 1
        if self._policy.output_dtype is not None:
            output = map_floating(output, self._policy.output_dtype)
        output = copy_weights_in(output, self.groups, type(module).__name__)
        seen = True
        if inputs is not None:
            seen = autograd.watch_outputs(output, inputs)
            output = inputs.release(output)
        frees = self._frees_after_forward
        # In a backward no program uses kept weights. An unseen backward would not end them.
        keeps = not frees and seen and autograd.current_backward() is None
        keeps = keeps and not shows_weights(output, self.groups)
        # A backward that reaches the unit unseen finds no hook that would gather the weights again.
        self._leave_forward(Event.FORWARD_ENDS, frees and seen, Phase.KEPT if keeps else Phase.REST)
        return output

    @property
    def open_calls(self) -> int:
        """The number of running forwards of the module."""
        return len(self._calls)

    def drop_open_calls(self, open_calls: int) -> None:
        """Drop the state of a forward that raised; ``open_calls`` forwards were running before it."""
        self.schedule.open_forwards -= len(self._calls) - open_calls
        # Of the calls that an error left open, only those inside the call that raised.
        del self._calls[open_calls:]
        # Otherwise it raised before anything was shown, perhaps because a parameter was replaced.
        if self.phase is not Phase.REST:
            self._leave_forward(Event.FORWARD_RAISES, free=True, then=Phase.REST)
        self.schedule.recover()

    @outside_transforms
    def _leave_forward(self, event: Event, free: bool, then: Phase) -> None:
        raised = event is Event.FORWARD_RAISES
        if self._calls:
            # A forward that raised is not recomputed for a backward; an outer call continues.
            self._enter(event, Phase.FORWARD if raised else self.phase)
        elif self._backwards:
            self._enter(event, Phase.BACKWARD)
        elif self.phase is Phase.RECOMPUTE and not raised:
            self._enter(event, Phase.RECOMPUTED)
        else:
            self._enter(event, then)
            if then is Phase.REST:
                self._hide(free)
            else:
                for group in self.groups:
                    group.show(Shown.ATTRIBUTES)
        self.schedule.end_forward(self)

    @property
    def _frees_after_forward(self) -> bool:
        if self.reshard_after_forward is None:
            # The root's backward begins when its forward has ended, if there is one.
            return not self._is_root or not torch.is_grad_enabled()
        return self.reshard_after_forward

    @outside_transforms
    def _start_backward(self, number: int, inputs: autograd.WatchedInputs) -> None:
        self._join_backward()
        self._backwards.reach_outputs(number, inputs)
        self.gradients.reach_outputs(self.schedule.accumulates())
        self._begin(Event.BACKWARD_BEGINS, self.phase if self._calls else Phase.BACKWARD, in_backward=True)

    def _join_backward(self) -> None:
        task = autograd.current_backward()
        if task is None or task in self._backwards:
            return
        # The engine drops a backward that raised, and its callbacks, but holds an outer backward.
        if self._backwards.raised:
            self._drop_backward()
        self._backwards.join(task, self.schedule.join_backward(self, task))
        # A backward through the results of this one reads several units' weights alternately.
        if torch.is_grad_enabled() and self.schedule.pool.enabled:
            self.schedule.pool.enable(False)
        stays = self._calls or self.phase in (Phase.REST, Phase.KEPT)
        self._enter(Event.JOINS_BACKWARD, self.phase if stays else Phase.BACKWARD)
        self.gradients.attach_main_grads()

    def _collect_gradient(self, index: int, k: int, _: torch.Tensor) -> None:
        self._join_backward()
        self.gradients.add_gradient(index, k, self.reshard_after_backward)

    @outside_transforms
    def _complete_call(self, number: int, seen: bool) -> None:
        if self._backwards.complete_inputs(number, seen):
            self._rest(Event.INPUTS_DONE)
            self._finish_gradients()

    def end_backward(self, task: int) -> None:
        """A backward that this unit took part in has computed all gradients."""
        self._backwards.end(task)
        # A loss that is computed in parts reads the weights again after each part's backward.
        if not self._backwards and self.phase is Phase.KEPT:
            self._enter(Event.BACKWARD_ENDS, Phase.KEPT)
            self._finish_gradients()
        # A nested backward (reentrant checkpointing) ends inside one that still needs the weights.
        elif not self._backwards:
            self._rest(Event.BACKWARD_ENDS)
            self._finish_gradients()
            self._backwards.forget_calls()

    def rest_after_recompute(self) -> None:
        """All backwards ended: free recomputed weights if none of the backwards used them."""
        if self.phase is Phase.RECOMPUTED:
            self._rest(Event.NOT_FOLLOWED)

    def end_pass(self) -> None:
        """All backwards ended, one through units: show main weights if it missed this unit."""
        if self.phase is Phase.KEPT:
            self._rest(Event.PASS_ENDS)

    def _finish_gradients(self) -> None:
        """Reduce or keep the collected gradients; after weights were freed, since backends copy."""
        # With create_graph gradients are enabled here, but sums over ranks have no graph.
        with torch.no_grad(), self._range("reduce"):
            self.gradients.finish()
            self.schedule.begin_reductions()

    def reduce_waiting(self) -> None:
        """A backward has ended: reduce waiting sums of earlier ones, if this unit took no part."""
        self.gradients.end_backward()
        waiting = self.gradients.waiting()
        if waiting:
            with torch.no_grad(), self._range("reduce"):
                self.gradients.reduce_waiting(waiting)

    def _rest(self, event: Event) -> None:
        if self._calls:
            self._enter(event, self.phase)
            return
        self._enter(event, Phase.REST)
        self._hide(free=self.reshard_after_backward and not self._backwards.needed_later)

    def drop_raised(self) -> None:
        """Drop the state of a backward that raised, if one did."""
        if self._backwards.raised:
            self.abandon_backward()

    def abandon_backward(self) -> None:
        """Drop the state of a backward, whether it raised or not."""
        self._drop_backward()
        self._rest(Event.ABANDON)

    def _drop_backward(self) -> None:
        self._backwards.drop()
        self.gradients.abandon()
