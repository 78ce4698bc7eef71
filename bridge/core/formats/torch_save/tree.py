"""The leaves of what torch.save has pickled: tensors, arrays of NumPy, and other values, each with its path.

Paths and names are those that DCP gives a state_dict (`torch.distributed.checkpoint.format_utils.torch_save_to_dcp`):
mappings are gone into, and so are lists that hold tensors or mappings; keys are text. Tuples with tensors, which DCP
keeps as one value, are gone into as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from bridge.core.formats.dcp.archive import REBUILD, REBUILD_UNTYPED
from bridge.core.formats.dcp.pickle_records import Call, Instance, Name
from bridge.core.formats.dcp.plain_values import (
    ARRAYS,
    REBUILDERS,
    array_of,
    described,
    is_pair,
    plain_from_pickle,
)
from bridge.core.formats.tensors.base import CheckpointError, TreePath, UnreadableValue
from bridge.core.formats.tensors.leaves import TREE_PATH_KEYS, is_tree_path
from bridge.core.formats.tensors.plain import MAX_NODES

_PARAMETERS: Final = frozenset(
    {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
)
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_TENSOR_TYPES: Final = frozenset(
    {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
)
_TENSORS: Final = frozenset({REBUILD, REBUILD_UNTYPED})
_MAX_DEPTH: Final = 64


def leaves(root: object, what: str) -> Iterator[tuple[TreePath, object]]:
    """Each leaf with its path: the Call of a tensor, an ndarray, or something else.

    CheckpointError, beginning with `what`, when the root is no mapping or list, and when the tree is too deep or too
    large to be one: a small pickle can describe a large tree by naming one part often.
    """
    if not isinstance(root, dict | list | tuple):
        raise CheckpointError(
            f"{what}: expected a state_dict, or a mapping of some, found {described(root)}: of a module save the "
            "state_dict(), of a tensor a dict with its name"
        )
    budget = MAX_NODES
    stack: list[tuple[TreePath, object]] = [((), root)]
    tree = _Tree(what)
    while stack:
        path, node = stack.pop()
        node = tree.unwrapped(node)
        below: list[tuple[str | int, object]] = []
        if isinstance(node, dict):
            if any(isinstance(key, Instance) for key in node):
                raise CheckpointError(f"{what}: expected keys that are text or numbers, found an object")
            below = [(str(key), value) for key, value in node.items()]
        elif isinstance(node, list | tuple) and (not path or tree.is_gone_into(node)):
            below = list(enumerate(node))
        budget -= len(below)
        if budget < 0 or len(path) > _MAX_DEPTH:
            raise CheckpointError(
                f"{what}: expected at most {MAX_NODES} entries, nested {_MAX_DEPTH} deep, found more"
            )
        if below:
            stack += [((*path, key), value) for key, value in reversed(below)]
        elif path:
            if not is_tree_path(path):
                raise CheckpointError(f"{what}: expected a path of {TREE_PATH_KEYS}, got {path!r:.80}")
            yield path, node


def is_tensor(node: object) -> bool:
    """Whether this leaf is the description of a strided tensor."""
    return isinstance(node, Call) and node.name in _TENSORS


def value_of(node: object, what: str) -> object:
    """A leaf as a plain value. UnreadableValue, beginning with `what`, which names what it is, for others."""
    if isinstance(node, Name) and node.dotted.startswith("torch."):
        return node.dotted
    match node:
        case Call(name=name) if name.startswith(REBUILDERS):
            reason = described(node)
            raise UnreadableValue(
                f"{what}: expected a strided tensor, found {reason}", reason, holds_tensors=True
            )
    return plain_from_pickle(node, what)


class _Tree:
    """What nodes are. Each is looked into once: a pickle may name one a million times."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._arrays: dict[int, np.ndarray | None] = {}
        self._gone_into: dict[int, bool] = {}

    def unwrapped(self, node: object) -> object:
        """A parameter's or buffer's tensor, an array of NumPy, the dict of an ordered one; other nodes as they are."""
        for _ in range(4):
            match node:
                case Call(name=name, args=(tensor, *_)) if name in _PARAMETERS:
                    node = tensor
                case Call(
                    name=name, args=(Name(dotted=function), Name(dotted=class_name), tuple(args), *_)
                ) if name == _FROM_TYPE and class_name in _TENSOR_TYPES:
                    node = Call(function, args)
                case Call(name="collections.OrderedDict", args=(list(pairs),)) if all(map(is_pair, pairs)):
                    return dict(pairs)
                case Call(name=name) if name in ARRAYS:
                    if id(node) not in self._arrays:
                        self._arrays[id(node)] = array_of(node)
                    array = self._arrays[id(node)]
                    return node if array is None else array
                case _:
                    break
        return node

    def is_gone_into(self, node: list[object] | tuple[object, ...], depth: int = 0) -> bool:
        """Whether a list holds mappings or tensors, at some depth."""
        if id(node) not in self._gone_into:
            if depth > _MAX_DEPTH:
                raise CheckpointError(
                    f"{self._what}: expected lists nested {_MAX_DEPTH} deep at most, found more"
                )
            self._gone_into[id(node)] = False  # of a list that holds itself
            self._gone_into[id(node)] = any(self._counts(self.unwrapped(entry), depth) for entry in node)
        return self._gone_into[id(node)]

    def _counts(self, entry: object, depth: int) -> bool:
        if isinstance(entry, list | tuple):
            return self.is_gone_into(entry, depth + 1)
        rebuilt = isinstance(entry, Call) and entry.name.startswith(REBUILDERS)
        return rebuilt or isinstance(entry, dict | np.ndarray)
