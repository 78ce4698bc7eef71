"""Paths of nnx modules in a run, also of those that a transformation makes afresh.

``nnx.scan``, ``nnx.jit`` and ``scan_layers`` call copies of modules, which the model itself does not hold. A copy is
recognized by its class and its variables: as the module that has the same ones, or as the layer of a stack that has
them with a leading axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flax import nnx

from bridge.parity.pair.jax_leaves import Hidden, reveal


def below(path: str, *names: Any) -> str:
    """A path of one more part."""
    return "/".join([*([path] if path else []), *map(str, names)])


def variables_of(module: nnx.Module) -> dict[str, Any]:
    """Parameters of a module by path below it."""
    return {below("", *path): variable for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))}


class Paths:
    """Paths of the modules and variables below ``root``.

    ``names``: what they are called, by path below ``root``; by default just so.
    """

    def __init__(self, root: nnx.Module, names: Mapping[str, str] | None = None) -> None:
        self.root = root
        self._paths: dict[int, str] = {}
        self._held: list[Any] = []
        self._modules: list[tuple[str, Any]] = []
        self._turns: dict[str, int] = {}
        self._adopt(root, "", names)
        self._own = list(self._modules)

    def of(self, module: Any, around: str | None) -> str | None:
        """The path of a module that is called inside of a call of ``around``; None for one that is no part of it."""
        if id(module) not in self._paths:
            path = self._recognized(module, around or "")
            if path is None:
                return None
            self._adopt(module, path)
        return self._paths[id(module)]

    def inside(self, module: nnx.Module) -> dict[str, str]:
        """Paths by path below ``module``, of modules and variables."""
        return {
            below("", *path): self._paths[id(node)]
            for path, node in _nodes(module)
            if id(node) in self._paths
        }

    def _adopt(self, module: Any, prefix: str, names: Mapping[str, str] | None = None) -> None:
        self._held.append(module)
        for path, node in _nodes(module):
            local = below("", *path)
            name = below(prefix, *path) if names is None else names.get(local)
            if name is None or id(node) in self._paths:
                continue
            self._held.append(node)
            self._paths[id(node)] = name
            if isinstance(node, nnx.Module):
                self._modules.append((name, node))

    def _recognized(self, module: Any, around: str) -> str | None:
        variables = variables_of(module)
        same = [(path, other) for path, other in self._own if type(other) is type(module)]
        stacks = [(path, other) for path, other in self._modules if type(other) is type(module)]
        # The nearest first: those inside of the call that runs.
        near = lambda one: not (one[0] + "/").startswith(around + "/" if around else "")  # noqa: E731
        stacks = sorted(
            ((path, other) for path, other in stacks if _length(variables, variables_of(other))), key=near
        )
        for path, other in stacks:
            number = self._layer(variables, variables_of(other), self._turns.get(path, 0), exactly=True)
            if number is not None:
                return self._layer_path(path, number, around, variables_of(other))
        alike = sorted(
            ((path, other) for path, other in same if _equal(variables, variables_of(other))), key=near
        )
        if variables and alike:
            return alike[0][0]
        if stacks:
            path, other = stacks[0]
            number = self._layer(variables, variables_of(other), self._turns.get(path, 0), exactly=False)
            return None if number is None else self._layer_path(path, number, around, variables_of(other))
        return alike[0][0] if len(alike) == 1 else None

    def _layer(
        self, variables: Mapping[str, Any], stack: Mapping[str, Any], turn: int, *, exactly: bool
    ) -> int | None:
        """Which layer of a stack has these variables: the one whose turn it is, if it may be."""
        length = next(iter(stack.values()))[...].shape[0]
        turns = [(turn + step) % length for step in range(length)]
        if not exactly:
            return turns[0]
        return next((number for number in turns if _equal(variables, stack, number)), None)

    def _layer_path(self, path: str, number: int, around: str, stack: Mapping[str, Any]) -> str:
        self._turns[path] = self._turns.get(path, 0) + 1
        # The scan may be within the call of the stack itself, which then never calls its layers.
        if around and path.startswith(around + "/"):
            outer = next((other for name, other in self._modules if name == around), None)
            length = next(iter(stack.values()))[...].shape[0]
            shapes = [one[...].shape for one in variables_of(outer).values()] if outer is not None else []
            if shapes and all(shape[:1] == (length,) for shape in shapes):
                return below(around, number, path[len(around) + 1 :])
        return below(path, number)


def _nodes(module: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    return (
        (path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree | nnx.Variable)
    )


def _length(variables: Mapping[str, Any], stack: Mapping[str, Any]) -> int | None:
    """How many layers a stack has that differs from a module by a leading axis only; None for other modules."""
    if not variables or variables.keys() != stack.keys():
        return None
    lengths = {stack[name][...].shape[:1] for name in variables}
    if len(lengths) != 1 or any(
        stack[name][...].shape[1:] != one[...].shape or not stack[name][...].shape
        for name, one in variables.items()
    ):
        return None
    return next(iter(lengths))[0]


def _equal(variables: Mapping[str, Any], others: Mapping[str, Any], layer: int | None = None) -> bool:
    if variables.keys() != others.keys():
        return False
    for name, one in variables.items():
        other = others[name][...] if layer is None else others[name][...][layer]
        if one[...].shape != other.shape:
            return False
        try:
            if not np.array_equal(np.asarray(reveal(one[...])), np.asarray(reveal(other)), equal_nan=True):
                return False
        except Hidden:
            return False
    return True
