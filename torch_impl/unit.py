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
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_impl import autograd
from torch_impl.group import ParameterGroup
from torch_impl.precision import MixedPrecisionPolicy


class _Call(NamedTuple):
    """One forward call, and its inputs where gradients may be computed."""

    number: int
    inputs: autograd.WatchedInputs | None


class Unit:
    """State of a sharded module; holds no reference to the module itself."""

    def __init__(
        self, groups: Sequence[ParameterGroup], policy: MixedPrecisionPolicy, reshard_after_forward: bool
    ) -> None:
        self.groups = tuple(groups)
        self.reshard_after_forward = reshard_after_forward
        self.requires_gradient_sync = True
        self.last_backward = True
        self._policy = policy
        self._registered_unsharded = False
        self._calls: list[_Call] = []
        self._backwards: dict[int, weakref.ref[Any]] = {}
        self._open_calls: set[int] = set()
        self._numbers = itertools.count()
        self._forwards = 0
        for group in self.groups:
            group.on_gradient(self._gradient_arrived)

    def attach(self, module: nn.Module) -> None:
        """Register the sharded parameters and the hooks; cannot fail half-way."""
        self._show(unsharded=False)
        module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._post_forward)
        module.register_state_dict_pre_hook(self._show_sharded)
        module.register_load_state_dict_pre_hook(self._show_sharded)

    def unshard(self, refresh: bool = True) -> None:
        """Gather the compute weights and show them as the modules' parameters. Collective."""
        if not self._registered_unsharded:
            for group in self.groups:
                group.check_registered()
        for group in self.groups:
            group.unshard(refresh)
        self._show(unsharded=True)

    def reshard(self) -> None:
        """Show the main weights and free the compute weights, unless the strategy keeps them."""
        for group in self.groups:
            if group.strategy.shard_parameters:
                group.free()
        self._show(unsharded=False)

    def _show(self, unsharded: bool) -> None:
        for group in self.groups:
            group.register(unsharded)
        self._registered_unsharded = unsharded

    def _show_sharded(self, *_: Any) -> None:
        if self._registered_unsharded:
            self._show(unsharded=False)

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        in_backward = autograd.current_backward() is not None
        if self._backwards and not in_backward:
            self._abandon_backward()
        # Recompute in backward must see the weights that the forward saw.
        self.unshard(refresh=not in_backward)
        # Reentrant checkpointing runs its forward without gradients, evaluation does not train.
        if not in_backward and (torch.is_grad_enabled() or module.training):
            self._forwards += 1
        if self._policy.cast_forward_inputs and self._policy.param_dtype is not None:
            args, kwargs = autograd.map_floating((args, kwargs), self._policy.param_dtype)
        number, inputs = next(self._numbers), None
        if torch.is_grad_enabled():
            inputs = autograd.WatchedInputs(_weakly(self._call_done, number))
            args, kwargs = inputs.watch((args, kwargs))
        self._calls.append(_Call(number, inputs))
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        call = self._calls.pop()
        if self._policy.output_dtype is not None:
            output = autograd.map_floating(output, self._policy.output_dtype)
        output = self._copy_weights_in(output, module)
        seen = True
        if call.inputs is not None:
            seen = autograd.watch_outputs(output, call.inputs, _weakly(self._backward_started, call))
            output = call.inputs.release(output)
        self._leave_forward(seen)
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
        del self._calls[open_calls:]
        # Else it raised before anything was shown, perhaps because someone replaced a parameter.
        if self._registered_unsharded:
            self._leave_forward(seen=True)

    def _leave_forward(self, seen: bool) -> None:
        if not self._calls and not self._backwards:
            if self.reshard_after_forward and seen:
                self.reshard()
            else:
                self._show(unsharded=False)

    def _backward_started(self, call: _Call) -> None:
        self._enter_backward()
        if call.inputs is not None and call.number not in self._open_calls and call.inputs.expect():
            self._open_calls.add(call.number)
        self.unshard(refresh=False)

    def _enter_backward(self) -> None:
        task = autograd.current_backward()
        if task is None or task in self._backwards:
            return
        # The engine drops a backward that raised, and its callbacks with it; an outer one is still held.
        if self._backwards and all(ended() is None for ended in self._backwards.values()):
            self._drop_backward()
        ended = _weakly(self._backward_ended, task)
        self._backwards[task] = weakref.ref(ended)
        autograd.at_end_of_backward(ended)

    def _gradient_arrived(self, group: ParameterGroup, index: int) -> None:
        self._enter_backward()
        param = group.unsharded[index]
        if param.grad is not None:
            with torch.no_grad():
                group.gradient.add(index, param.grad, self._keeps_gradient(group))
            param.grad = None

    def _keeps_gradient(self, group: ParameterGroup) -> bool:
        return not self.requires_gradient_sync or not (self.last_backward or group.strategy.shard_gradients)

    def _call_done(self, number: int) -> None:
        self._open_calls.discard(number)
        if self._open_calls or not self._backwards:
            return
        # Another call's backward may be still to come. Counted calls, unlike gradients, are the same on all ranks.
        if self._forwards <= 1:
            self._finish_gradients()
            self._rest()

    def _backward_ended(self, task: int) -> None:
        self._backwards.pop(task, None)
        # A nested backward (reentrant checkpointing) ends inside one that still needs the weights.
        if not self._backwards:
            self._finish_gradients()
            self._open_calls.clear()
            self._forwards = 0
            self._rest()

    def _finish_gradients(self) -> None:
        with torch.no_grad():
            for group in self.groups:
                group.gradient.finish(self._keeps_gradient(group))

    def _rest(self) -> None:
        if not self._calls:
            self.reshard()

    def _abandon_backward(self) -> None:
        self._drop_backward()
        self._rest()

    def _drop_backward(self) -> None:
        self._backwards.clear()
        self._open_calls.clear()
        self._forwards = 0
        for group in self.groups:
            group.gradient.drop()
            for param in group.unsharded:
                param.grad = None


def _weakly(method: Callable[..., None], *args: Any) -> Callable[[], None]:
    """A callback that does not keep the unit alive: graphs outlive deleted models, and units own hooks."""
    return partial(_call_if_alive, weakref.WeakMethod(method), *args)


def _call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    call = method()
    if call is not None:
        call(*args)
