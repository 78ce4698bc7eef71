"""A linen module with its variables as a model that can be recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen

from bridge.parity.pair.jax_float64 import changed
from bridge.parity.pair.jax_function import merged
from bridge.parity.pair.jax_leaves import cast_floats, named, on_host, reveal
from bridge.parity.pair.jax_nnx_paths import below
from bridge.parity.pair.jax_recorder import Again, Arguments, Recorder
from bridge.parity.pair.tap import listening


def is_linen(value: Any) -> bool:
    """Whether ``value`` is a linen module."""
    return isinstance(value, linen.Module)


class LinenModel:
    """``variables``: a dict with ``params``; other collections are passed, and what runs make of them is discarded."""

    def __init__(self, module: Any, variables: Mapping[str, Any]) -> None:
        self.module = module
        self.variables = dict(variables)
        self.python_modules = [type(module).__module__]

    def weights(self) -> dict[str, Any]:
        return dict(named(self.variables.get("params", {})))

    def load(self, weights: Mapping[str, Any]) -> None:
        self.variables["params"] = merged(self.variables["params"], weights)

    def instance(self, dtype: str) -> LinenInstance:
        variables = on_host(self.variables)
        state = {name: tree for name, tree in variables.items() if name != "params"}
        if dtype == "float64":
            state = cast_floats(state, dtype)
        return LinenInstance(_with_dtype(self.module, dtype), cast_floats(variables["params"], dtype), state)


def _with_dtype(module: Any, dtype: str) -> Any:
    """The module with other dtypes in its attributes."""
    different: dict[str, Any] = {}
    for one in dataclasses.fields(module):
        if one.name in ("parent", "name"):
            continue
        old = getattr(module, one.name, None)
        new = _with_dtype(old, dtype) if is_linen(old) else changed(old, dtype, one.name)
        if new is not old:
            different[one.name] = new
    return module.clone(**different) if different else module


class LinenInstance:
    """One run's copy."""

    def __init__(self, module: Any, tree: Any, state: Any) -> None:
        self.module = module
        self.tree = tree
        self.parameters = dict(named(tree))
        self.state = state

    def run(
        self,
        parameters: Mapping[str, Any],
        state: Any,
        loss: Callable[[Any], Any],
        recorder: Recorder | None = None,
    ) -> tuple[Any, Any]:
        variables = {"params": merged(self.tree, parameters), **state}
        if recorder is None:
            return loss(lambda *args, **kwargs: applied(self.module, variables, args, kwargs)), state
        return (
            loss(lambda *args, **kwargs: noted(self.module, variables, (args, kwargs), recorder)),
            state,
        )


def applied(module: Any, variables: Any, args: Any, kwargs: Any) -> Any:
    """The module's output; every collection but the parameters may be updated, and the updates are dropped."""
    others = [name for name in variables if name != "params"]
    keys = {"dropout": jax.random.key(0)}
    output = module.apply(variables, *args, rngs=keys, mutable=others or False, **kwargs)
    return output[0] if others else output


def noted(module: Any, variables: Any, arguments: Arguments, recorder: Recorder, prefix: str = "") -> Any:
    """The same, with the calls of all modules noted; ``prefix``: path of ``module``."""

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        path = below(prefix, *context.module.path)
        return recorder.call(
            path,
            type(context.module).__name__,
            (args, kwargs),
            lambda: call(*args, **kwargs),
            lambda: LinenAgain(context.module, path),
        )

    with linen.intercept_methods(intercept), listening(recorder.tap):
        return applied(module, variables, *arguments)


class LinenAgain(Again):
    """A module with its part of all collections at the time of the call."""

    def __init__(self, module: Any, path: str) -> None:
        self.module = module.clone(parent=None)
        self.path = path
        self.variables = jax.tree.map(reveal, dict(module.variables))
        self.tree = self.variables.pop("params", {})
        self.parameters = {below(path, name): leaf for name, leaf in named(self.tree)}

    def __call__(self, parameters: Mapping[str, Any], arguments: Arguments, recorder: Recorder) -> Any:
        own = {name: parameters[below(self.path, name)] for name, _ in named(self.tree)}
        variables = {"params": merged(self.tree, own), **self.variables}
        return noted(self.module, variables, arguments, recorder, self.path)
