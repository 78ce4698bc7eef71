"""An nnx module as a model that can be recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import jax
from flax import nnx

from bridge.parity.jax.eager import attribute, without_checkpoint
from bridge.parity.jax.function import floating_of, merged
from bridge.parity.jax.leaves import cast_floats, is_leaf, named, on_host, reveal
from bridge.parity.jax.nnx_paths import Paths, below
from bridge.parity.jax.recorder import Again, Arguments, Recorder
from bridge.parity.jax.run_in_dtype import changed
from bridge.parity.recorded.recording import heads_of
from bridge.parity.recorded.tap import listening


def parameters_of(module: nnx.Module) -> dict[str, Any]:
    """The ``nnx.Param`` variables of a module by path, shared ones once."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {below("", *path): variable for path, variable in flat}


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
    """``module`` stays as it is in every run: runs have copies, with the same state of random numbers."""

    def __init__(self, module: nnx.Module) -> None:
        self.module = module
        self.python_modules = sorted({type(one).__module__ for _, one in nnx.iter_modules(module)})

    def weights(self) -> dict[str, Any]:
        return {path: variable[...] for path, variable in parameters_of(self.module).items()}

    def buffers(self) -> dict[str, Any]:
        return buffers_of(nnx.state(self.module, _BUFFER))

    @property
    def left_out(self) -> Sequence[str]:
        kept = nnx.to_flat_state(nnx.state(self.module, nnx.Any(*_NOT_COMPARED)))
        return [f"JAX's {', '.join(sorted({type(one).__name__ for _, one in kept}))}"] if kept else []

    def load(self, weights: Mapping[str, Any]) -> None:
        for path, variable in parameters_of(self.module).items():
            variable.set_value(weights[path])
        flat = nnx.to_flat_state(nnx.state(self.module, _BUFFER))
        given = [(path, weights[below("", *path)]) for path, _ in flat if below("", *path) in weights]
        if given:
            nnx.update(self.module, nnx.from_flat_state(given))

    def instance(self, dtype: str) -> NnxInstance:
        graphdef, parameters, state = split(self.module)
        parameters, state = cast_floats(on_host(parameters), dtype), on_host(state)
        if dtype == "float64":
            state = cast_floats(state, dtype)
        module = nnx.merge(graphdef, parameters, state)
        for _, one in nnx.iter_modules(module):
            for name, value in list(vars(one).items()):
                new = changed(value, dtype, name)
                if new is not value:
                    setattr(one, name, new)
        return NnxInstance(module)


class NnxInstance:
    """One run's copy."""

    def __init__(self, module: nnx.Module) -> None:
        self.graphdef, self.tree, self.state = split(module)
        self.parameters = floating_of(self.tree)
        self._buffers = buffers_of(nnx.state(module, _BUFFER)).keys()

    def run(
        self,
        parameters: Mapping[str, Any],
        state: Any,
        loss: Callable[[Any], Any],
        recorder: Recorder | None = None,
    ) -> tuple[Any, Any]:
        module = nnx.merge(self.graphdef, merged(self.tree, parameters), state)
        if recorder is None:
            value = loss(module)
        else:
            with noted_calls(Paths(module), recorder):
                value = loss(module)
        return value, nnx.as_pure(nnx.state(module, nnx.Not(nnx.Param)))

    def buffers(self, state: Any) -> dict[str, Any]:
        return {path: leaf for path, leaf in buffers_of(state).items() if path in self._buffers}


@contextmanager
def noted_calls(paths: Paths, recorder: Recorder) -> Iterator[None]:
    """While this is open, ``recorder`` notes every call of the modules below ``paths.root``, and every tap."""

    def wrap(owner: type, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            # A subclass that calls its parent's __call__ is one call.
            path = paths.of(self, recorder.path) if type(self) is owner else None
            if path is None:
                return call(self, *args, **kwargs)
            return recorder.call(
                path,
                owner.__name__,
                (args, kwargs),
                lambda: call(self, *args, **kwargs),
                lambda: NnxAgain(self, paths),
                heads_of(self),
            )

        return noted

    with ExitStack() as stack:
        for owner in {type(one) for _, one in nnx.iter_modules(paths.root)}:
            call = next((vars(one)["__call__"] for one in owner.__mro__ if "__call__" in vars(one)), None)
            if call is not None:
                stack.enter_context(attribute(owner, "__call__", wrap(owner, without_checkpoint(call))))
        stack.enter_context(listening(recorder.tap))
        yield


class NnxAgain(Again):
    """A module with the values of all its variables at the time of the call, and the paths of what is in it."""

    def __init__(self, module: nnx.Module, paths: Paths) -> None:
        self.names = paths.inside(module)
        self.graphdef, *trees = split(module)
        self.tree, self.state = jax.tree.map(reveal, trees)
        self.full = {name: self.names.get(name, name) for name, _ in named(self.tree)}
        self.parameters = {self.full[name]: leaf for name, leaf in floating_of(self.tree).items()}

    def __call__(self, parameters: Mapping[str, Any], arguments: Arguments, recorder: Recorder) -> Any:
        own = {name: parameters[full] for name, full in self.full.items() if full in parameters}
        module: Any = nnx.merge(self.graphdef, merged(self.tree, own), self.state)
        with noted_calls(Paths(module, self.names), recorder):
            args, kwargs = arguments
            return module(*args, **kwargs)
