"""A JAX model with its loss, as ``recording.Side`` describes it.

Runs are eager: ``jit``, ``lax.scan``, ``nnx.scan`` and checkpoints created during the run are executed as Python, so
that every module call is recorded with its values. Calls inside ``vmap``, ``while_loop`` and functions that were
checkpointed before the run have no values: only the module around them is recorded.

A scanned stack of layers has parameters ``layers/mlp/kernel [L, ...]``, and so does ``Recording.gradients``. The calls
are recorded per layer, ``layers/0/mlp``, and ``Rerun.gradients`` belong to one layer, ``layers/0/mlp/kernel [...]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

from bridge.core.dtype_names import FLOATING
from bridge.parity.jax.leaves import Frozen, describe, is_floating, leaves, merge_leaves, to_numpy
from bridge.parity.jax.losses import Loss, as_batch, as_loss, probe
from bridge.parity.jax.nnx import NnxInstance, NnxModel
from bridge.parity.jax.recorder import Arguments, CallReplay, Entry, Recorder, argument_tree, map_arguments
from bridge.parity.jax.run_in_dtype import settings
from bridge.parity.jax.tree_models import FunctionInstance, FunctionModel, LinenInstance, LinenModel
from bridge.parity.recorded.recording import Leaves, Recording, Replacements, Rerun, Training, in_order
from bridge.parity.recorded.store import Store, Stored

_LARGE = 2**28
"""Bytes of weights above which saving memory is worth the time to compile operations again."""


Adapter = NnxModel | LinenModel | FunctionModel
"""One kind of model. ``load`` gets checked names and shapes; ``instance`` is called within the run's settings."""
Instance = NnxInstance | LinenInstance | FunctionInstance
"""A copy for one run. ``tree``: parameters and everything without a gradient, in the model's structure.

``state``: a pytree of everything else that changes. ``run``: ``loss(model)``, and the state after it.
"""


def adapter_of(model: Any) -> Adapter:
    """The adapter that runs ``model``. Raises ``TypeError`` unless it is one of the three kinds of models."""
    if isinstance(model, nnx.Module):
        return NnxModel(model)
    if isinstance(model, tuple) and len(model) == 2:
        first, second = model
        if isinstance(first, linen.Module):
            return LinenModel(first, second)
        if callable(first):
            return FunctionModel(first, second)
    raise TypeError(
        "model: expected an nnx module, (linen module, variables) or (function, parameters), "
        f"got {type(model).__name__}"
    )


class JaxSide:
    """``model``: an nnx module; (linen module, variables); or (function, parameters), called (parameters, *batch).

    ``loss``: a function (model, batch) -> scalar, which gets linen modules and functions as a callable with the
    batch's signature; ``"next_token"`` for tokens ``[B, T + 1]``; or ``"probe"``, the default: fixed random
    projections of every floating output. ``optimizer``: for ``train``, an optax transformation; AdamW by default.

    Raises ``TypeError`` for other models and ``ValueError`` for models without parameters.
    """

    framework = "jax"
    separator = "/"

    @property
    def left_out(self) -> Sequence[str]:
        return self._model.left_out

    def __init__(
        self,
        model: Any,
        loss: Loss | str | None = None,
        *,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        self._model = adapter_of(model)
        self._loss = as_loss(loss)
        self._optimizer = optimizer or optax.adamw(1e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01)
        self._entries: dict[str, dict[tuple[str, int], Entry]] = {}
        self._held: frozenset[str] = frozenset()
        self._python = [*self._model.python_modules, getattr(loss, "__module__", "")]
        if not self._model.weights():
            raise ValueError("model: expected parameters, found none")

    def weights(self) -> dict[str, np.ndarray]:
        """Whole arrays, even if their shards are on several devices."""
        return _values(self._model.weights())

    def hold(self, names: Iterable[str]) -> None:
        """Keep these leaves of a function's parameters constant in training: the other model has them as buffers."""
        if isinstance(self._model, FunctionModel):
            self._held = frozenset(names)

    def buffers(self) -> dict[str, np.ndarray]:
        """Arrays of the model that are not parameters: see the models' ``buffers``."""
        return _values(self._model.buffers())

    def load(self, weights: Leaves) -> None:
        """Load each array in its own dtype and onto its own devices."""
        parameters = self._model.weights()
        own = {**parameters, **self._model.buffers()}
        wrong = [f"{path}: missing" for path in parameters if path not in weights]
        wrong += [f"{path}: unexpected" for path in weights if path not in own]
        wrong += [
            f"{path}: expected shape {list(own[path].shape)}, got {list(weights[path].shape)}"
            for path in own
            if path in weights and tuple(own[path].shape) != tuple(weights[path].shape)
        ]
        if wrong:
            raise ValueError("weights do not fit the model: " + "; ".join(wrong))
        self._model.load({path: _like(weights[path], old) for path, old in own.items() if path in weights})

    def record(self, batch: Any, dtype: str = "float32", *, backward: bool = True) -> Recording:
        """``ValueError`` if the model or its loss refuses the batch, and for a loss that is not a scalar."""
        with settings(_checked(dtype), self._python):
            instance = self._model.instance(dtype)
            inputs = as_batch(batch, dtype)
            recorders: list[Recorder] = []
            store = Store()

            def run(parameters: Mapping[str, Any], token: Any) -> Any:
                recorders.append(Recorder(token, store=store))
                return self._scalar(instance, parameters, inputs, recorders[-1])

            if backward:
                # The backward also differentiates by this number, so that it reaches outputs that do
                # not depend on parameters.
                token = jnp.zeros((), jnp.float32)
                (value, state), (gradients, _) = jax.value_and_grad(run, (0, 1), has_aux=True)(
                    instance.parameters, token
                )
            else:
                (value, state), gradients = run(instance.parameters, None), {}
            recorder = recorders[-1]
            self._entries[dtype] = {
                (entry.path, entry.number): entry
                for entry in recorder.entries
                if entry.outputs is not None and entry.replay is not None
            }
            stored = _stored(gradients, store)
            known: dict[int, tuple[Any, Any]] = {}
            for entry in self._entries[dtype].values():
                assert entry.replay is not None
                entry.replay.shelve(store, known)
            buffers = _stored(instance.buffers(state), store)
            return Recording(dtype, recorder.calls(), float(value), stored, buffers)

    def in_order(self, batch: Any, rows: Sequence[int], dtype: str = "float32") -> Recording:
        """See ``Side``."""
        with settings(_checked(dtype), self._python):
            instance = self._model.instance(dtype)
            inputs, loss = as_batch(batch, dtype), in_order(self._loss, rows, probe)

            def run(parameters: Mapping[str, Any]) -> Any:
                return self._scalar(instance, parameters, inputs, None, loss=loss)[0]

            value, gradients = jax.value_and_grad(run)(instance.parameters)
            stored = _stored(gradients, Store())
        return Recording(dtype, [], float(value), stored)

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
        """Call numbers in ``replaced`` and in the result count from 0 within this rerun.

        ``KeyError`` for a call that was not recorded, for a tap, and for leaves that the call does not have.
        """
        entry = self._entries.get(dtype, {}).get((path, number))
        if entry is None or entry.replay is None:
            raise KeyError(f"no call {number} of module {path!r} was recorded in {dtype}")
        _known(path, "input", inputs, entry.inputs)
        with settings(dtype, self._python):
            replay = entry.replay.load_weights()
            arguments = _arguments_with(entry.arguments, inputs)
            if cotangents is None:
                recorder = Recorder(None, replaced)
                output = replay(replay.parameters, _thaw(arguments), recorder)
                return Rerun(to_numpy(output), recorder.calls(first=1))
            return _backward(path, replay, arguments, cotangents, replaced)

    def forget(self) -> None:
        """Free the calls and modules that ``rerun`` needs; for a large model also JAX's compiled operations."""
        self._entries.clear()
        # An eager run compiles each operation for its shapes: 0.7 GB after two runs of GPT-2.
        if sum(array.nbytes for array in self._model.weights().values()) >= _LARGE:
            jax.clear_caches()

    def train(self, batches: Sequence[Any], dtype: str = "float32") -> Training:
        """Train a copy of the model, one compiled step for each batch, by the side's optimizer.

        Raises ``ValueError`` without batches.
        """
        if not batches:
            raise ValueError("train: expected at least one batch, got none")
        with settings(_checked(dtype), self._python, eager=False):
            instance = self._model.instance(dtype)

            # A step's results reuse the memory of its arguments: one copy of weights and moments, not two.
            @partial(jax.jit, donate_argnums=(0, 2))
            def step(parameters: Any, state: Any, moments: Any, batch: Any) -> Any:
                def loss(parameters: Any) -> Any:
                    return self._scalar(instance, parameters, batch, None, state)

                (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
                held = {path: parameters[path] for path in self._held}
                gradients, trained = (
                    {path: leaf for path, leaf in tree.items() if path not in held}
                    for tree in (gradients, parameters)
                )
                updates, moments = self._optimizer.update(gradients, moments, trained)
                return {**optax.apply_updates(trained, updates), **held}, state, moments, value

            # Copies, because the instance may share arrays with the model or hold one twice. It does not need its own.
            parameters = {path: jnp.array(array, copy=True) for path, array in instance.parameters.items()}
            instance.tree = merge_leaves(instance.tree, dict.fromkeys(instance.parameters, 0.0))
            instance.parameters, state = {}, instance.state
            trained = {path: array for path, array in parameters.items() if path not in self._held}
            moments = _unshared(self._optimizer.init(trained), parameters.values())
            losses: list[float] = []
            store = Store()
            reached: list[Leaves] = []
            for number, batch in enumerate(batches):
                parameters, state, moments, value = step(parameters, state, moments, as_batch(batch, dtype))
                losses.append(float(value))
                whole = parameters if number in (0, len(batches) - 1) else {}
                reached.append(_stored({**whole, **instance.buffers(state)}, store))
            return Training(tuple(losses), reached[0], reached[-1], tuple(reached[1:-1]))

    def _scalar(
        self,
        instance: Instance,
        parameters: Mapping[str, Any],
        batch: Any,
        recorder: Recorder | None,
        state: Any = None,
        loss: Loss | None = None,
    ) -> tuple[Any, Any]:
        """The loss, and the state after it."""
        chosen, state = loss or self._loss, instance.state if state is None else state
        try:
            value, state = instance.run(parameters, state, lambda model: chosen(model, batch), recorder)
        except Exception as error:
            raise ValueError(
                f"the model or its loss refuses the batch ({describe(batch)}): "
                f"{type(error).__name__}: {error}"
            ) from error
        shape = getattr(value, "shape", None)
        if shape != () or not is_floating(value):
            got = type(value).__name__ if shape is None else f"{value.dtype}{list(shape)}"
            raise ValueError(f"loss: expected a floating scalar, got {got}")
        return value, state


def _unshared(tree: Any, others: Iterable[Any]) -> Any:
    """A pytree without repeated arrays and without arrays of ``others``: copies replace them.

    An optimizer's state may contain the weights themselves.
    """
    known = {id(array) for array in others}

    def own(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        if id(x) in known:
            x = x.copy()
        known.add(id(x))
        return x

    return jax.tree.map(own, tree)


def _values(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {path: np.asarray(array) for path, array in arrays.items()}


def _stored(arrays: Mapping[str, Any], store: Store) -> Leaves:
    leaves = store.leaves()
    for path, array in arrays.items():
        leaves[path] = np.asarray(array)
    return leaves


def _backward(
    path: str, replay: CallReplay, arguments: Arguments, cotangents: Leaves, replaced: Replacements | None
) -> Rerun:
    recorders: list[Recorder] = []
    outputs: dict[str, np.ndarray] = {}
    floating = {where: x for where, x in leaves(argument_tree(arguments)).items() if is_floating(x)}

    def run(parameters: Mapping[str, Any], floating: Mapping[str, Any], token: Any) -> Any:
        recorders.append(Recorder(token, replaced))
        output = replay(parameters, _thaw(_arguments_with(arguments, floating)), recorders[-1])
        outputs.update(to_numpy(output))
        return {where: leaf for where, leaf in leaves(output).items() if is_floating(leaf)}

    outputs_by_place, pull = jax.vjp(run, dict(replay.parameters), floating, jnp.zeros((), jnp.float32))
    _known(path, "output", cotangents, outputs_by_place)
    given = {
        where: jnp.asarray(cotangents.get(where, np.zeros(leaf.shape)), leaf.dtype)
        for where, leaf in outputs_by_place.items()
    }
    gradients, input_gradients, _ = pull(given)
    return Rerun(outputs, recorders[-1].calls(first=1), _values(input_gradients), _values(gradients))


def _arguments_with(arguments: Arguments, replacements: Mapping[str, Any]) -> Arguments:
    """Arguments with some leaves replaced, each in the dtype of the leaf that it replaces."""

    def leaf(where: str, array: Any) -> Any:
        if where in replacements:
            return jnp.asarray(replacements[where], array.dtype)
        return jnp.asarray(array.array()) if isinstance(array, Stored) else array

    return map_arguments(leaf, arguments, lambda node: node)


def _thaw(arguments: Arguments) -> Arguments:
    """Arguments with new modules and ``Rngs`` in place of the frozen ones, for one run."""
    return map_arguments(
        lambda _, array: array, arguments, lambda node: node.thaw() if isinstance(node, Frozen) else node
    )


def _known(path: str, what: str, asked: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise KeyError(f"module {path!r}: expected {what} leaves among {sorted(known)}, got {unknown}")


def _checked(dtype: str) -> str:
    if dtype not in FLOATING:
        raise ValueError(f"dtype: expected one of {', '.join(FLOATING)}, got {dtype!r}")
    return dtype


def _like(array: Any, old: Any) -> Any:
    """``array`` in the dtype of ``old``, on its devices."""
    new = np.asarray(array).astype(old.dtype)
    return jax.device_put(new, old.sharding) if isinstance(old, jax.Array) else new
