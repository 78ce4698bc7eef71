"""``main_weight_adamw`` against PyTorch's fused AdamW on the same gradients, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_impl import main_weight_adamw

pytestmark = pytest.mark.optimized

STEPS = 100
DTYPES = [np.float32, np.float64]
Arrays = list[np.ndarray]
# Weights, first and second moments.
Result = tuple[Arrays, Arrays, Arrays]


@functools.cache
def problem(sizes: tuple[int, ...], dtype: type, steps: int = STEPS) -> tuple[Arrays, list[Arrays]]:
    """Weights of these sizes, and gradients of scales from 1e-6 to 1 for each step."""
    rng = np.random.default_rng(0)
    weights = [(0.02 * rng.normal(size=size)).astype(dtype) for size in sizes]
    gradients = [
        [(rng.normal(size=size) * 10.0 ** rng.uniform(-6, 0, size)).astype(dtype) for size in sizes]
        for _ in range(steps)
    ]
    return weights, gradients


def torch_run(
    weights: Arrays,
    gradients: list[Arrays],
    rates: Sequence[float] | None = None,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    first: int = 0,
    **options: Any,
) -> Result:
    """What torch.optim.AdamW(fused=True) makes of them; ``rates``: the learning rate of each step. ``first``: the steps
    that are counted already."""
    parameters = [torch.nn.Parameter(torch.tensor(weight)) for weight in weights]
    fused: dict[str, Any] = {"fused": True, **options}
    optimizer = optimizer_class(parameters, **fused)
    if first:
        optimizer.load_state_dict(_counted(optimizer, parameters, first))
    for step, slopes in enumerate(gradients):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[step]
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.grad = torch.tensor(slope)
        optimizer.step()
    moments = [
        [optimizer.state[parameter][key].numpy() for parameter in parameters]
        for key in ("exp_avg", "exp_avg_sq")
    ]
    return [parameter.detach().numpy() for parameter in parameters], moments[0], moments[1]


def _counted(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], steps: int
) -> dict[str, Any]:
    state = optimizer.state_dict()
    state["state"] = {
        number: {
            "step": torch.tensor(float(steps)),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        for number, parameter in enumerate(parameters)
    }
    return state


def jax_run(
    weights: Arrays,
    gradients: list[Arrays],
    optimizer: Any,
    devices: int = 1,
    compiled: Callable[[Any, Mesh], Callable[..., Any]] = lambda apply, mesh: jax.jit(apply),
) -> Result:
    """The same by ``optimizer``, on arrays padded with zeros to a multiple of the devices and sharded over them."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("dp",))
    sharding = NamedSharding(mesh, PartitionSpec("dp"))

    def placed(arrays: Arrays) -> list[jax.Array]:
        return [jax.device_put(np.pad(x, (0, -len(x) % devices)), sharding) for x in arrays]

    held = placed(weights)
    state = jax.jit(optimizer.init)(held)
    step = compiled(optimizer.apply, mesh)
    for slopes in gradients:
        held, state = step(placed(slopes), state, held)
    sizes = [len(weight) for weight in weights]
    first, second, third = (
        [np.asarray(x)[:size] for x, size in zip(part, sizes, strict=True)]
        for part in (held, state.mu, state.nu)
    )
    return first, second, third


def assert_same_bits(actual: Result, expected: Result) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            assert x.dtype == y.dtype
            bits = f"u{x.dtype.itemsize}"
            np.testing.assert_array_equal(x.view(bits), y.view(bits))


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.each_value
@pytest.mark.parametrize("decay", [0.0, 0.1], ids=["Adam", "AdamW"])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_moments_equal_torchs_fused_adamw_bit_for_bit(
    dtype: type, devices: int, decay: float
) -> None:
    weights, gradients = problem((20_480,), dtype)
    expected = torch_run(weights, gradients, lr=1e-3, weight_decay=decay)
    with jax.enable_x64(dtype == np.float64):
        trained = jax_run(weights, gradients, main_weight_adamw(1e-3, weight_decay=decay), devices)
    assert_same_bits(trained, expected)


def test_without_decay_torchs_fused_adam_gives_these_bits_too() -> None:
    weights, gradients = problem((4096,), np.float32)
    parameter = torch.nn.Parameter(torch.tensor(weights[0]))
    optimizer = torch.optim.Adam([parameter], lr=1e-2, fused=True)
    for (slope,) in gradients:
        parameter.grad = torch.tensor(slope)
        optimizer.step()
    trained = jax_run(weights, gradients, main_weight_adamw(1e-2, weight_decay=0.0))
    np.testing.assert_array_equal(trained[0][0], parameter.detach().numpy())


# A learning rate that float32 has, as a number and as one that only the program knows.
RATE = 2.0**-10
RATES = [RATE, lambda done: jnp.where(done < 0, 0, jnp.float32(RATE))]


@pytest.mark.each_value
@pytest.mark.parametrize("rate", RATES, ids=["number", "schedule"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_l2_decay_gives_the_bits_of_torchs_fused_adam(
    dtype: type, devices: int, decay: float, rate: Any
) -> None:
    weights, gradients = problem((4096,), dtype)
    expected = torch_run(weights, gradients, optimizer_class=torch.optim.Adam, lr=RATE, weight_decay=decay)
    with jax.enable_x64(dtype == np.float64):
        optimizer = main_weight_adamw(rate, weight_decay=decay, adam_w_mode=False)
        assert_same_bits(jax_run(weights, gradients, optimizer, devices), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("rate", RATES, ids=["number", "schedule"])
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_bias_correction_updates_are_those_after_countless_steps(
    dtype: type, adam_w_mode: bool, rate: Any
) -> None:
    weights, gradients = problem((4096,), dtype)
    optimizer_class = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    # So late PyTorch's kernel has both corrections equal to 1, as its powers vanish.
    expected = torch_run(
        weights, gradients, optimizer_class=optimizer_class, first=1 << 20, lr=RATE, weight_decay=0.1
    )
    with jax.enable_x64(dtype == np.float64):
        optimizer = main_weight_adamw(rate, weight_decay=0.1, adam_w_mode=adam_w_mode, bias_correction=False)
        assert_same_bits(jax_run(weights, gradients, optimizer), expected)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("b1", "b2", "eps", "decay"),
    [
        # PyTorch interpolates the first moment from the gradient where b1 is 0.5 or less.
        (0.0, 0.999, 1e-8, 0.1),
        (0.3, 0.95, 1e-15, 0.0),
        (0.5, 0.999, 1e-8, 0.1),
        (0.95, 0.0, 1e-3, 0.1),
        (0.0, 0.0, 1e-8, 0.0),
        (0.9, 0.999, 0.0, 0.1),
        (0.9, 0.95, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_hyperparameters_give_torchs_bits(
    dtype: type, b1: float, b2: float, eps: float, decay: float
) -> None:
    weights, gradients = problem((1024,), dtype, 20)
    expected = torch_run(weights, gradients, lr=0.3, betas=(b1, b2), eps=eps, weight_decay=decay)
    with jax.enable_x64(dtype == np.float64):
        trained = jax_run(weights, gradients, main_weight_adamw(0.3, b1, b2, eps, decay))
    assert_same_bits(trained, expected)


SCHEDULES: dict[str, optax.Schedule] = {
    "constant": optax.constant_schedule(1e-3),
    "linear": optax.linear_schedule(1e-3, 1e-5, 77),
    "cosine": optax.cosine_decay_schedule(3e-3, 100),
    "warmup": optax.warmup_cosine_decay_schedule(0.0, 3e-3, 10, 100, 1e-5),
    "exponential": optax.exponential_decay(1e-2, 10, 0.9),
    "pieces": optax.piecewise_constant_schedule(1e-3, {10: 0.3, 50: 0.1}),
    "joined": optax.join_schedules(
        [optax.linear_schedule(0.0, 1e-2, 10), optax.exponential_decay(1e-2, 10, 0.9)], [10]
    ),
    "own": lambda done: 1e-2 / jnp.sqrt(done + 1.0),
}


@pytest.mark.fast_cases("float32-cosine", "float32-warmup", "float32-own", "float64-linear")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_schedule_gives_the_bits_that_torch_gives_with_its_learning_rates(dtype: type, name: str) -> None:
    weights, gradients = problem((1024,), dtype)
    schedule = SCHEDULES[name]
    with jax.enable_x64(dtype == np.float64):
        # Compiled like the step: op by op, schedules themselves round otherwise.
        evaluate = schedule if isinstance(schedule(0), float) else jax.jit(schedule)
        rates = [float(evaluate(jnp.int32(step))) for step in range(STEPS)]
        trained = jax_run(weights, gradients, main_weight_adamw(schedule, weight_decay=0.1), 8)
    assert len(set(rates)) >= {"constant": 1, "pieces": 3}.get(name, 50)
    assert_same_bits(trained, torch_run(weights, gradients, rates, lr=1e-3, weight_decay=0.1))


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_decay_is_rounded_once_as_torchs_compiler_does(scheduled: bool) -> None:
    # For one learning rate in some two hundred this shows in doubles.
    decay = 0.1
    candidates = (float(x) for x in np.random.default_rng(0).uniform(1e-5, 1e-1, 10_000))
    rates = [x for x in candidates if 1 - x * decay != float(1 - Fraction(x) * Fraction(decay))][:20]
    assert len(rates) == 20
    weights, gradients = problem((64,), np.float64, len(rates))
    expected = torch_run(weights, gradients, rates, lr=1e-3, weight_decay=decay)
    with jax.enable_x64(True):
        if scheduled:
            table = jnp.asarray(rates)
            trained = jax_run(weights, gradients, main_weight_adamw(lambda t: table[t], weight_decay=decay))
            assert_same_bits(trained, expected)
            return
        for rate in rates:
            trained = jax_run(weights, gradients[:1], main_weight_adamw(rate, weight_decay=decay))
            assert_same_bits(trained, torch_run(weights, gradients[:1], lr=rate, weight_decay=decay))


@pytest.mark.parametrize(("gradient", "main"), [("bfloat16", "float32"), ("float16", "float32")])
def test_gradients_of_another_dtype_count_as_the_numbers_they_are(gradient: str, main: str) -> None:
    weights, gradients = problem((1024,), np.float32)
    rounded = [[slope.astype(jnp.dtype(gradient)) for slope in slopes] for slopes in gradients]
    exact = [[slope.astype(main) for slope in slopes] for slopes in rounded]
    trained = jax_run(weights, rounded, main_weight_adamw(1e-3))
    assert_same_bits(trained, torch_run(weights, exact, lr=1e-3, weight_decay=0.01))


def test_infinite_and_missing_numbers_spread_as_in_torch() -> None:
    weights, gradients = problem((64,), np.float32, 3)
    spoilt = [[slope.copy() for slope in slopes] for slopes in gradients]
    spoilt[1][0][:3] = [np.inf, -np.inf, np.nan]
    trained = jax_run(weights, spoilt, main_weight_adamw(1e-3))
    for ours, theirs in zip(trained, torch_run(weights, spoilt, lr=1e-3, weight_decay=0.01), strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])


def test_numbers_too_small_to_be_normal_are_zero_and_weights_do_not_notice() -> None:
    weights, gradients = problem((1024,), np.float32, 20)
    tiny = [[slope * np.float32(1e-17) for slope in slopes] for slopes in gradients]
    trained = jax_run(weights, tiny, main_weight_adamw(1e-3))
    expected = torch_run(weights, tiny, lr=1e-3, weight_decay=0.01)
    np.testing.assert_array_equal(trained[0][0], expected[0][0])
    np.testing.assert_array_equal(trained[1][0], expected[1][0])
    differing = trained[2][0] != expected[2][0]
    assert differing.any()
    assert np.abs(trained[2][0] - expected[2][0]).max() < 20 * np.finfo(np.float32).tiny
