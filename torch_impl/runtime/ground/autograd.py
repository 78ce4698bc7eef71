"""Hooks of the runtime in autograd. All uses of torch's private engine calls are in this module.

Callbacks hold no tensors, and of the graph only nodes before their own. So a graph that is dropped
frees its memory at once, without the garbage collector.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_impl.runtime.ground.transforms import hides_graph, levels_of, node_of
from torch_impl.runtime.ground.trees import leaves_of, map_leaves

T = TypeVar("T")

_STARTS = "twinshard: units whose backward starts here"


def current_backward() -> int | None:
    """The number of the backward on this thread, possibly a nested one; None outside a backward."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set the version counters, which autograd compares with the versions of saved tensors."""
    # Back to the version that graphs have saved: the contents are the same again, bit for bit.
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the running backward has computed all gradients; not if it raises."""
    # The engine runs callbacks after the last gradient, and drops them if backward raises.
    Variable._execution_engine.queue_callback(callback)


def reaches(leaf: torch.Tensor) -> bool:
    """Whether the running backward adds to the gradient of ``leaf``; True if unknown."""
    # Not every class that wraps tensors can be viewed.
    if not isinstance(leaf, DTensor) and is_traceable_wrapper_subclass(leaf):
        return True
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:
        # ``torch.autograd.grad`` returns the gradient of this leaf, and accumulates none.
        return False


class WatchedInputs:
    """Calls ``done`` in backward when the gradients of a module's inputs are complete.

    ``reached`` is called with these inputs when a backward reaches the outputs, see ``watch_outputs``. In a backward
    with ``create_graph``, the gradients of the inputs are also results of the module, so ``reached`` is called when
    another backward reaches them. ``done(False)`` means that this other backward may come unnoticed.
    """

    def __init__(self, done: Callable[[bool], None], reached: Callable[[WatchedInputs], None]) -> None:
        self._gradients, self._reached = _Gradients(done), reached
        self._nodes: list[Any] = []
        self.hides_graph = False
        # Only until the forward ends: a graph must not keep inputs alive that no backward needs.
        self._given: list[torch.Tensor] = []

    def watch(self, inputs: Any) -> Any:
        """The inputs for the module's forward: replaced by views if they require gradients."""
        return map_leaves(inputs, self._watch)

    def _watch(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not any(level.requires_grad for level in levels_of(leaf)):
            return leaf
        # This view's gradient is complete with the module; the input's may wait for other uses.
        view = leaf.view_as(leaf)
        # A hook is part of the graph, and this object holds nodes of the graph: a strong reference
        # would keep a dropped graph alive.
        this = weakref.ref(self)
        for level in levels_of(view):
            if level.grad_fn is not None:
                level.register_hook(partial(self._gradients.mark_complete, len(self._nodes), this))
                self._nodes.append(level.grad_fn)
                self._given.append(leaf)
        return view

    def release(self, output: Any) -> Any:
        """End the forward: ``output``, in which inputs replace the views that the module passed on."""
        originals, self._given = self._given, []
        return map_leaves(
            output, lambda leaf: originals[self._nodes.index(node_of(leaf))] if self.is_input(leaf) else leaf
        )

    def is_input(self, leaf: Any) -> bool:
        """Whether a leaf of the output is a view that ``watch`` made."""
        # By node: after an in-place change the view has another node, and is no longer the input.
        return isinstance(leaf, torch.Tensor) and node_of(leaf) in self._nodes

    def expect(self) -> bool:
        """A backward reaches the module: find the inputs that take part, and whether there are any.

        ``done`` waits only for these inputs, and is not called without a call of this method.
        """
        # With given inputs, or through only a part of the graph, some inputs get no gradient.
        self._gradients.expect(
            {k for k, node in enumerate(self._nodes) if torch._C._will_engine_execute_node(node)}
        )
        return bool(self._gradients.missing)

    def watch_results(self, results: Iterable[Any]) -> bool:
        """Have ``reached`` called when a backward reaches a result; False if none can be reached.

        Inputs that were passed on are left out: a hook there would run too late, and would keep a
        dropped graph alive through the inputs.
        """
        start, hooked = partial(self._reached, self), False
        for result in results:
            if isinstance(result, torch.Tensor) and not self.is_input(result):
                for level in levels_of(result):
                    self.hides_graph |= hides_graph(level)
                    # A tangent may belong to an input, although the result does not.
                    if level.grad_fn is not None and level.grad_fn not in self._nodes:
                        _start_first(level, level.grad_fn, start)
                        hooked = True
        return hooked


class _Gradients:
    """The gradients of a module's inputs in one backward.

    Nodes hold the hooks, which hold this object. If it held the nodes, a dropped graph would stay.
    """

    def __init__(self, done: Callable[[bool], None]) -> None:
        self.missing: set[int] = set()
        self._done, self._seen = done, True

    def expect(self, missing: set[int]) -> None:
        """A backward begins that computes the gradients with the indices ``missing``."""
        self.missing, self._seen = missing, True

    def mark_complete(self, index: int, inputs: weakref.ref[WatchedInputs], gradient: torch.Tensor) -> None:
        """One gradient is complete; the hooks of the outputs hold ``inputs``."""
        if torch.is_grad_enabled():
            watched = inputs()
            self._seen &= watched is not None and watched.watch_results([gradient])
        if index in self.missing:
            self.missing.discard(index)
            if not self.missing:
                self._done(self._seen)


def eager(hook: Callable[..., T]) -> Callable[..., T]:
    """Keep ``torch.compile`` out of a hook, because bookkeeping must run at every call."""

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> T:
        # No decorator: it would import the compiler (seconds), and cost microseconds per call.
        if torch.compiler.is_compiling():
            return torch.compiler.disable(hook)(*args, **kwargs)
        return hook(*args, **kwargs)

    return call


def watch_outputs(output: Any, inputs: WatchedInputs) -> bool:
    """Tell ``inputs`` when gradients reach the outputs, before the module's own backward.

    Returns False when backward could reach the module unnoticed: ``output`` contains objects that cannot be searched
    and no tensor with gradients was found, or tensors whose graph cannot be accessed.
    """
    leaves = leaves_of(output)
    hooked = inputs.watch_results(leaves)
    # Any other object may hide a tensor whose backward leads into the module.
    plain = (torch.Tensor, str, bytes, int, float, complex, type(None))
    return not inputs.hides_graph and (hooked or all(isinstance(leaf, plain) for leaf in leaves))


def _start_first(tensor: torch.Tensor, node: Node, start: Callable[[], None]) -> None:
    """Call ``start`` when the gradient of ``node``'s output arrives, before earlier callbacks.

    A unit may return an inner unit's output itself. Its backward still comes first, as on a rank
    where something is computed in between.
    """
    notes: Any = node.metadata  # a dict of the node's own, which torch declares as a method
    starts: list[Callable[[], None]] = notes.setdefault((_STARTS, tensor.output_nr), [])
    if not starts:
        tensor.register_hook(partial(_call_all, starts))
    # An outer unit's forward ends after the inner one's, so it is added later and must run first.
    starts.insert(0, start)


def _call_all(functions: list[Callable[[], None]], _: torch.Tensor) -> None:
    for function in functions:
        function()


def weakly(method: Callable[..., None], *args: Any) -> Callable[..., None]:
    """A callback that does not keep the method's object alive: graphs may outlive deleted models."""
    return partial(_call_if_alive, weakref.WeakMethod(method), *args)


def _call_if_alive(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    call = method()
    if call is not None:
        call(*args)


def outside_transforms(method: Callable[..., T]) -> Callable[..., T]:
    """Run a method outside transforms, which would refuse writes to outside tensors."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> T:
        # ``vmap`` and ``grad`` refuse in-place writes to tensors from outside, such as ours.
        with torch._C._DisableFuncTorch():
            return method(*args, **kwargs)

    return call


class Recovering(Protocol):
    """The state that units below one root share."""

    def recover(self) -> None: ...


class ShardedUnit(Protocol):
    """The interface of a unit for this module."""

    @property
    def groups(self) -> Sequence[ShardedGroup]: ...

    @property
    def schedule(self) -> Recovering: ...


_UNITS: weakref.WeakSet[Any] = weakref.WeakSet()


def register(unit: ShardedUnit) -> None:
    """Track ``unit`` as long as it lives."""
    _UNITS.add(unit)


@functools.cache
def watch_backwards() -> None:
    """Wrap torch's function, for the whole process; calls after the first do nothing."""
    watching = _watching(torch.autograd.graph._engine_run_backward)
    # The second name refers to the first; torch.compiler restores it after wrapping both.
    namespaces: tuple[Any, ...] = (torch.autograd.graph, torch.autograd)
    for namespace in namespaces:
        namespace._engine_run_backward = watching


def _groups() -> Iterator[ShardedGroup]:
    for unit in list(_UNITS):
        yield from unit.groups


def _watching(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def call(
        outputs: Any,
        gradients: Any,
        retain_graph: Any,
        create_graph: Any,
        inputs: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        asked, wholes = tuple(inputs), _whole_inputs(inputs)
        # Otherwise autograd would also refuse whole weights that are not in the graph.
        unused = args[0] if args else options.get("allow_unreachable", False)
        all_inputs = (*asked, *wholes) if unused else asked
        try:
            results = run(outputs, gradients, retain_graph, create_graph, all_inputs, *args, **options)
        except BaseException as error:
            if isinstance(error, RuntimeError):
                explain_late_backward(error, _groups(), to_parameters=bool(wholes))
            # By schedule, not by unit: units of one root share the state to be dropped.
            for schedule in {unit.schedule for unit in list(_UNITS)}:
                schedule.recover()
            raise
        # If the results are None, gradients have been accumulated instead.
        if any(result is not None for result in (results or ())[len(asked) :]):
            raise RuntimeError(OF_PARAMETERS)
        return results and results[: len(asked)]

    return call


def _whole_inputs(inputs: Any) -> list[torch.Tensor]:
    """The whole weights that correspond to the main weights in ``inputs``."""
    if not any(isinstance(tensor, DTensor) for tensor in inputs):
        return []
    known = {
        id(sharded): whole
        for group in _groups()
        for sharded, whole in zip(group.params, group.unsharded, strict=True)
        if whole.requires_grad
    }
    return [known[id(tensor)] for tensor in inputs if id(tensor) in known]


_CHANGED = re.compile(
    r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* is at version (\d+); expected"
)
OF_PARAMETERS = (
    "torch_impl: expected inputs of torch.autograd.grad that are not sharded parameters, since one "
    "rank computes only a part of their gradient: call backward(inputs=...), which sums the "
    "gradients of the ranks into .grad"
)


class ShardedGroup(Protocol):
    """The interface of a group of parameters for this module."""

    @property
    def unit_name(self) -> str: ...

    @property
    def params(self) -> Sequence[torch.Tensor]: ...

    @property
    def unsharded(self) -> Sequence[torch.Tensor]: ...

    def whole_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def explain_late_backward(error: RuntimeError, groups: Iterable[ShardedGroup], to_parameters: bool) -> None:
    """Add a note to an error about weights of ``groups``, or about main weights as inputs.

    In a backward that comes too late, sharded weights may have been freed unnoticed, or gathered again with other
    values. Autograd then refuses the saved weights, but it knows only shapes and versions, so the note names them.
    """
    message = str(error)
    if to_parameters and "not have been used in the graph" in message:
        error.add_note(OF_PARAMETERS)
    changed = _CHANGED.search(message)
    if changed is None:
        return
    shape, version = [int(size) for size in changed[1].split(",") if size.strip()], int(changed[2])
    names = [
        f"{name!r} of unit {group.unit_name!r}"
        for group in groups
        for name, weight in group.whole_weights()
        # A matrix may be saved as its transpose.
        if weight._version == version and list(weight.shape) in (shape, shape[::-1])
    ]
    if names:
        others = f" or {len(names) - 4} more of this shape" if len(names) > 4 else ""
        error.add_note(
            "torch_impl: expected a weight with the values that the forward of a sharded module has read, "
            f"{' or '.join(names[:4])}{others}, but the weight was freed, or changed with the main "
            "weights, before this backward. Run the backward before the next forward of the "
            "module and before the optimizer's step. In forward, return the tensor from which the "
            "backward starts, directly or in lists, dicts or dataclasses. Or keep weights with "
            "set_reshard_after_forward(False) and set_reshard_after_backward(False). If a step "
            "with create_graph=True follows steps without it, call set_buffer_pool(False) before "
            "the first step."
        )
