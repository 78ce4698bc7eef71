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

from bridge.parity.jax.leaves import Hidden
from bridge.parity.jax.stacks import Arrays, equal, layer_of, length_of


def below(path: str, *names: Any) -> str:
    """A path of one more part."""
    return "/".join([*([path] if path else []), *map(str, names)])


def variables_of(module: nnx.Module) -> dict[str, Any]:
    """Values of a module's parameters by path below it."""
    return {below("", *path): one[...] for path, one in nnx.to_flat_state(nnx.state(module, nnx.Param))}


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
            try:
                path = self._recognized(module, around or "")
            except Hidden:
                path = None
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
        arrays = variables_of(module)

        def nearest(one: tuple[str, Arrays]) -> bool:
            """Those inside of the call that runs come first."""
            return bool(around) and not one[0].startswith(around + "/")

        def alike(modules: list[tuple[str, Any]]) -> list[tuple[str, Arrays]]:
            return [(path, variables_of(other)) for path, other in modules if type(other) is type(module)]

        stacks = sorted((one for one in alike(self._modules) if length_of(arrays, one[1])), key=nearest)
        for path, stack in stacks:
            number = layer_of(arrays, stack, self._turns.get(path, 0))
            if number is not None:
                return self._layer_path(path, number, around, length_of(arrays, stack))
        same = sorted((one for one in alike(self._own) if equal(arrays, one[1])), key=nearest)
        if same and (arrays or len(same) == 1):
            return same[0][0]
        if stacks:
            # Its parameters were changed on the way, such as to another dtype.
            path, stack = stacks[0]
            length = length_of(arrays, stack)
            return self._layer_path(path, self._turns.get(path, 0) % length, around, length)
        return None

    def _layer_path(self, path: str, number: int, around: str, length: int) -> str:
        self._turns[path] = self._turns.get(path, 0) + 1
        # The scan may be within the call of the stack itself, which then never calls its layers.
        if around and path.startswith(around + "/"):
            outer = next((variables_of(other) for name, other in self._modules if name == around), {})
            if outer and all(np.shape(array)[:1] == (length,) for array in outer.values()):
                return below(around, number, path[len(around) + 1 :])
        return below(path, number)


def _nodes(module: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    return (
        (path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree | nnx.Variable)
    )
