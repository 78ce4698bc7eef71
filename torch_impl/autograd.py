"""The places where the runtime hooks into autograd. All use of torch's private engine calls is in this module.

Callbacks keep no reference to tensors or graph nodes: a graph that is dropped frees its memory at once, without the
garbage collector.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.autograd import Variable
from torch.utils import _pytree as pytree


def current_backward() -> int | None:
    """Number of the backward that runs on this thread, also a nested one; None outside of backward."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call back when the backward that runs now has computed all gradients; not if it raises."""
    Variable._execution_engine.queue_callback(callback)


def watch_inputs(args: Any, kwargs: Any, done: Callable[[], None]) -> tuple[Any, Any, Callable[[], bool]]:
    """Arrange a call of ``done`` in backward once the gradients of these inputs are complete.

    Returns the inputs, replaced by views where they require gradient, and ``expect``, to be called when the backward
    reaches the module: it finds the inputs that take part in this backward and returns whether any does. Only those are
    waited for, and without ``expect`` there is no call of ``done``.
    """
    missing: set[int] = set()
    nodes: list[Any] = []

    # The nodes hold the hooks: a hook that held the nodes would keep a dropped graph alive.
    def hook_for(index: int) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            if index in missing:
                missing.discard(index)
                if not missing:
                    done()

        return hook

    def watch(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        # The gradient of this view is complete when the module is done; that of the input itself may wait for others.
        view = leaf.view_as(leaf)
        view.register_hook(hook_for(len(nodes)))
        nodes.append(view.grad_fn)
        return view

    def expect() -> bool:
        missing.clear()
        missing.update(k for k, node in enumerate(nodes) if torch._C._will_engine_execute_node(node))
        return bool(missing)

    args, kwargs = map_leaves((args, kwargs), watch)
    return args, kwargs, expect


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """``function`` of every leaf of nested containers, which stay the same objects where no leaf changes.

    So a module can write into a cache or a list that it is given.
    """
    if type(tree) in (tuple, list):
        items = [map_leaves(item, function) for item in tree]
        return tree if _same(items, tree) else type(tree)(items)
    if type(tree) is dict:
        values = [map_leaves(value, function) for value in tree.values()]
        return tree if _same(values, tree.values()) else dict(zip(tree, values, strict=True))
    leaves, spec = pytree.tree_flatten(tree)
    mapped = [function(leaf) for leaf in leaves]
    return tree if _same(mapped, leaves) else pytree.tree_unflatten(mapped, spec)


def _same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))


def watch_outputs(output: Any, start: Callable[[], None]) -> bool:
    """Arrange calls of ``start`` in backward when gradients reach the outputs, before the module's own backward.

    Returns False when backward could reach the module unnoticed: ``output`` holds objects that cannot be searched and
    no tensor that requires gradient was found.
    """
    leaves = _leaves(output)
    hooked = False
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(lambda _: start())
            hooked = True
    plain = (torch.Tensor, str, bytes, int, float, complex, type(None))
    return hooked or all(isinstance(leaf, plain) for leaf in leaves)


def copy_aliases(output: Any, storages: Collection[int]) -> tuple[Any, bool]:
    """Put copies in place of the tensors of ``output`` whose memory is one of ``storages`` (addresses).

    Also returns whether such tensors are left, in objects that cannot be rebuilt.
    """

    def aliases(leaf: Any) -> bool:
        has_memory = isinstance(leaf, torch.Tensor) and torch._C._has_storage(leaf)
        return has_memory and leaf.untyped_storage().data_ptr() in storages

    output = map_leaves(output, lambda leaf: leaf.clone() if aliases(leaf) else leaf)
    return output, any(map(aliases, _leaves(output)))


def map_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of nested tuples, lists and dicts."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return map_leaves(tree, cast)


def _leaves(tree: Any) -> list[Any]:
    found = []
    for leaf in pytree.tree_leaves(tree):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += _leaves([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
        else:
            found.append(leaf)
    return found
