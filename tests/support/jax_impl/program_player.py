"""Run random programs sharded, and as a reference on one device with plain JAX, optax and the whole batch."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_impl import (
    TrainState,
    data_parallel_mesh,
    fully_shard,
    init_state,
    load_checkpoint,
    make_eval_step,
    make_train_step,
    pad_batch,
    save_checkpoint,
    save_checkpoint_async,
    shard_weights,
    unshard,
)
from tests.support.jax_impl.async_jobs import held_back
from tests.support.jax_impl.random_programs import (
    MADE_OPTIMIZERS,
    Program,
    Stop,
    World,
    draw,
    loss,
    make_model,
    outputs,
)
from tests.support.jax_impl.zoo import by_path

ROWS = 72  # 1 to 4 devices and 1 to 3 microbatches divide it
Values = dict[str, np.ndarray]


def _taken_apart(model: Any) -> tuple[Values, Callable[[Values], Any]]:
    """A model's parameters by path, and what makes the model of others."""
    if not isinstance(model, nnx.Module):
        structure = jax.tree.structure(model)
        return by_path(model), lambda values: jax.tree.unflatten(structure, list(values.values()))
    graphdef, parameters, others = nnx.split(model, nnx.Param, ...)
    structure = jax.tree.structure(parameters)
    paths = ["/".join(map(str, key)) for key, _ in nnx.to_flat_state(parameters)]

    def merge(values: Values) -> Any:
        # Make a new model, because each trace may change only its own.
        own = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), others)
        return nnx.merge(graphdef, jax.tree.unflatten(structure, [values[path] for path in paths]), own)

    return dict(zip(paths, jax.tree.leaves(parameters), strict=True)), merge


def _norm(gradients: Values) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in gradients.values()))


class Reference:
    """The same program on one device: ``values`` are all weights, of which the ``trained`` ones have moments."""

    def __init__(self, program: Program) -> None:
        abstract, self.merge = _taken_apart(make_model(program))
        rng = np.random.default_rng(0)
        self.values = {
            path: rng.normal(0, 0.6, np.shape(x)).astype(program.dtype) for path, x in abstract.items()
        }
        paths = sorted(abstract)
        self.frozen, self.replicated = (
            [] if number is None else [paths[number % len(paths)]]
            for number in (program.frozen, program.replicated)
        )
        self._optimizer = MADE_OPTIMIZERS[program.optimizer][1]
        self.opt_state: Any = self._optimizer.init(self.trained(self.values))
        self.seen = np.zeros(program.widths[0])
        dtype = program.precision.get("param_dtype", program.dtype)

        def model(trained: Values, frozen: Values) -> Any:
            values = {**frozen, **{path: leaf.astype(dtype) for path, leaf in trained.items()}}
            return self.merge({path: values[path] for path in abstract})

        def value(trained: Values, frozen: Values, batch: Any) -> jax.Array:
            mean = loss(program, model(trained, frozen), batch)
            return mean[0] / mean[1] if program.weighted else mean

        def update(gradients: Values, opt_state: Any, trained: Values) -> tuple[Values, Any, jax.Array]:
            updates, opt_state = self._optimizer.update(gradients, opt_state, trained)
            return optax.apply_updates(trained, updates), opt_state, _norm(gradients)

        self._gradients, self._update = jax.jit(jax.value_and_grad(value)), jax.jit(update)
        self._outputs = jax.jit(lambda trained, frozen, x: outputs(program, model(trained, frozen), x))

    def trained(self, values: Values) -> Values:
        return {path: value for path, value in values.items() if path not in self.frozen}

    def _weights(self) -> tuple[Values, Values]:
        return self.trained(self.values), {path: self.values[path] for path in self.frozen}

    def outputs(self, x: np.ndarray) -> jax.Array:
        return self._outputs(*self._weights(), x)

    def gradients(self, batch: Any) -> tuple[Any, Values]:
        return self._gradients(*self._weights(), batch)

    def step(self, batch: Any) -> dict[str, Any]:
        value, gradients = self.gradients(batch)
        trained, self.opt_state, norm = self._update(gradients, self.opt_state, self.trained(self.values))
        self.values = {**self.values, **trained}
        self.seen = self.seen + batch[0].sum(0)
        return {"loss": value, "grad_norm": norm}


def _copied(tree: Any, factor: float = 1) -> Any:
    """Other arrays with the values of ``tree``'s, or ``factor`` times those, that lie as they do."""
    return jax.tree.map(
        lambda leaf: jax.device_put((np.asarray(leaf) * factor).astype(leaf.dtype), leaf.sharding), tree
    )


class Player:
    """Plays a program's operations on the sharded model and on the reference, and compares what comes of each.

    ``state`` is the sharded one. ``tolerance``: of float64, for the order of sums; of what rounds to float32, for the
    rounding of gradients and of weights whose last bits differ by then, over some twenty steps.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._reference = Reference(program)
        self._tolerance = 1e-9 if program.dtype == "float64" and not program.precision else 2e-4
        self._optimizer = MADE_OPTIMIZERS[program.optimizer][0]
        self._batches = 0
        weights = self._enter(program.worlds[0])
        self.state: TrainState = init_state(self._plan, weights, self._optimizer)

    def _enter(self, world: World) -> dict[str, jax.Array]:
        program, reference = self._program, self._reference
        model = reference.merge(reference.values)
        axes = ("outer", "inner")[-len(world.mesh) :]
        self._plan, weights = fully_shard(
            model,
            data_parallel_mesh(dict(zip(axes, world.mesh, strict=True))),
            units=["layers_*", "head"] if program.form == "linen" else ["layers/*", "head"],
            stacked=["layers"] if program.wrap == "scan" else [],
            strategy=world.strategy,
            engine=world.engine,
            recompute=world.recompute,
            prefetch=world.prefetch,
            frozen=reference.frozen,
            replicated=reference.replicated,
            variables={"seen": "sum"} if program.form == "nnx" else {},
            **program.precision,
        )
        self._donates = world.donate
        self._step = cache(partial(self._make_step, partial(loss, program)))
        self._evaluate = make_eval_step(self._plan, partial(loss, program), mutable=False)
        self._predict = make_eval_step(
            self._plan, lambda model, batch: outputs(program, model, batch), mutable=False
        )
        self._remembered: tuple[TrainState, dict[str, Any]] | None = None
        return weights

    def _make_step(self, loss_fn: Callable[..., Any], parts: int) -> Any:
        return make_train_step(
            self._plan,
            loss_fn,
            self._optimizer,
            microbatches=parts,
            donate=self._donates,
            metrics=["grad_norm"],
        )

    def _batch(self, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, targets and weights that all differ."""
        self._batches += 1
        rng = np.random.default_rng(self._batches)
        widths, dtype = self._program.widths, self._program.dtype
        x, target = (rng.normal(size=(rows, width)).astype(dtype) for width in (widths[0], widths[3]))
        return x, target, rng.uniform(0.1, 1, rows).astype(dtype)

    # Comparisons.

    def _whole(self, buffers: Any) -> Values:
        return {path: np.asarray(value) for path, value in unshard(self._plan, buffers).items()}

    def _moments(self) -> list[Values]:
        """Those that optimizers keep, by parameter: in arrays of the plan, or in the model's own tree."""
        keys, paths = self._plan.trainable, set(self._reference.trained(self._reference.values))

        def is_flat(tree: Any) -> bool:
            return tree.keys() == keys and all(isinstance(leaf, jax.Array) for leaf in tree.values())

        def is_moments(tree: Any) -> bool:
            return isinstance(tree, dict) and (is_flat(tree) or set(by_path(tree)) == paths)

        trees = [
            tree for tree in jax.tree.leaves(self.state.opt_state, is_leaf=is_moments) if is_moments(tree)
        ]
        return [
            self._whole(tree) if is_flat(tree) else by_path(jax.tree.map(np.asarray, tree)) for tree in trees
        ]

    def _close(self, actual: Any, expected: Any, what: str) -> None:
        # Relative to the largest value of a tensor, because single values may be remainders of differences.
        scale = float(np.nan_to_num(np.abs(expected)).max(initial=1e-3))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=self._tolerance * scale, err_msg=what)

    def _close_trees(self, actual: Values, expected: Values, what: str) -> None:
        assert sorted(actual) == sorted(expected), what
        for path, value in expected.items():
            self._close(actual[path], value, f"{what} {path}")

    def _compare(self, what: str) -> None:
        reference = self._reference
        self._close_trees(self._whole(self.state.weights), reference.values, f"weights after {what}")
        for path in reference.frozen:
            np.testing.assert_array_equal(self._whole(self.state.weights)[path], reference.values[path])
        paths = reference.trained(reference.values).keys()
        leaves = jax.tree.leaves(reference.opt_state, is_leaf=lambda tree: isinstance(tree, dict))
        expected = [tree for tree in leaves if isinstance(tree, dict) and tree.keys() == paths]
        for actual, moments in zip(self._moments(), expected, strict=True):
            self._close_trees(actual, moments, f"moments after {what}")
        for value in self.state.variables.values():
            self._close(value, reference.seen, f"the sum of rows after {what}")

    def _bits(self, state: TrainState | None = None) -> list[bytes]:
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state or self.state)]

    # Operations.

    def step(self, parts: int, batch: Any = None, padded: Any = None) -> None:
        batch = self._batch() if batch is None else batch
        before, kept = self.state, None if self._donates else self._bits()
        self.state, metrics = self._step(parts)(before, batch if padded is None else padded)
        assert kept is None or kept == self._bits(before), "a step without donation changed its argument"
        for name, value in self._reference.step(batch).items():
            self._close(metrics[name], value, name)

    def other_rows(self, parts: int) -> None:
        self.step(parts, self._batch(2 * ROWS))

    def padded(self, parts: int) -> None:
        """The last batch of an epoch. Rows that ``pad_batch`` adds have no weight."""
        real = ROWS - 5
        batch = tuple(leaf[:real] for leaf in self._batch())
        (x, target, weight), counted = pad_batch(self._plan, batch, parts, rows=ROWS)
        # The model sees added rows, so the sum of all rows has them.
        added = np.pad(batch[1], ((0, 5), (0, 0)))
        self.step(
            parts, (x, added, np.pad(batch[2], (0, 5))), (x, target, (weight * counted).astype(weight.dtype))
        )

    def not_finite(self, parts: int) -> None:
        batch = self._batch()
        batch[1][ROWS // 2] = np.nan
        self.step(parts, batch)

    def in_one_program(self, parts: int) -> None:
        batch = self._batch()
        # A step inside another program waits for nothing, but steps on simulated devices must wait.
        self.state, metrics = jax.block_until_ready(jax.jit(self._step(parts))(self.state, batch))
        self._close(metrics["loss"], self._reference.step(batch)["loss"], "loss")

    def twice(self, parts: int) -> None:
        """A step from a copy of the state has the bits of the step from the state."""
        batch = self._batch()
        after, _ = self._step(parts)(_copied(self.state), batch)
        self._batches -= 1
        self.step(parts)
        assert self._bits(after) == self._bits()

    def gradients(self, parts: int) -> None:
        batch = self._batch()
        value, gradients = self._step(parts).gradients(self.state.weights, batch, self.state.variables)
        expected, whole = self._reference.gradients(batch)
        self._close(value, expected, "loss")
        self._close_trees(self._whole(gradients), whole, "gradients")

    def evaluate(self) -> None:
        batch = self._batch()
        self._close(
            self._evaluate(self.state, batch)["loss"], self._reference.gradients(batch)[0], "evaluated loss"
        )

    def predict(self, rows: int) -> None:
        x = self._batch()[0]
        expected = np.asarray(self._reference.outputs(x))[:rows]
        self._close(self._predict(self.state, x[:rows]), expected, "outputs")

    def raises(self, call: int) -> None:
        """A loss raises inside a layer while it is traced. The state survives."""
        calls = iter(range(call % (1 if self._program.wrap == "scan" else len(self._program.calls))))

        def between(x: jax.Array) -> jax.Array:
            if next(calls, None) is None:
                raise Stop
            return x

        step = self._make_step(partial(loss, self._program, between=between), 1)
        with contextlib.suppress(Stop):
            step(self.state, self._batch())
            raise AssertionError("the loss did not raise")

    def write(self, how: str, number: int) -> None:
        values = self._reference.values
        if how == "scaled":
            values = {path: value * 0.9 for path, value in values.items()}
            weights = _copied(self.state.weights, 0.9)
        else:
            path = sorted(values)[number % len(values)]
            if how == "one":
                whole = self._whole(self.state.weights)
                weights = shard_weights(self._plan, {**whole, path: whole[path] + 0.25})
                values = {**values, path: values[path] + values[path].dtype.type(0.25)}
            else:
                values = {name: np.roll(value, 1, -1) for name, value in values.items()}
                weights = shard_weights(self._plan, values)
        self._reference.values = values
        self.state = dataclasses.replace(self.state, weights=weights)

    def rate(self, factor: float) -> None:
        def changed(opt_state: Any) -> Any:
            rates = opt_state.hyperparams
            return opt_state._replace(hyperparams={**rates, "learning_rate": rates["learning_rate"] * factor})

        self.state = dataclasses.replace(self.state, opt_state=changed(self.state.opt_state))
        self._reference.opt_state = changed(self._reference.opt_state)

    def recall(self) -> None:
        """Return to a copy of the state. The first call makes the copy."""
        if self._remembered is None:
            self._remembered = _copied(self.state), dict(vars(self._reference))
        else:
            self.state = _copied(self._remembered[0])
            vars(self._reference).update(self._remembered[1])

    def save_and_load(self, parts: int, world: int, asynchronous: bool) -> None:
        """Save and load give the same bits in either world, even if the state is donated during the save."""
        weights, moments = self._whole(self.state.weights), self._moments()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved"
            if asynchronous:
                with held_back() as release:
                    saving = save_checkpoint_async(path, self._plan, self.state)
                    self._step(parts)(self.state, self._batch())
                    release()
                    saving.wait()
            else:
                save_checkpoint(path, self._plan, self.state)
            if world:
                self._enter(self._program.worlds[world])
            self.state = load_checkpoint(path, self._plan, self._optimizer).state
        loaded = [self._whole(self.state.weights), *self._moments()]
        for actual, expected in zip(loaded, [weights, *moments], strict=True):
            for name, value in expected.items():
                np.testing.assert_array_equal(actual[name], value, err_msg=name)


def play(seed: int) -> None:
    """Play a seed's program, and compare after each operation."""
    program = draw(seed)
    with jax.enable_x64(True):
        player = Player(program)
        for number, (name, *arguments) in enumerate(program.ops):
            try:
                getattr(player, name)(*arguments)
                player._compare(name)
            except Exception as error:
                raise AssertionError(f"seed {seed}, operation {number}, {name}: {program}") from error
