"""The computation of a module whose parameters are cut over a model axis.

::

    nn.Linear      colwise    enter, this rank's output features; gathered if no rowwise module follows
                   rowwise    this rank's input features (its part, if inputs are whole), leave, then the bias
    nn.Embedding   colwise    this rank's columns, gathered
                   rowwise    this rank's rows, zeros for tokens of other ranks, leave
    any other                 unchanged, on DTensors: inputs and other parameters replicated, outputs made whole

A module keeps its identity and its attributes. Its class becomes a subclass with another forward, as for a unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_impl.dtensor.placement import row_axes
from torch_impl.parallel import regions
from torch_impl.runtime.ground.tensor_parallel import SUMMED

# The inputs that sibling modules have entered, an attribute of the module around them.
_ENTERED = "_entered_region"


@dataclass(frozen=True)
class CutModule:
    """How a module is cut.

    mesh: the model axes over which it is cut; one unless it computes on DTensors.
    around: the parent module, which also contains the modules between colwise and rowwise.
    gathers: whether a colwise module gathers its whole output.
    fused: relative sizes of the tensors that the cut dimension holds.
    """

    path: str
    mesh: DeviceMesh
    around: nn.Module
    gathers: bool = False
    fused: tuple[int, ...] = (1,)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()


class ComputesOnParts:
    """Mixed into the class of a cut module; ``_cut`` says how it is cut."""

    _cut: CutModule

    def _weight(self) -> torch.Tensor:
        weight = self._local("weight")
        assert weight is not None
        return weight

    def _local(self, name: str) -> torch.Tensor | None:
        """This rank's part of a parameter, None if the module does not have the parameter."""
        param = getattr(self, name)
        if not isinstance(param, DTensor):
            return param
        if row_axes(param.placements):
            raise RuntimeError(
                f"{self._cut.path}: expected whole weights, got sharded ones; call the unit around the module, or "
                "call its unshard() first"
            )
        return param.to_local()


class ColwiseLinear(ComputesOnParts):
    """``[..., in]`` to this rank's part of ``[..., out]``, or to all of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cut = self._cut
        y = F.linear(self._entered(x), self._weight(), self._local("bias"))
        return regions.gather(y, cut.group, cut.fused) if cut.gathers else y

    def _entered(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in the region, entered once for all siblings, so the sum of their gradients takes one all-reduce."""
        group, attributes = self._cut.group, vars(self._cut.around)
        before, differentiable = attributes.get(_ENTERED), torch.is_grad_enabled() and x.requires_grad
        if before is not None and before[0] is x and before[1].requires_grad == differentiable:
            return before[1]
        entered = regions.enter(x, group)
        # Kept until the rowwise module that ends the region.
        if not self._cut.gathers:
            attributes[_ENTERED] = x, entered
        return entered


class RowwiseLinear(ComputesOnParts):
    """This rank's part of ``[..., in]``, or all of it, to ``[..., out]``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cut, weight = self._cut, self._weight()
        vars(cut.around).pop(_ENTERED, None)
        ranks = cut.mesh.size()
        if x.shape[-1] == weight.shape[1] * ranks:
            x = regions.scatter(x, cut.group, cut.fused)
        elif x.requires_grad:
            # In every forward, because frozen parameters and the path of a forward may change.
            self._sum_gradients(x)
        y = regions.leave(F.linear(x, weight), cut.group)
        bias = self._local("bias")
        return y if bias is None else y + bias

    def _sum_gradients(self, x: torch.Tensor) -> None:
        """Sum gradients of parameters inside the region over the ranks, because each rank has only a term."""
        group, own = self._cut.group, set(map(id, self._cut.around.parameters()))
        params, passed = regions.whole_values_inside(x)
        if passed:
            raise RuntimeError(
                f"{self._cut.path}: expected an input computed from the outputs of colwise modules and from "
                "parameters next to them, got one that also depends on the whole output of another cut module, which "
                "would get only a part of its gradient; cut the module through which the output passes, or leave this "
                "module whole"
            )
        for param in params:
            if id(param) not in own:
                raise RuntimeError(
                    f"{self._cut.path}: expected an input computed from the outputs of colwise modules and from "
                    f"parameters next to them, got one that also depends on a parameter of shape {tuple(param.shape)} "
                    "elsewhere, which would get only a part of its gradient; cut the module through which it passes, "
                    "or leave this module whole"
                )
            # A unit sums in the dtype of its reductions, which may be wider than the gradient's.
            if not hasattr(param, SUMMED):
                param.register_hook(functools.partial(regions.sum_over, group=group))
            setattr(param, SUMMED, group)


class ColwiseEmbedding(ComputesOnParts):
    """Tokens to whole vectors, whose columns are spread over the ranks."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self._weight()
        embedded = F.embedding(tokens, weight, self.padding_idx)  # type: ignore[attr-defined]  # of nn.Embedding
        return regions.gather(embedded, self._cut.group)


class RowwiseEmbedding(ComputesOnParts):
    """Tokens to whole vectors; each rank holds the vectors of some tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self._weight()
        rows, known = weight.shape[0], self.num_embeddings  # type: ignore[attr-defined]  # of nn.Embedding
        padding: int | None = self.padding_idx  # type: ignore[attr-defined]  # of nn.Embedding
        first = rows * self._cut.mesh.get_local_rank()
        own = tokens - first
        inside = (own >= 0) & (own < rows)
        # A token that no rank has is an error on all ranks, as without the cut.
        legal = (tokens >= 0) & (tokens < known)
        own = own.where(inside, torch.where(legal, 0, known))
        if padding is not None:
            padding = padding - first if first <= padding < first + rows else None
        embedded = F.embedding(own, weight, padding)
        return regions.leave(embedded.masked_fill(~inside.unsqueeze(-1), 0), self._cut.group)


class OnDTensors(ComputesOnParts):
    """Whole inputs to whole outputs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mesh = self._cut.mesh
        whole = [Replicate()] * mesh.ndim

        def spread(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                return value
            return DTensor.from_local(value, mesh, whole, run_check=False)

        def made_whole(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            return value.redistribute(mesh, whole).to_local(grad_placements=whole)

        args, kwargs = pytree.tree_map(spread, (args, kwargs))
        with _Spreading(mesh, spread):
            outputs = super().forward(*args, **kwargs)  # type: ignore[misc]  # mixed into an nn.Module
        return pytree.tree_map(made_whole, outputs)


class _Spreading(TorchFunctionMode):
    """``spread`` plain tensors in operations with DTensors on ``mesh``: buffers and masks are equal on all ranks.

    Torch's ``implicit_replication`` does not apply to tensors that backward has saved.
    """

    def __init__(self, mesh: DeviceMesh, spread: Callable[[Any], Any]) -> None:
        super().__init__()
        self._mesh, self._spread = mesh, spread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        # A unit's own work inside uses its sharded tensors.
        if any(type(leaf) is DTensor and leaf.device_mesh == self._mesh for leaf in leaves):
            args, kwargs = pytree.tree_map(self._spread, (args, kwargs))
        return func(*args, **kwargs)


@functools.cache
def _cut_class(mixin: type[ComputesOnParts], cls: type[nn.Module]) -> type[nn.Module]:
    """A class with the name of ``cls``, which reports show; one per class, so that equal modules share a class."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


def cut_module(module: nn.Module, part_class: type[ComputesOnParts], cut: CutModule) -> None:
    """Make ``module`` compute as ``part_class`` does."""
    module.__class__ = _cut_class(part_class, type(module))  # type: ignore[arg-type]  # classes have a hash
    # Not with setattr: ``around`` would become a child module.
    vars(module)["_cut"] = cut
