"""One run of one model as NumPy arrays: the calls of its modules, its loss and its gradients.

Both sides, ``TorchSide`` and ``JaxSide``, return the same records, and all comparing code uses only these::

    record(batch, "float32")    Recording
                                  calls[k]   path "model.layers.0.mlp", number 0; inputs "0"; outputs ""; gradients ""
                                  loss, parameter gradients by name
    rerun("float64", "model.layers.0.mlp", 0, inputs={"0": x})
                                Rerun        the same module alone, on other inputs

A leaf of a call is an array anywhere in its arguments or its output, named by its place: positional arguments by
number, others by name, and parts of tuples, lists, dicts and dataclasses below them joined by dots
(``"hidden_states"``, ``"1.0"``, ``"past.key"``). An output that is one array has the name ``""``. ``None``, text and
plain numbers are not leaves: they stay the same in every rerun.

``tap`` marks a value inside a model, which is then compared like a module's output. A model without a loss gets a
probe: the sum of each output leaf times fixed numbers. Two models may name their outputs and order their axes
differently, so the numbers are made for torch's leaves and laid out like the arrays that they multiply.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from bridge.core.dtype_names import FLOATING, full_name

Leaves = Mapping[str, np.ndarray]
"""Arrays of a call by their place in its arguments or its output."""


def checked_dtype(dtype: str, steps: int) -> str:
    """The full name of ``dtype``. ValueError unless it can be tested, as float64 cannot, or for ``steps`` below 0."""
    dtype = full_name(dtype, FLOATING)
    if dtype not in FLOATING or dtype == "float64":
        choices = ", ".join(name for name in FLOATING if name != "float64")
        raise ValueError(f"dtype: expected one of {choices}, got {dtype!r}")
    if steps < 0:
        raise ValueError(f"steps: expected 0 or more, got {steps}")
    return dtype


_HEADS = ("num_heads", "n_heads", "n_head", "nhead", "heads", "num_attention_heads", "num_query_heads")
_HEAD_SIZES = ("head_dim", "head_size", "d_head", "dim_head", "attention_head_size", "d_kv")
Heads = tuple[tuple[int, ...], tuple[int, ...]]
"""Numbers of heads of an attention, and head sizes."""


def heads_of(module: Any) -> Heads:
    """What a module, or its ``config``, says about its heads."""
    owners = [vars(part) for part in (module, getattr(module, "config", None)) if hasattr(part, "__dict__")]
    numbers, sizes = (
        tuple(
            dict.fromkeys(
                owner[name]
                for owner in owners
                for name in names
                if isinstance(owner.get(name), int) and owner[name] > 0
            )
        )
        for names in (_HEADS, _HEAD_SIZES)
    )
    return numbers, sizes


@dataclass(frozen=True)
class Call:
    """One call of a module.

    ``path``: the module, in its framework's own notation (``"model.layers.0"``, ``"layers/0"``; the root is ``""``).
    ``number``: how often the module was called before in the same run. ``parent``: index in ``Recording.calls`` of the
    call around it, or None for the root's. ``gradients``: of the loss, by output leaf; only floating leaves that the
    loss depends on, and none without a backward. ``heads``: see ``heads_of``.
    """

    path: str
    number: int
    kind: str
    inputs: Leaves
    outputs: Leaves
    gradients: Leaves = field(default_factory=dict)
    parent: int | None = None
    heads: Heads = ((), ())


@dataclass(frozen=True)
class Recording:
    """One run of the whole model.

    ``calls``: in the order in which the calls began. ``loss``: as float64; None without a loss. ``gradients``: of the
    loss, by parameter name; zeros for parameters that the loss does not depend on. ``dtype``: of the run. ``buffers``:
    their values after the forward.
    """

    dtype: str
    calls: Sequence[Call]
    loss: float | None
    gradients: Leaves = field(default_factory=dict)
    buffers: Leaves = field(default_factory=dict)

    def find(self, path: str, number: int = 0) -> Call | None:
        """The call of ``path`` with this number."""
        return self._by_call.get((path, number))

    @cached_property
    def _by_call(self) -> dict[tuple[str, int], Call]:
        return {(call.path, call.number): call for call in self.calls}


@dataclass(frozen=True)
class Rerun:
    """One module alone, on given inputs.

    ``calls``: of modules inside, in the order in which they began; ``parent`` is an index in this list, which does not
    contain the module's own call. ``input_gradients``: by input leaf; ``gradients``: by full parameter name. Both are
    empty without cotangents.
    """

    outputs: Leaves
    calls: Sequence[Call] = ()
    input_gradients: Leaves = field(default_factory=dict)
    gradients: Leaves = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """``steps`` of an optimizer: losses before each step; weights and buffers after the first and after the last.

    ``between``: buffers after each of the other steps.
    """

    losses: tuple[float, ...]
    first: Leaves
    last: Leaves
    between: tuple[Leaves, ...] = ()


Replacements = Mapping[tuple[str, int], Leaves]
"""Outputs that calls inside of a rerun return instead of their own, by path and number."""


class Side(Protocol):
    """One model with its loss. Runs never change the model: weights, buffers and modes are restored after each run.

    ``framework``: "torch" or "jax". ``separator``: between the parts of a path, "." or "/".
    """

    @property
    def framework(self) -> str: ...

    @property
    def separator(self) -> str: ...

    def weights(self) -> dict[str, np.ndarray]:
        """Parameters by path, in their own dtype; a parameter with two names appears once, under the first."""

    def buffers(self) -> dict[str, np.ndarray]:
        """State that no gradient changes, by path, in its own dtype: running statistics, counters, tables.

        No name is also a parameter's name.
        """

    @property
    def left_out(self) -> Sequence[str]:
        """State that cannot be compared, such as random state: a phrase for each kind."""

    def load(self, weights: Leaves) -> None:
        """Set all parameters and the given buffers.

        ``ValueError`` names missing parameters, and names that are unexpected or have another shape.
        """

    def record(self, batch: Any, dtype: str = "float32", *, backward: bool = True) -> Recording:
        """Run the model, its loss and, if requested, its backward with all parameters in ``dtype``.

        In float64 everything is computed in float64, as far as the model lets this be changed from outside.
        """

    def in_order(self, batch: Any, rows: Sequence[int], dtype: str = "float32") -> Recording:
        """Loss and gradients of a batch with its rows in the order ``rows``, as ``record`` returns them; no calls.

        The state of ``rerun`` stays.
        """

    def rerun(
        self,
        dtype: str,
        path: str,
        number: int,
        inputs: Leaves,
        *,
        cotangents: Leaves | None = None,
        replaced: Replacements | None = None,
    ) -> Rerun:
        """Call one module again, as the last ``record`` in ``dtype`` called it, but with these input leaves.

        Other input leaves keep the recorded values. ``cotangents``: by output leaf, zeros for missing ones; with
        cotangents, the module's backward runs. ``KeyError`` for a call that was not recorded.
        """

    def forget(self) -> None:
        """Free what ``rerun`` needs: the recorded calls and the copies of the model."""

    def train(self, batches: Sequence[Any], dtype: str = "float32") -> Training:
        """Train a copy of the model, one step for each batch, with the side's optimizer."""


T = TypeVar("T")


_listener: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("twinshard_tap", default=None)


def tap(name: str, value: T) -> T:
    """Return ``value``, and record it as the output of a call with path ``name`` and no inputs.

    Outside a recorded run this is the identity. ``value``: an array, or tuples, lists, dicts and dataclasses of
    arrays. A function of parameters has no modules: only taps let ``twinshard parity`` compare values inside it.
    """
    listener = _listener.get()
    return value if listener is None else cast(T, listener(name, value))


@contextmanager
def listening(listener: Callable[[str, Any], Any]) -> Iterator[None]:
    """While this context is open, ``tap(name, value)`` calls ``listener(name, value)``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def call_model(model: Callable[..., Any], batch: Any) -> Any:
    """The model's output for a batch that is its only argument, its arguments (tuple, list) or its keywords (dict)."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def probe_values(where: str, shape: Sequence[int]) -> np.ndarray:
    """Standard normal float64 numbers of ``shape`` for the output leaf at place ``where``."""
    return np.random.default_rng(zlib.crc32(where.encode())).standard_normal(tuple(shape))


def in_order(loss: Callable[..., Any], rows: Sequence[int], probe: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of a batch whose rows were reordered to ``rows``: a probe's numbers move with their rows."""
    return partial(loss, rows=rows) if getattr(loss, "func", loss) is probe else loss


def in_rows(numbers: np.ndarray, rows: Sequence[int] | None) -> np.ndarray:
    """Numbers for the outputs of a batch with its rows in the order ``rows``; None for the existing order.

    The axis of rows is the first one of this length; numbers without such an axis stay unchanged.
    """
    axes = [] if rows is None else [axis for axis, size in enumerate(numbers.shape) if size == len(rows)]
    return np.take(numbers, np.asarray(rows), axes[0]) if axes else numbers
