"""What a planted bug is, and the ways to plant one: in one module of one model of a fresh pair."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.support.parity.pair_tools import Pair

Side = Literal["torch", "jax"]


@dataclass(frozen=True)
class Planted:
    """Changes one model of a pair, in place. ``path``: the module of that model in which the fault lies."""

    side: Side
    path: str
    change: Callable[[Any], None]

    def __call__(self, pair: Pair) -> None:
        """Plant it. ``change`` gets the module at ``path``."""
        self.change(module_at(pair, self.side, self.path))


@dataclass(frozen=True)
class Bug:
    """A fault in one of a pair's two models.

    ``module``: the right answer, a torch path: the innermost torch module around the fault that has a JAX partner with
    the same parameters. ``parameter``: the torch name of the tensor whose values are wrong, if that is the fault.
    ``direction``: ``"backward"`` changes gradients only. ``dtype``: the one in which the fault can be seen. ``also``:
    another right answer, where two modules have one share together (a factor that one has and the other lacks), or
    where the faulty part of ``module`` has no twin and the module around it is the first that can be compared.
    """

    name: str
    pair: str
    side: Side
    apply: Planted
    module: str
    parameter: str | None = None
    direction: Literal["forward", "backward"] = "forward"
    dtype: Literal["float32", "bfloat16"] = "float32"
    also: str | None = None


def bug(
    pair: str, what: str, apply: Planted, module: str, parameter: str | None = None, **others: Any
) -> Bug:
    """A bug, named by pair, side and what it is."""
    return Bug(f"{pair}, {apply.side}: {what}", pair, apply.side, apply, module, parameter, **others)


def module_at(pair: Pair, side: Side, path: str) -> Any:
    """A module by its path, of one of the two models; ``""`` is the whole model."""
    if side == "torch":
        return pair.torch_model.get_submodule(path)
    found: Any = pair.jax_model
    for part in path.split("/") if path else ():
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return found


def edited(function: Callable[..., Any], *changes: tuple[str, str], **helpers: Any) -> Callable[..., Any]:
    """A function with other source text and with other global functions under the names of ``helpers``.

    Each old text must occur exactly once, so that a change of the function it edits is noticed.
    """
    function = inspect.unwrap(function)
    text = textwrap.dedent(inspect.getsource(function))
    for old, new in changes:
        assert text.count(old) == 1, f"expected {old!r} once, found {text.count(old)} of it in\n{text}"
        text = text.replace(old, new)
    names = {"torch": torch, "jax": jax, "jnp": jnp} | function.__globals__ | helpers
    exec(compile(text, f"<edited {function.__qualname__}>", "exec"), names)
    return names[function.__name__]


def _with_method(module: Any, name: str, function: Callable[..., Any]) -> None:
    """Give one module a method of its own, in a way that copies of the module keep."""
    kind = type(module)
    make: Any = type(kind)
    changed = make(kind.__name__, (kind,), {name: function, "__module__": kind.__module__})
    object.__setattr__(module, "__class__", changed)


def edit(side: Side, path: str, *changes: tuple[str, str], method: str = "", **helpers: Any) -> Planted:
    """Other source text, or other helpers, in a method of a module: ``forward`` or ``__call__`` unless named."""
    name = method or ("forward" if side == "torch" else "__call__")

    def change(module: Any) -> None:
        _with_method(module, name, edited(getattr(type(module), name), *changes, **helpers))

    return Planted(side, path, change)


def call(side: Side, path: str, wrong: Callable[..., Any]) -> Planted:
    """``wrong(module, original, *args, **kwargs)`` in place of a module's call."""
    name = "forward" if side == "torch" else "__call__"

    def change(module: Any) -> None:
        original = getattr(type(module), name)

        @functools.wraps(original)
        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrong(self, functools.partial(original, self), *args, **kwargs)

        _with_method(module, name, replaced)

    return Planted(side, path, change)


def put(side: Side, path: str, **values: Any) -> Planted:
    """Other values of attributes that a module has already."""

    def change(module: Any) -> None:
        for name, value in values.items():
            assert hasattr(module, name), f"expected an attribute {name} of {type(module).__name__}"
            setattr(module, name, value)

    return Planted(side, path, change)


def config(path: str, **values: Any) -> Planted:
    """Another config of one module of a ``CausalLM``."""

    def change(module: Any) -> None:
        module.config = dataclasses.replace(module.config, **values)

    return Planted("jax", path, change)


Change = Callable[[np.ndarray], np.ndarray]


def torch_weight(name: str, change: Change) -> Planted:
    """Other values of one tensor of the torch model; ``change`` gets a copy of the old values."""
    path, _, last = name.rpartition(".")

    def write(module: Any) -> None:
        tensor = getattr(module, last)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(change(tensor.detach().numpy().copy()))))

    return Planted("torch", path, write)


def jax_weight(name: str, change: Change) -> Planted:
    """Other values of one tensor of the JAX model; ``change`` gets a copy of the old values."""
    path, _, last = name.rpartition("/")

    def write(module: Any) -> None:
        variable = getattr(module, last)
        values = change(np.array(variable[...]))
        assert values.shape == variable[...].shape
        variable[...] = jnp.asarray(values)

    return Planted("jax", path, write)


def stale(scale: float = 0.02) -> Change:
    """Values of a few steps ago: each moved by a little."""

    def change(values: np.ndarray) -> np.ndarray:
        noise = np.random.default_rng(5).standard_normal(values.shape)
        return (values + scale * noise).astype(values.dtype)

    return change


def rolled(axis: int, by: int = 1) -> Change:
    """Everything moved along an axis, the end to the start."""
    return lambda values: np.roll(values, by, axis)


def doubled_gradient(side: Side, path: str) -> Planted:
    """A custom gradient that is wrong by a factor of two; the output is an array, or an array and more."""

    def twice(y: Any) -> Any:
        still = y.detach() if side == "torch" else jax.lax.stop_gradient(y)
        return y + (y - still)

    def wrong(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return (twice(output[0]), *output[1:]) if isinstance(output, tuple) else twice(output)

    return call(side, path, wrong)


def stopped_input(side: Side, path: str) -> Planted:
    """No gradient flows into the first input of a module."""

    def wrong(module: Any, original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
        return original(x.detach() if side == "torch" else jax.lax.stop_gradient(x), *args, **kwargs)

    return call(side, path, wrong)
