"""What processes with JAX on a GPU run: training, host memory, float8 and checkpoints, each beside its reference."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
from flax import nnx

import jax_impl
from bridge.compiling.compiled_leg import allocated
from bridge.compiling.target_step import StepRequest
from bridge.planning import Workload, make_plan, parse_policy, resolve_models
from jax_impl.models import Decoder, DecoderConfig, next_token_loss
from tests.support.jax_impl.async_jobs import held_back

CONFIG = DecoderConfig(
    vocab_size=256, d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128, rope_theta=100
)
ADAMW = {"learning_rate": 1e-2, "b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.1}
"""A large eps keeps Adam from magnifying the rounding of sums where gradients are tiny."""
HOST_UPDATE = jax_impl.Offload(moments=1.0, main_weights=True, update="host")


def decoder(stacked: bool = False, config: DecoderConfig = CONFIG, **options: Any) -> Decoder:
    return Decoder(config, rngs=nnx.Rngs(1), stacked=stacked, **options)


def tokens(step: int, rows: int = 4, length: int = 17) -> np.ndarray:
    return np.random.default_rng(step).integers(0, CONFIG.vocab_size, (rows, length)).astype(np.int32)


def loss(model: Any, rows: jax.Array) -> jax.Array:
    return next_token_loss(model(rows[:, :-1]), rows[:, 1:])


def platform() -> tuple[str, str]:
    """Of the devices that JAX shows, and what they are called."""
    device = jax.devices()[0]
    return device.platform, device.device_kind


@dataclass
class Run:
    """A sharded run: ``step(state, rows)``."""

    plan: Any
    state: Any
    step: Callable[..., Any]
    optimizer: Any

    @staticmethod
    def of(
        optimizer: Any = None, offload: jax_impl.Offload | None = None, model: Any = None, **options: Any
    ) -> Run:
        optimizer = optimizer or jax_impl.main_weight_adamw(**ADAMW)
        model = decoder(bool(options.get("stacked"))) if model is None else model
        plan, weights = jax_impl.fully_shard(model, jax_impl.data_parallel_mesh(1), **options)
        state = jax_impl.init_state(plan, weights, optimizer, offload=offload)
        return Run(plan, state, jax_impl.make_train_step(plan, loss, optimizer), optimizer)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.state, metrics = self.step(self.state, tokens(step))
            losses.append(float(metrics["loss"]))
        return losses

    def arrays(self) -> list[np.ndarray]:
        """Every array of the state, as bytes: what has the same bits is equal.

        Copies: NumPy's view of a CPU's array would keep steps from taking the memory of the state.
        """
        return [np.array(x).reshape(-1).view(np.uint8) for x in jax.tree.leaves(self.state)]


@functools.cache
def plain_optax(steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses of a program without this package, and the weights after them."""
    optimizer = optax.adamw(**ADAMW)
    graphdef, weights = nnx.split(decoder())
    moments = optimizer.init(weights)

    @jax.jit
    def update(weights: Any, moments: Any, rows: jax.Array) -> Any:
        value, grads = jax.value_and_grad(lambda w: loss(nnx.merge(graphdef, w), rows))(weights)
        changes, moments = optimizer.update(grads, moments, weights)
        return optax.apply_updates(weights, changes), moments, value

    losses = []
    for step in range(steps):
        weights, moments, value = update(weights, moments, tokens(step))
        losses.append(float(value))
    return losses, {
        "/".join(map(str, path)): np.asarray(variable.get_value())
        for path, variable in nnx.to_flat_state(weights)
    }


def sharded(steps: int, options: dict[str, Any]) -> tuple[list[float], dict[str, np.ndarray]]:
    """The same by this package; ``options`` of ``fully_shard``."""
    run = Run.of(optax.adamw(**ADAMW), **options)
    losses = run.train(range(steps))
    weights = jax_impl.unshard(run.plan, run.state.weights)
    return losses, {path: np.asarray(value) for path, value in weights.items()}


def evaluated() -> tuple[float, float]:
    """The loss of a forward only, and that of the step with the same weights."""
    run = Run.of()
    evaluate = jax_impl.make_eval_step(run.plan, loss)
    forward = float(evaluate(run.state, tokens(0))["loss"])
    return forward, run.train(range(1))[0]


@functools.cache
def usual() -> list[float]:
    """Losses of the default run."""
    return Run.of().train(range(4))


def low_precision_moments(dtypes: tuple[str, str]) -> tuple[list[float], list[float], list[str]]:
    """Losses with moments stored so, and in float32; dtypes of the stored arrays of two dimensions or more."""
    run = Run.of(jax_impl.main_weight_adamw(**ADAMW, mu_dtype=dtypes[0], nu_dtype=dtypes[1]))
    losses = run.train(range(4))
    stored = [str(x.dtype) for x in jax.tree.leaves((run.state.opt_state.mu, run.state.opt_state.nu))]
    return losses, usual(), stored


# Memory of the host


def memory_kinds(tree: Any) -> list[str]:
    return sorted({str(x.sharding.memory_kind) for x in jax.tree.leaves(tree)})


def offloaded(offload: jax_impl.Offload, options: dict[str, Any]) -> dict[str, Any]:
    """Two runs, with and without offload: losses, arrays, and where the state of the first lies before and after."""
    plain, run = Run.of(**options), Run.of(offload=offload, **options)
    before = memory_kinds(run.state.weights), memory_kinds(run.state.opt_state)
    losses, expected = run.train(range(4)), plain.train(range(4))
    return {
        "losses": losses,
        "expected": expected,
        "before": before,
        "after": (memory_kinds(run.state.weights), memory_kinds(run.state.opt_state)),
        "arrays": run.arrays(),
        "expected arrays": plain.arrays(),
        "weights": [np.asarray(x) for x in jax.tree.leaves(run.state.weights)],
        "expected weights": [np.asarray(x) for x in jax.tree.leaves(plain.state.weights)],
    }


WIDE = DecoderConfig(
    vocab_size=1024, d_model=1024, n_layers=12, n_heads=8, n_kv_heads=8, head_dim=128, d_ff=2816
)


def peak() -> int:
    """Bytes of the device that this process has had at once so far."""
    stats = jax.devices()[0].memory_stats()
    return int(stats["peak_bytes_in_use"]) if stats else 0


def peaks_by_offload(offloads: list[jax_impl.Offload | None], config: DecoderConfig) -> tuple[list[int], int]:
    """The peak after two steps of each, in an order of which each needs more than the ones before; bytes of weights."""
    peaks, weights = [], 0
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    plan = jax_impl.plan_sharding(model, jax_impl.data_parallel_mesh(1))
    optimizer = jax_impl.main_weight_adamw(**ADAMW)
    for offload in offloads:
        # Straight into their memory: initial weights on the device would count.
        state = jax.tree.map(_zeros, jax_impl.abstract_state(plan, optimizer, offload=offload))
        weights = sum(x.nbytes for x in jax.tree.leaves(state.weights))
        step = jax_impl.make_train_step(plan, loss, optimizer)
        for number in range(2):
            state, metrics = step(state, tokens(number))
        metrics["loss"].block_until_ready()
        peaks.append(peak())
        del state, metrics, step
    return peaks, weights


# The peak of a step


@dataclass(frozen=True)
class Cell:
    """A step whose peak is planned: the decoder's name, sequences, tokens of each."""

    model: str
    batch: int
    length: int
    recompute: bool = False
    stacked: bool = False
    compute: str = "float32"

    @property
    def policy(self) -> Any:
        again = str(self.recompute).lower()
        return parse_policy(
            f'[precision]\ncompute = "{self.compute}"\nreduce = "float32"\n'
            f'[[unit]]\nmatch = "layers.*"\nstrategy = "optim_grads_params"\nrecompute = {again}\n'
            '[[unit]]\nmatch = ""\nstrategy = "optim_grads_params"\n',
            "fsdp",
        )


@dataclass(frozen=True)
class Peaks:
    """Bytes of a device at the peak of a step: as planned, as compiled, and as they were. ``moment``: of the plan."""

    planned: int
    compiled: int
    real: int
    moment: str


def peaks_of(cell: Cell) -> Peaks:
    """In a fresh process, whose peak is the step's."""
    stacks = ("layers",) if cell.stacked else ()
    workload = Workload(cell.batch, cell.length)
    (shapes,) = resolve_models(cell.model, ["jax"], stacks).values()
    planned = make_plan(shapes, cell.policy, 1, "jax", workload).peak

    request = StepRequest(cell.model, workload, stacks)
    policy = jax_impl.ShardingPolicy.parse(cell.policy.to_toml(), "fsdp")
    mesh = jax_impl.data_parallel_mesh(1)
    plan = jax_impl.plan_sharding(request.abstract_model(), mesh, policy, stacked=request.stacked)
    optimizer = request.optimizer.transformation()
    state = jax.tree.map(_zeros, jax_impl.abstract_state(plan, optimizer))
    step = jax_impl.make_train_step(plan, request.loss_function(), optimizer)
    shapes_of_rows = request.global_batch(plan)
    first, update = (
        allocated(lowered.compile())["total"] for lowered in step.lower_programs(state, shapes_of_rows)
    )
    moments = sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
    (rows,) = shapes_of_rows.values()
    for number in range(2):
        batch = np.random.default_rng(number).integers(0, 100, rows.shape).astype(np.int32)
        state, metrics = step(state, {"tokens": batch})
    metrics["loss"].block_until_ready()
    return Peaks(planned.total, max(first + moments, update), peak(), planned.moment)


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)


# Products and weights in float8


def float8_product(dtype: str, shape: tuple[int, int, int]) -> dict[str, Any]:
    """A product and the gradient of its input, beside those of rounded factors; and the compiled program."""
    rows, inputs, outputs = shape
    random = np.random.default_rng(0)
    x, w, grad = (
        random.standard_normal(sizes).astype(np.float32).astype(dtype)
        for sizes in ((rows, inputs), (inputs, outputs), (rows, outputs))
    )

    def both(x: jax.Array, w: jax.Array, grad: jax.Array) -> Any:
        output, back = jax.vjp(lambda x, w: jax_impl.float8_dot_general(x, w, (((1,), (0,)), ((), ()))), x, w)
        return output, *back(grad)

    lowered = jax.jit(both).lower(x, w, grad)
    compiled = lowered.compile()
    computed = [np.asarray(output, np.float32) for output in compiled(x, w, grad)]
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    wide = np.float64
    expected = [
        rounded(x, e4m3).astype(wide) @ rounded(w, e4m3).astype(wide),
        rounded(grad, e5m2).astype(wide) @ rounded(w, e4m3).astype(wide).T,
        x.astype(wide).T @ grad.astype(wide),
    ]
    texts = {name: lowered.compile(options).as_text() for name, options in compilers().items()}
    return {
        "computed": computed,
        "expected": expected,
        "products": {name: float8_products(text) for name, text in texts.items()},
        "lines": {name: products_of(text) for name, text in texts.items()},
    }


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    """To numbers of ``dtype`` times the least power of two with which none is too large."""
    wide = values.astype(np.float32)
    power = 2.0 ** np.ceil(np.log2(np.abs(wide).max() / float(ml_dtypes.finfo(dtype).max)))
    return (wide / power).astype(dtype).astype(np.float32) * np.float32(power)


def compilers() -> dict[str, dict[str, Any]]:
    """Options of XLA's compiler for GPUs: those of users, in place of this process's, and others beside them."""
    if jax.devices()[0].platform != "gpu":
        return {"users'": {}}
    return {
        "users'": {"xla_gpu_autotune_level": 4},
        "not tuned": {"xla_gpu_autotune_level": 0},
        "without Triton": {"xla_gpu_autotune_level": 4, "xla_gpu_enable_triton_gemm": False},
    }


_RESULT = re.compile(r"%?([\w.\-]+) = \(?(\w+)\[")
_OPERANDS = re.compile(r" (?:dot|custom-call)\((?:\w+\[\S* )?%?([\w.\-]+), (?:\w+\[\S* )?%?([\w.\-]+)")
_MATMUL = re.compile(r"dot\(|__cublas|matmul|gemm")


def products_of(text: str) -> list[str]:
    """Lines of a compiled program that multiply matrices."""
    return [line.strip()[:300] for line in text.splitlines() if _MATMUL.search(line)]


def float8_products(text: str) -> int:
    """Products of two float8 factors, of a library or in a kernel of XLA's own, of a program that XLA compiled."""
    dtypes = {match[1]: match[2] for line in text.splitlines() if (match := _RESULT.search(line))}
    factors = [match.groups() for line in products_of(text) if (match := _OPERANDS.search(line))]
    return sum(all(dtypes.get(name, "").startswith("f8") for name in pair) for pair in factors)


def float8_training(gather: str, products: bool) -> tuple[list[float], list[float], int]:
    """Losses of a decoder with weights gathered so, and without; float8 products in the gradients' program."""
    losses = []
    for narrow in (True, False):
        model = decoder()
        if narrow and products:
            model.set_attributes(dot_general=jax_impl.float8_dot_general)
        run = Run.of(model=model, param_dtype="bfloat16", gather_dtype=gather if narrow else None)
        if narrow:
            first, _ = run.step.lower_programs(run.state, jax_impl.shard_batch(run.plan, tokens(0)))
            calls = (
                float8_products(first.compile(compilers().get("without Triton")).as_text()) if products else 0
            )
        losses.append(run.train(range(12)))
    return losses[0], losses[1], calls


# Checkpoints


def saved_behind_training(folder: str) -> dict[str, Any]:
    """A save in the background while steps are given the state, beside one that waits; what each loads."""
    run, path = Run.of(), Path(folder)
    run.train(range(2))
    jax_impl.save_checkpoint(path / "now", run.plan, run.state, {"step": 2})
    expected = run.arrays()
    with held_back() as release:
        pending = jax_impl.save_checkpoint_async(path / "later", run.plan, run.state, {"step": 2})
        losses = run.train(range(2, 5))
        release()
        pending.wait()
    loaded = {
        name: jax_impl.load_checkpoint(path / name, run.plan, run.optimizer) for name in ("now", "later")
    }
    states = {
        name: [np.asarray(x).reshape(-1).view(np.uint8) for x in jax.tree.leaves(saved.state)]
        for name, saved in loaded.items()
    }
    other = Run.of()
    other.state = loaded["later"].state
    return {"losses": losses, "resumed": other.train(range(2, 5)), "expected": expected, "states": states}


def loaded_to_host(folder: str) -> tuple[list[str], list[float], list[float]]:
    """A checkpoint of a state on the device, loaded into the host's memory; losses of both afterwards."""
    run, offload = Run.of(), jax_impl.Offload(moments=1.0, main_weights=True)
    run.train(range(2))
    jax_impl.save_checkpoint(Path(folder) / "whole", run.plan, run.state)
    other = Run.of(offload=offload)
    like = jax_impl.abstract_state(run.plan, run.optimizer, offload=offload)
    loaded = jax_impl.load_checkpoint(Path(folder) / "whole", run.plan, run.optimizer, like=like)
    other.state = loaded.state
    return memory_kinds(other.state.weights), other.train(range(2, 4)), run.train(range(2, 4))


def read_by_orbax(folder: str) -> tuple[int, int]:
    """Weights that stock Orbax reads from a checkpoint, and how many have the bits of the state."""
    import orbax.checkpoint as ocp

    run = Run.of()
    run.train(range(1))
    jax_impl.save_checkpoint(Path(folder) / "own", run.plan, run.state)
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(Path(folder) / "own")
    leaves = dict(_flat(tree))
    weights = jax_impl.unshard(run.plan, run.state.weights)
    same = [
        any(path in key and np.array_equal(value, weights[path]) for key, value in leaves.items())
        for path in weights
    ]
    return len(same), sum(same)


def _flat(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _flat(value, (*path, str(key)))
    else:
        yield "/".join(path), np.asarray(tree)
