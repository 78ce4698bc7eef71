"""An nnx module as a model that can be recorded, and module paths, also of modules that transformations create.

``nnx.scan``, ``nnx.jit`` and ``scan_layers`` call copies of modules, which the model itself does not contain. A copy is
recognized by its class and its variables: as the module with the same variables, or as the layer of a stack that has
them with a leading axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from bridge.parity.jax.leaves import (
    Arrays,
    Hidden,
    below,
    cast_floats,
    equal,
    floating_of,
    is_leaf,
    layer_of,
    leaves_by_path,
    length_of,
    merge_leaves,
    on_host,
    reveal,
)
from bridge.parity.jax.recorder import Arguments, CallReplay, LossOf, Parameters, Recorder
from bridge.parity.jax.run_in_dtype import attribute, change_dtypes, without_checkpoint
from bridge.parity.recorded.recording import heads_of, listening


def parameters_of(module: nnx.Module) -> dict[str, Any]:
    """The ``nnx.Param`` variables of a module by path, shared variables once."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {below("", *path): variable for path, variable in flat}


def variables_of(module: nnx.Module) -> dict[str, Any]:
    """The values of these variables."""
    return {path: variable[...] for path, variable in parameters_of(module).items()}


def split(module: nnx.Module) -> tuple[Any, Any, Any]:
    """A module's structure, its parameters and everything else that changes, as arrays without variables."""
    graphdef, parameters, state = cast(tuple[Any, Any, Any], nnx.split(module, nnx.Param, ...))
    return graphdef, nnx.as_pure(parameters), nnx.as_pure(state)


def buffers_of(state: Any) -> dict[str, Any]:
    """Arrays of numbers in a state without parameters, by path, such as batch statistics, caches and plain arrays."""
    flat = ((below("", *path), leaf) for path, leaf in nnx.to_flat_state(nnx.as_pure(state)))
    return {path: leaf for path, leaf in flat if is_leaf(leaf)}


_NOT_COMPARED = (nnx.RngState, nnx.Intermediate)
_BUFFER = nnx.Not(nnx.Any(nnx.Param, *_NOT_COMPARED))


class NnxModel:
    """``module`` stays unchanged in every run: runs use copies, with the same state of random numbers."""

    def __init__(self, module: nnx.Module) -> None:
        self.module = module
        self.python_modules = sorted({type(part).__module__ for _, part in nnx.iter_modules(module)})

    def weights(self) -> dict[str, Any]:
        return variables_of(self.module)

    def buffers(self) -> dict[str, Any]:
        return buffers_of(nnx.state(self.module, _BUFFER))

    @property
    def left_out(self) -> Sequence[str]:
        kept = nnx.to_flat_state(nnx.state(self.module, nnx.Any(*_NOT_COMPARED)))
        kinds = sorted({type(variable).__name__ for _, variable in kept})
        return [f"JAX's {', '.join(kinds)}"] if kinds else []

    def load(self, weights: Mapping[str, Any]) -> None:
        for path, variable in parameters_of(self.module).items():
            variable.set_value(weights[path])
        flat = nnx.to_flat_state(nnx.state(self.module, _BUFFER))
        buffers = [(path, weights[below("", *path)]) for path, _ in flat if below("", *path) in weights]
        if buffers:
            nnx.update(self.module, nnx.from_flat_state(buffers))

    def instance(self, dtype: str) -> NnxInstance:
        graphdef, parameters, state = split(self.module)
        parameters, state = cast_floats(on_host(parameters), dtype), on_host(state)
        if dtype == "float64":
            state = cast_floats(state, dtype)
        module = nnx.merge(graphdef, parameters, state)
        for _, part in nnx.iter_modules(module):
            for name, value in list(vars(part).items()):
                new = change_dtypes(value, dtype, name)
                if new is not value:
                    setattr(part, name, new)
        return NnxInstance(module)


class NnxInstance:
    """One run's copy."""

    def __init__(self, module: nnx.Module) -> None:
        self.graphdef, self.tree, self.state = split(module)
        self.parameters = floating_of(self.tree)
        self._buffers = buffers_of(nnx.state(module, _BUFFER)).keys()

    def run(
        self, parameters: Parameters, state: Any, loss: LossOf, recorder: Recorder | None = None
    ) -> tuple[Any, Any]:
        module = nnx.merge(self.graphdef, merge_leaves(self.tree, parameters), state)
        if recorder is None:
            value = loss(module)
        else:
            with record_calls(Paths(module), recorder):
                value = loss(module)
        return value, nnx.as_pure(nnx.state(module, nnx.Not(nnx.Param)))

    def buffers(self, state: Any) -> dict[str, Any]:
        return {path: leaf for path, leaf in buffers_of(state).items() if path in self._buffers}


@contextmanager
def record_calls(paths: Paths, recorder: Recorder) -> Iterator[None]:
    """While this is open, ``recorder`` notes every call of the modules below ``paths.root``, and every tap."""

    def wrap(owner: type, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            # A subclass that calls its parent's __call__ counts as one call.
            path = paths.of(self, recorder.path) if type(self) is owner else None
            if path is None:
                return call(self, *args, **kwargs)
            return recorder.call(
                path,
                owner.__name__,
                (args, kwargs),
                lambda: call(self, *args, **kwargs),
                lambda: NnxReplay(self, paths),
                heads_of(self),
            )

        return noted

    with ExitStack() as stack:
        for owner in {type(part) for _, part in nnx.iter_modules(paths.root)}:
            call = next((vars(part)["__call__"] for part in owner.__mro__ if "__call__" in vars(part)), None)
            if call is not None:
                stack.enter_context(attribute(owner, "__call__", wrap(owner, without_checkpoint(call))))
        stack.enter_context(listening(recorder.tap))
        yield


class NnxReplay(CallReplay):
    """A module with the values of all its variables at the time of the call, and the paths of its contents."""

    def __init__(self, module: nnx.Module, paths: Paths) -> None:
        self.names = paths.inside(module)
        self.graphdef, *trees = split(module)
        self.tree, self.state = jax.tree.map(reveal, trees)
        self.full = {name: self.names.get(name, name) for name, _ in leaves_by_path(self.tree)}
        self.parameters = {self.full[name]: leaf for name, leaf in floating_of(self.tree).items()}

    def __call__(self, parameters: Parameters, arguments: Arguments, recorder: Recorder) -> Any:
        own = {name: parameters[full] for name, full in self.full.items() if full in parameters}
        module: Any = nnx.merge(self.graphdef, merge_leaves(self.tree, own), self.state)
        with record_calls(Paths(module, self.names), recorder):
            args, kwargs = arguments
            return module(*args, **kwargs)


class Paths:
    """Paths of the modules and variables below ``root``.

    ``names``: names by path below ``root``; by default the paths themselves.
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
        """The path of a module called inside a call of ``around``; None if the module is no part of it."""
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
        """Paths of modules and variables, by their path below ``module``."""
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

        def alike(modules: list[tuple[str, Any]]) -> list[tuple[str, Arrays]]:
            """Modules of the same class, those inside the running call first."""
            found = [(path, variables_of(other)) for path, other in modules if type(other) is type(module)]
            return sorted(found, key=lambda known: bool(around) and not known[0].startswith(around + "/"))

        # Stacks before equal modules: the first layer of a stack may also have the values of another module.
        stacks = [(path, stack) for path, stack in alike(self._modules) if length_of(arrays, stack)]
        for path, stack in stacks:
            number = layer_of(arrays, stack, self._turns.get(path, 0))
            if number is not None:
                return self._layer_path(path, number, around, length_of(arrays, stack))
        same = [path for path, others in alike(self._own) if equal(arrays, others)]
        if same and (arrays or len(same) == 1):
            return same[0]
        if stacks:
            # Its parameters were changed before the call, such as to another dtype.
            path, stack = stacks[0]
            length = length_of(arrays, stack)
            return self._layer_path(path, self._turns.get(path, 0) % length, around, length)
        return None

    def _layer_path(self, path: str, number: int, around: str, length: int) -> str:
        self._turns[path] = self._turns.get(path, 0) + 1
        # The scan may be inside the call of the stack itself, which then never calls its layers.
        if around and path.startswith(around + "/"):
            outer = next((variables_of(other) for name, other in self._modules if name == around), {})
            if outer and all(np.shape(array)[:1] == (length,) for array in outer.values()):
                return below(around, number, path[len(around) + 1 :])
        return below(path, number)


def _nodes(module: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    return (
        (path, node) for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Pytree | nnx.Variable)
    )
