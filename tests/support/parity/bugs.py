"""Planted bugs: a fault in one module of one model of a fresh pair, with the right answer. ``bugs.toml`` lists them.

A row is ``[what, side, path, how, ..., answer]``: the fault, the model, the module, the method (one of ``HOWS``) with
its arguments, and the right answer, if that is not the torch module at ``path``::

    ["eps", "torch", "model.norm", "put", {eps = 1e-3}, {}]
    ["no mask", "jax", "layers/0/attention", "edit", [["causal=True", "causal=False"]], {module = "layers.0.attn"}]
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import torch

from tests.support.parity import wrong_code
from tests.support.parity.pair_tools import Pair
from tests.support.parity.pairs import FRESH

Side = Literal["torch", "jax"]
Texts = Sequence[Sequence[str]]
"""Old and new source text. Each old text must occur exactly once."""
_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Planted:
    """Changes one model of a pair, in place. ``path``: the module of that model in which the fault lies.

    ``change`` gets the module at ``path``, or the whole pair if ``of_pair``.
    """

    side: Side
    path: str
    change: Callable[[Any], None]
    of_pair: bool = False

    def __call__(self, pair: Pair) -> None:
        self.change(pair if self.of_pair else module_at(pair, self.side, self.path))


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


def module_at(pair: Pair, side: Side, path: str) -> Any:
    """A module by its path, of one of the two models; ``""`` is the whole model."""
    if side == "torch":
        return pair.torch_model.get_submodule(path)
    module: Any = pair.jax_model
    for part in path.split("/") if path else ():
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    return module


def _with_method(module: Any, name: str, function: Callable[..., Any]) -> None:
    """Give one module its own method, so that copies of the module keep it."""
    parent = type(module)
    make: Any = type(parent)
    changed = make(parent.__name__, (parent,), {name: function, "__module__": parent.__module__})
    object.__setattr__(module, "__class__", changed)


def _value(value: Any) -> Any:
    """A value of the table: ``"@name 1 2"`` is what ``wrong_code.name(1, 2)`` returns, and a list a tuple."""
    if isinstance(value, str) and value.startswith("@"):
        name, *numbers = value[1:].split()
        return getattr(wrong_code, name)(*map(float, numbers))
    return tuple(value) if isinstance(value, list) else value


def _weight_change(words: str) -> wrong_code.Change:
    """``"stale 0.1"`` is ``stale(0.1)``; a name alone is the change itself."""
    name, *numbers = words.split()
    change = getattr(wrong_code, name)
    if not numbers:
        return change
    return change(*(int(number) if number.lstrip("-").isdigit() else float(number) for number in numbers))


def _call_name(side: Side) -> str:
    return "forward" if side == "torch" else "__call__"


def edit(
    side: Side, path: str, changes: Texts, method: str = "", helpers: Mapping[str, str] | None = None
) -> Planted:
    """Other source text, or other helpers, in a method of a module: ``forward`` or ``__call__`` unless named."""
    name = method or _call_name(side)
    functions = {helper: getattr(wrong_code, name) for helper, name in (helpers or {}).items()}

    def change(module: Any) -> None:
        texts = ((old, new) for old, new in changes)
        _with_method(module, name, wrong_code.edited(getattr(type(module), name), *texts, **functions))

    return Planted(side, path, change)


def call(side: Side, path: str, wrong: str) -> Planted:
    """``wrong(module, original, *args, **kwargs)`` in place of a module's call."""
    name, function = _call_name(side), getattr(wrong_code, wrong)

    def change(module: Any) -> None:
        original = getattr(type(module), name)

        @functools.wraps(original)
        def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, functools.partial(original, self), *args, **kwargs)

        _with_method(module, name, replaced)

    return Planted(side, path, change)


def put(side: Side, path: str, values: Mapping[str, Any]) -> Planted:
    """Other values of attributes that a module has already."""

    def change(module: Any) -> None:
        for name, value in values.items():
            assert hasattr(module, name), f"expected an attribute {name} of {type(module).__name__}"
            setattr(module, name, _value(value))

    return Planted(side, path, change)


def config(side: Side, path: str, values: Mapping[str, Any]) -> Planted:
    """Another config of one module of a ``CausalLM``."""

    def change(module: Any) -> None:
        changed = {name: _value(value) for name, value in values.items()}
        module.config = dataclasses.replace(module.config, **changed)

    return Planted(side, path, change)


def weight(side: Side, path: str, name: str, words: str) -> Planted:
    """Other values of one tensor of a module; the change gets a copy of the old values."""
    change = _weight_change(words)

    def write(module: Any) -> None:
        tensor = getattr(module, name)
        if side == "torch":
            with torch.no_grad():
                tensor.copy_(torch.from_numpy(np.ascontiguousarray(change(tensor.detach().numpy().copy()))))
            return
        values = change(np.array(tensor[...]))
        assert values.shape == tensor[...].shape
        tensor[...] = jnp.asarray(values)

    return Planted(side, path, write)


def port_weight(side: Side, path: str, name: str, words: str) -> Planted:
    """The same of one array in the tree of a port that is a linen module or a function."""
    change = _weight_change(words)

    def write(pair: Pair) -> None:
        jax_model: Any = pair.jax_model
        at = jax_model[1].get("params", jax_model[1])
        for part in path.split("/"):
            at = at[part]
        at[name] = jnp.asarray(change(np.array(at[name])))

    return Planted(side, path, write, of_pair=True)


def port_text(side: Side, path: str, file: str, changes: Texts) -> Planted:
    """Other source text of the file of such a port, which has it under the name ``PORT``; the weights stay."""

    def rewrite(pair: Pair) -> None:
        text = (_FOLDER / file).read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, f"expected {old!r} once in {file}, found {text.count(old)}"
            text = text.replace(old, new)
        module: Any = types.ModuleType(f"rewritten_{Path(file).stem}")
        sys.modules[module.__name__] = module  # flax asks for the modules of its dataclasses
        exec(compile(text, file, "exec"), module.__dict__)
        jax_model: Any = pair.jax_model
        object.__setattr__(pair, "jax_model", (module.PORT, jax_model[1]))

    return Planted(side, path, rewrite, of_pair=True)


def change(side: Side, path: str, name: str) -> Planted:
    """Apply a function of ``wrong_code`` to the module."""
    return Planted(side, path, getattr(wrong_code, name))


HOWS: Mapping[str, Callable[..., Planted]] = {
    function.__name__: function
    for function in (edit, call, put, config, weight, port_weight, port_text, change)
}


def plant(side: Side, path: str, how: str, *what: Any) -> Planted:
    """The bug that a row describes."""
    return HOWS[how](side, path, *what)


def _bug(pair: str, row: Sequence[Any]) -> Bug:
    what, side, path, how, *arguments, answer = row
    answer = {"module": path, **answer} if side == "torch" else dict(answer)
    if answer.get("parameter", "").startswith("."):
        answer["parameter"] = answer["module"] + answer["parameter"]
    name = f"{pair}, {side}: {what}"
    return Bug(name, pair, side, plant(side, path, how, *arguments), **answer)


TABLE: Mapping[str, Any] = tomllib.loads((_FOLDER / "bugs.toml").read_text(encoding="utf-8"))
_BY_PAIR = {pair: tuple(_bug(pair, row) for row in rows) for pair, rows in TABLE["bugs"].items()}
BUGS: tuple[Bug, ...] = tuple(bug for pair, bugs in _BY_PAIR.items() if pair not in FRESH for bug in bugs)
FRESH_BUGS: tuple[Bug, ...] = tuple(bug for pair, bugs in _BY_PAIR.items() if pair in FRESH for bug in bugs)
"""Bugs in the pairs that were written after the thresholds were chosen."""
