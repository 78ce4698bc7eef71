"""The tensors of a checkpoint as a tree of names, in which layers that are alike are one branch.

model  291 tensors, 16.1 GB
    layers.{0..31}  32 alike, 288 tensors, 15 GB        attention.wq.weight  bfloat16 [4096, 4096] ... in each
    embed.weight  bfloat16 [32000, 4096]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bridge.core.formats.tensors.base import TensorInfo

ALIKE = 3
"""The fewest branches that are merged: two are as easily read."""
_TENSOR = object()
_NUMBERED = re.compile(r"(|.*_)([0-9]+)")
"""Names of layers, such as 3 in PyTorch and layers_3 in Flax."""


@dataclass(frozen=True)
class Branch:
    """A name, and what is below it: further branches, or a tensor.

    numbers: of branches that are alike and stand as one; the tensors are those of all of them, ``tensor`` and
    ``below`` those of the first. prefix: what comes before each number, such as "layers_".
    """

    name: str
    tensor: TensorInfo | None
    below: tuple[Branch, ...]
    tensors: int
    nbytes: int
    numbers: Sequence[int] = field(default=())
    prefix: str = ""

    @property
    def kind(self) -> object:
        """The common properties of branches that are alike."""
        own = None if self.tensor is None else (self.tensor.shape, self.tensor.dtype, len(self.tensor.chunks))
        return own, tuple((child.name, child.kind) for child in self.below)


def tensor_tree(tensors: Iterable[TensorInfo]) -> tuple[Branch, ...]:
    """The tree of these tensors, by the parts of their names, in their order."""
    root: dict[object, object] = {}
    for tensor in tensors:
        parent = root
        parts = [part for key in tensor.path for part in str(key).split(".")]
        for part in parts:
            inner = parent.setdefault(part, {})
            assert isinstance(inner, dict)
            parent = inner
        parent[_TENSOR] = tensor
    return tuple(_alike(_branches(root)))


def _branches(children: Mapping[object, object]) -> list[Branch]:
    branches = []
    for name, inner in children.items():
        if not isinstance(name, str):
            continue
        assert isinstance(inner, dict)
        tensor = inner.get(_TENSOR)
        below = tuple(_alike(_branches(inner)))
        own = (1, tensor.nbytes) if tensor is not None else (0, 0)
        count, nbytes = own[0] + sum(b.tensors for b in below), own[1] + sum(b.nbytes for b in below)
        branch = Branch(name, tensor, below, count, nbytes)
        if tensor is None and len(below) == 1 and not below[0].numbers:
            # A name with nothing else below it: model -> model.layers
            (only,) = below
            branch = Branch(f"{name}.{only.name}", only.tensor, only.below, count, nbytes)
        branches.append(branch)
    return branches


def _alike(branches: Sequence[Branch]) -> Iterable[Branch]:
    """The branches; those that are alike, with numbers as names, are merged at the place of the first."""
    members: dict[object, list[Branch]] = {}
    for position, branch in enumerate(branches):
        head, _, rest = branch.name.partition(".")
        numbered = _NUMBERED.fullmatch(head)
        alike = (numbered[1], rest, branch.kind) if numbered else position
        members.setdefault(alike, []).append(branch)
    for key, group in members.items():
        first = group[0]
        if len(group) < ALIKE:
            yield from group
            continue
        prefix = str(key[0]) if isinstance(key, tuple) else ""
        numbers = sorted(int(branch.name.partition(".")[0].removeprefix(prefix)) for branch in group)
        tensors, nbytes = sum(b.tensors for b in group), sum(b.nbytes for b in group)
        yield Branch(
            first.name.partition(".")[2], first.tensor, first.below, tensors, nbytes, numbers, prefix
        )
