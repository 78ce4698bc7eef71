"""A function of parameters as a model that can be recorded; ``tap`` is what is seen inside of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bridge.parity.jax.leaves import cast_floats, floating_of, merge_leaves, on_host, others_of, reveal
from bridge.parity.jax.recorder import Arguments, CallReplay, Recorder
from bridge.parity.recorded.recording import listening


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
    """One run's copy: nothing but parameters."""

    def __init__(self, function: Callable[..., Any], tree: Any) -> None:
        self.function = function
        self.tree = tree
        self.parameters = floating_of(tree)
        self.state: Any = {}

    def run(
        self,
        parameters: Mapping[str, Any],
        state: Any,
        loss: Callable[[Any], Any],
        recorder: Recorder | None = None,
    ) -> tuple[Any, Any]:
        if recorder is None:
            return loss(lambda *args, **kwargs: self._call(parameters, args, kwargs)), state
        with listening(recorder.tap):
            return loss(lambda *args, **kwargs: self._noted(parameters, (args, kwargs), recorder)), state

    def _call(self, parameters: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        return self.function(merge_leaves(self.tree, parameters), *args, **kwargs)

    def _noted(self, parameters: Mapping[str, Any], arguments: Arguments, recorder: Recorder) -> Any:
        return recorder.call(
            "",
            getattr(self.function, "__name__", type(self.function).__name__),
            arguments,
            lambda: self._call(parameters, *arguments),
            lambda: FunctionReplay(self, {path: reveal(leaf) for path, leaf in parameters.items()}),
        )

    def buffers(self, state: Any) -> dict[str, Any]:
        # A function changes nothing that it is given.
        return others_of(self.tree)


class FunctionReplay(CallReplay):
    """The whole function once more."""

    def __init__(self, instance: FunctionInstance, parameters: Mapping[str, Any]) -> None:
        self.function, self.tree = instance.function, instance.tree
        self.parameters = parameters

    def __call__(self, parameters: Mapping[str, Any], arguments: Arguments, recorder: Recorder) -> Any:
        args, kwargs = arguments
        instance = FunctionInstance(self.function, self.tree)
        return instance.run(parameters, {}, lambda model: model(*args, **kwargs), recorder)[0]
