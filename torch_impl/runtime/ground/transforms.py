"""Tensors in transforms of ``torch.func`` and in forward mode, which have several graphs.

Inside ``grad``, ``vjp``, ``jvp`` and ``vmap`` a tensor wraps another tensor for each surrounding
transform, and each of them may have a node in the graph of its own transform. In forward mode it has
a tangent, which also has a graph. A backward may go through any of these graphs.
"""

from __future__ import annotations

import torch
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    maybe_get_level,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def refuse_recording(unit: str) -> None:
    """RuntimeError if operators are recorded, to run again when the weights are freed."""
    if get_proxy_mode() is not None:
        raise RuntimeError(
            f"unit {unit}: torch.func.linearize, make_fx and torch.export record weights that are "
            "freed after this forward: for products with the Jacobian use torch.func.jvp or "
            "torch.func.vjp; to record or export a model, load the whole weights (full_tensor()) "
            "into a plain model"
        )


def levels_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor, and its counterparts in other graphs: the tensors that it wraps, and tangents."""
    transform = peek_interpreter_stack()
    # A tangent is only available in the transform to which the tensor belongs.
    if transform is not None and transform.level() > maybe_get_level(tensor):
        with temporarily_pop_interpreter_stack():
            return levels_of(tensor)
    levels = [tensor]
    wraps = is_functorch_wrapped_tensor(tensor)
    # Tensors of torch.vmap have no tangents, and no rule for reading one.
    if not ((wraps and (transform is None or is_batchedtensor(tensor))) or hides_graph(tensor)):
        tangent = forward_ad.unpack_dual(tensor).tangent
        if tangent is not None:
            levels += levels_of(tangent)
    if wraps:
        levels += levels_of(get_unwrapped(tensor))
    return levels


def hides_graph(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps an inaccessible one: ``is_grads_batched``, ``autograd.functional``."""
    return is_legacy_batchedtensor(tensor)


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a tensor wraps; outside transforms, the tensor itself."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def node_of(tensor: torch.Tensor) -> Node | None:
    """The node of a tensor's own graph; in ``torch.vmap``, which has none, of the surrounding graph."""
    while tensor.grad_fn is None and is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor.grad_fn
