"""Models that are called with a tree of arrays and can be recorded: linen modules, and functions of parameters.

Inside a function, only values passed to ``tap`` are recorded.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen

from bridge.parity.jax.leaves import (
    Arrays,
    Hidden,
    below,
    cast_floats,
    floating_of,
    is_leaf,
    layer_of,
    leaves_by_path,
    length_of,
    merge_leaves,
    on_host,
    others_of,
    reveal,
)
from bridge.parity.jax.recorder import Arguments, CallReplay, LossOf, Parameters, Recorder
from bridge.parity.jax.run_in_dtype import change_dtypes
from bridge.parity.recorded.recording import heads_of, listening


class FunctionModel:
    """``function(parameters, *batch)``; ``parameters``: a pytree."""

    def __init__(self, function: Callable[..., Any], parameters: Any) -> None:
        self.function = function
        self.tree = parameters
        self.python_modules = [getattr(function, "__module__", "")]

    def weights(self) -> dict[str, Any]:
        return floating_of(self.tree)

    def buffers(self) -> dict[str, Any]:
        return others_of(self.tree)

    left_out = ()

    def load(self, weights: Mapping[str, Any]) -> None:
        self.tree = merge_leaves(self.tree, weights)

    def instance(self, dtype: str) -> FunctionInstance:
        return FunctionInstance(self.function, cast_floats(on_host(self.tree), dtype))


class FunctionInstance:
    """One run's copy: parameters only."""

    def __init__(self, function: Callable[..., Any], tree: Any) -> None:
        self.function = function
        self.tree = tree
        self.parameters = floating_of(tree)
        self.state: Any = {}

    def run(
        self, parameters: Parameters, state: Any, loss: LossOf, recorder: Recorder | None = None
    ) -> tuple[Any, Any]:
        if recorder is None:
            return loss(lambda *args, **kwargs: self._call(parameters, args, kwargs)), state
        with listening(recorder.tap):
            return loss(lambda *args, **kwargs: self._noted(parameters, (args, kwargs), recorder)), state

    def _call(self, parameters: Parameters, args: Any, kwargs: Any) -> Any:
        return self.function(merge_leaves(self.tree, parameters), *args, **kwargs)

    def _noted(self, parameters: Parameters, arguments: Arguments, recorder: Recorder) -> Any:
        return recorder.call(
            "",
            getattr(self.function, "__name__", type(self.function).__name__),
            arguments,
            lambda: self._call(parameters, *arguments),
            lambda: FunctionReplay(self, {path: reveal(leaf) for path, leaf in parameters.items()}),
        )

    def buffers(self, state: Any) -> dict[str, Any]:
        # A function does not change its arguments.
        return others_of(self.tree)


class FunctionReplay(CallReplay):
    """The whole function once more."""

    def __init__(self, instance: FunctionInstance, parameters: Parameters) -> None:
        self.function, self.tree = instance.function, instance.tree
        self.parameters = parameters

    def __call__(self, parameters: Parameters, arguments: Arguments, recorder: Recorder) -> Any:
        args, kwargs = arguments
        instance = FunctionInstance(self.function, self.tree)
        return instance.run(parameters, {}, lambda model: model(*args, **kwargs), recorder)[0]


_SOWN = "intermediates"


class LinenModel:
    """``variables``: a dict with ``params``; other collections change between steps, and are restored after a run."""

    def __init__(self, module: Any, variables: Mapping[str, Any]) -> None:
        self.module = module
        self.variables = dict(linen.meta.unbox(variables))
        # The classes that the module creates in its calls are not known beforehand: classes of its package may be.
        package = type(module).__module__.partition(".")[0]
        self.python_modules = [name for name in sys.modules if name.partition(".")[0] == package]

    def weights(self) -> dict[str, Any]:
        return dict(leaves_by_path(self.variables.get("params", {})))

    def buffers(self) -> dict[str, Any]:
        """By path, which starts with the collection: ``batch_stats/norm/mean``."""
        return buffers_of(self.variables)

    @property
    def left_out(self) -> Sequence[str]:
        return [f"JAX's collection {_SOWN}"] if _SOWN in self.variables else []

    def load(self, weights: Mapping[str, Any]) -> None:
        self.variables["params"] = merge_leaves(self.variables["params"], weights)
        buffers = {path: weights[path] for path in self.buffers() if path in weights}
        self.variables.update(merge_leaves(self.variables, buffers))

    def instance(self, dtype: str) -> LinenInstance:
        variables = on_host(self.variables)
        state = {name: tree for name, tree in variables.items() if name != "params"}
        if dtype == "float64":
            state = cast_floats(state, dtype)
        return LinenInstance(self.module, cast_floats(variables["params"], dtype), state, dtype)


def buffers_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of numbers in all collections except the parameters, by path; sown values grow with each call."""
    kept = {name: tree for name, tree in variables.items() if name not in ("params", _SOWN)}
    return {path: leaf for path, leaf in leaves_by_path(kept) if is_leaf(leaf)}


def _dtype_interceptor(dtype: str) -> Callable[..., Any]:
    """An interceptor that replaces dtypes in modules' attributes before their methods run."""

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        # Within ``apply`` all modules are copies.
        for field in dataclasses.fields(context.module):
            old = getattr(context.module, field.name, None)
            if field.name not in ("parent", "name") and not isinstance(old, linen.Module):
                new = change_dtypes(old, dtype, field.name)
                if new is not old:
                    object.__setattr__(context.module, field.name, new)
        return call(*args, **kwargs)

    return intercept


class LinenInstance:
    """One run's copy."""

    def __init__(self, module: Any, tree: Any, state: Any, dtype: str) -> None:
        self.module = module
        self.dtype = dtype
        self.tree = tree
        self.parameters = floating_of(tree)
        self.state = state

    def run(
        self, parameters: Parameters, state: Any, loss: LossOf, recorder: Recorder | None = None
    ) -> tuple[Any, Any]:
        variables = {"params": merge_leaves(self.tree, parameters), **state}

        def model(*args: Any, **kwargs: Any) -> Any:
            if recorder is None:
                with linen.intercept_methods(_dtype_interceptor(self.dtype)):
                    output, changed = apply_module(self.module, variables, args, kwargs)
            else:
                output, changed = record_calls(self.module, variables, (args, kwargs), recorder, self.dtype)
            # A loss may call the model several times. Sown values would change the tree of the state in each step.
            variables.update({name: tree for name, tree in changed.items() if name != _SOWN})
            return output

        value = loss(model)
        return value, {name: variables[name] for name in state}

    def buffers(self, state: Any) -> dict[str, Any]:
        return buffers_of(state)


def apply_module(module: Any, variables: Any, args: Any, kwargs: Any) -> tuple[Any, Mapping[str, Any]]:
    """The module's output, and every collection but the parameters after the call."""
    others = [name for name in variables if name != "params"]
    # Active dropout draws the same numbers in every run.
    keys = {"dropout": jax.random.key(0)}
    output = module.apply(variables, *args, rngs=keys, mutable=others or False, **kwargs)
    return output if others else (output, {})


def record_calls(
    module: Any, variables: Any, arguments: Arguments, recorder: Recorder, dtype: str, prefix: str = ""
) -> tuple[Any, Mapping[str, Any]]:
    """The same, with the calls of all modules recorded; ``prefix``: path of ``module``."""

    opened = [Opened((), prefix, dict(leaves_by_path(variables["params"])))]
    turns: dict[str, int] = {}

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        try:
            opening = None if context.method_name != "__call__" else opened[-1].inside(context.module, turns)
        except Hidden:
            opening = None
        if opening is None:
            return call(*args, **kwargs)

        def run() -> Any:
            opened.append(opening)
            try:
                return call(*args, **kwargs)
            finally:
                opened.pop()

        class_name = type(context.module).__name__
        return recorder.call(
            opening.path,
            class_name,
            (args, kwargs),
            run,
            lambda: LinenReplay(context.module, opening.path, dtype),
            heads_of(context.module),
        )

    retyped = linen.intercept_methods(_dtype_interceptor(dtype))
    with retyped, linen.intercept_methods(intercept), listening(recorder.tap):
        return apply_module(module, variables, *arguments)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A running call: the module's path in linen, its path in the recording, and its parameters."""

    own: tuple[str, ...]
    path: str
    arrays: Arrays

    def inside(self, module: Any, turns: dict[str, int]) -> Opened:
        """The call of a module below. ``nn.scan`` calls a stack under one path with each layer's parameters.

        ``turns``: how many layers of each stack were called so far. Raises ``Hidden``.
        """
        rest = module.path[len(self.own) :]
        path = below(self.path, *rest)
        arrays = dict(leaves_by_path(module.variables.get("params", {})))
        start = "".join(f"{name}/" for name in rest)
        stack = {name[len(start) :]: x for name, x in self.arrays.items() if name.startswith(start)}
        if length_of(arrays, stack):
            turn = turns.get(path, 0)
            number = layer_of(arrays, stack, turn)
            turns[path] = turn + 1
            path = below(path, turn % length_of(arrays, stack) if number is None else number)
        return Opened(module.path, path, arrays)


class LinenReplay(CallReplay):
    """A module with its part of all collections at the time of the call."""

    def __init__(self, module: Any, path: str, dtype: str) -> None:
        self.module = module.clone(parent=None)
        self.dtype = dtype
        self.path = path
        self.variables = jax.tree.map(reveal, dict(module.variables))
        self.tree = self.variables.pop("params", {})
        self.parameters = {below(path, name): leaf for name, leaf in floating_of(self.tree).items()}

    def __call__(self, parameters: Parameters, arguments: Arguments, recorder: Recorder) -> Any:
        own = {name: parameters[below(self.path, name)] for name in floating_of(self.tree)}
        variables = {"params": merge_leaves(self.tree, own), **self.variables}
        return record_calls(self.module, variables, arguments, recorder, self.dtype, self.path)[0]
