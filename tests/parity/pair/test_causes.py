"""Each known cause is named for small modules that differ by it, and none for differences by chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from bridge.parity.causes.causes import module_cause, weight_cause
from bridge.parity.causes.formulas import ACTIVATIONS, gelu, gelu_tanh
from bridge.parity.partners.modules import ModulePair
from bridge.parity.partners.runs import CallPair, Children
from bridge.parity.recorded.recording import Call, Leaves

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 5, 8))
WEIGHT, BIAS = RNG.standard_normal(8), RNG.standard_normal(8)
MATRIX = RNG.standard_normal((8, 8))


def floor_of(array: np.ndarray) -> float:
    """Of float32."""
    return 6e-8 * float(np.linalg.norm(array))


def pair_of(x: np.ndarray, torch: np.ndarray, jax: np.ndarray) -> CallPair:
    ours, theirs = (Call("m", 0, "Module", {"0": x}, {"": value}) for value in (torch, jax))
    return CallPair(ModulePair("m", "m", 0), 0, ours, theirs)


def cause(
    torch: np.ndarray, jax: np.ndarray, parameters: Leaves | None = None, inner: Sequence[CallPair] = ()
) -> str:
    children = Children(tuple(inner), (0,) * len(inner), (0,) * len(inner))
    jax_inputs = {index: child.jax.inputs for index, child in enumerate(inner)}
    floors = {"": floor_of(torch)}
    return module_cause(pair_of(X, torch, jax), children, {"": jax}, jax_inputs, floors, parameters or {})


def rms(eps: float = 1e-6, weight: np.ndarray = WEIGHT, *, outside: bool = False) -> np.ndarray:
    square = np.mean(X * X, -1, keepdims=True)
    return X / (np.sqrt(square) + eps if outside else np.sqrt(square + eps)) * weight


def layer_norm(eps: float = 1e-5, *, bias: bool = True, ddof: int = 0) -> np.ndarray:
    centred = X - X.mean(-1, keepdims=True)
    return centred / np.sqrt(X.var(-1, keepdims=True, ddof=ddof) + eps) * WEIGHT + (BIAS if bias else 0)


NORM = {"weight": WEIGHT}
BIASED = {"weight": WEIGHT, "bias": BIAS}
NORMS: dict[str, tuple[np.ndarray, np.ndarray, Leaves, str]] = {
    "epsilon": (rms(1e-6), rms(1e-5), NORM, "torch: RMS norm, epsilon 1e-06; JAX: RMS norm, epsilon 1e-05"),
    "epsilon outside": (
        *(rms(1e-3), rms(1e-3, outside=True), NORM),
        "torch: RMS norm, epsilon 0.001; JAX: RMS norm, epsilon 0.001 outside of the root",
    ),
    "no mean": (
        *(layer_norm(bias=False), rms(1e-5), NORM),
        "torch: layer norm, epsilon 1e-05; JAX: RMS norm, epsilon 1e-05",
    ),
    "one plus weight": (
        *(rms(1e-5, 1 + WEIGHT), rms(1e-5), NORM),
        "torch: RMS norm, epsilon 1e-05, times 1 + weight; JAX: RMS norm, epsilon 1e-05",
    ),
    "layer norm's epsilon": (
        *(layer_norm(1e-5), layer_norm(1e-3), BIASED),
        "torch: layer norm, epsilon 1e-05; JAX: layer norm, epsilon 0.001",
    ),
    "unbiased": (
        *(layer_norm(), layer_norm(ddof=1), BIASED),
        "torch: layer norm, epsilon 1e-05; JAX: unbiased layer norm, epsilon 1e-05",
    ),
}


@pytest.mark.parametrize("what", NORMS)
def test_norms(what: str) -> None:
    torch, jax, parameters, words = NORMS[what]
    assert cause(torch, jax, parameters) == words


def test_the_norm_of_an_input_without_parameters() -> None:
    weight = np.ones(8)
    assert (
        cause(rms(1e-6, weight), rms(1e-2, weight))
        == "torch: RMS norm, epsilon 1e-06; JAX: RMS norm, epsilon 0.01"
    )


def test_biases() -> None:
    plain = X @ MATRIX
    parameters = {"weight": MATRIX, "bias": BIAS}
    assert cause(plain + BIAS, plain, parameters) == "JAX does not add torch's bias"
    assert cause(plain + BIAS, plain + 2 * BIAS, parameters) == "JAX adds twice torch's bias"
    other = RNG.standard_normal(8)
    assert cause(plain, plain + other, parameters) == "JAX's is torch's plus one vector at every position"


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (np.sqrt(32.0), "JAX's is 5.65685 times torch's, sqrt(32)"),
        (1 / np.sqrt(10.0), "JAX's is 0.316228 times torch's, 1 / sqrt(10)"),
        (-1.0, "JAX's is -1 times torch's"),
        (0.3, "JAX's is 0.3 times torch's"),
    ],
)
def test_multiples(factor: float, words: str) -> None:
    assert cause(X, factor * X) == words
    assert weight_cause("a.scale", MATRIX, factor * MATRIX, floor_of(MATRIX)) == words


def children(
    first: np.ndarray, second: np.ndarray | None, torch: np.ndarray, jax: np.ndarray
) -> list[CallPair]:
    """Projections, and the last one, which is given ``torch`` in the one model and ``jax`` in the other."""
    before = [first] if second is None else [first, second]
    last = Call("down", 0, "Linear", {"0": torch}, {"": X}), Call("down", 0, "Linear", {"0": jax}, {"": X})
    return [
        *(pair_of(X, output, output) for output in before),
        CallPair(ModulePair("down", "down", 9), 0, *last),
    ]


G, U = RNG.standard_normal((3, 5, 12)), RNG.standard_normal((3, 5, 12))


@pytest.mark.parametrize("other", [name for name in ACTIVATIONS if name != "silu"])
def test_another_activation(other: str) -> None:
    silu, wrong = ACTIVATIONS["silu"], ACTIVATIONS[other]
    inner = children(G, None, silu(G), wrong(G))
    assert cause(X, X, inner=inner) == f"torch: silu; JAX: {other}"
    inner = children(G, U, silu(G) * U, wrong(G) * U)
    rest = "of the first projection times the second"
    assert cause(X, X, inner=inner) == f"torch: silu {rest}; JAX: {other} {rest}"


def test_the_two_gelus_are_told_apart() -> None:
    assert 1e-5 < np.abs(gelu(G) - gelu_tanh(G)).max() < 1e-3
    assert (
        cause(X, X, inner=children(G, None, gelu(G), gelu_tanh(G))) == "torch: gelu (exact); JAX: gelu (tanh)"
    )


def test_gate_and_up_exchanged() -> None:
    silu = ACTIVATIONS["silu"]
    assert cause(X, X, inner=children(G, U, silu(G) * U, silu(U) * G)) == (
        "torch: silu of the first projection times the second; JAX: silu of the second projection times the first"
    )


HEADS = RNG.standard_normal((24, 10))
REARRANGED: dict[str, tuple[np.ndarray, np.ndarray, str]] = {
    "transposed": (MATRIX, MATRIX.T, "transposed"),
    "halves exchanged": (HEADS, np.roll(HEADS, 12, 0), "halves exchanged along axis 0"),
    "interleaved": (
        HEADS,
        HEADS.reshape(2, 12, 10).swapaxes(0, 1).reshape(24, 10),
        "halves interleaved along axis 0",
    ),
    "apart": (
        HEADS,
        HEADS.reshape(12, 2, 10).swapaxes(0, 1).reshape(24, 10),
        "pairs taken apart into halves along axis 0",
    ),
    "interleaved heads": (
        *(HEADS, HEADS.reshape(4, 2, 3, 10).swapaxes(1, 2).reshape(24, 10)),
        "halves of each of 4 heads interleaved along axis 0",
    ),
    "heads apart": (
        *(HEADS, HEADS.reshape(4, 3, 2, 10).swapaxes(1, 2).reshape(24, 10)),
        "pairs of each of 4 heads taken apart into halves along axis 0",
    ),
    "shifted": (HEADS, np.roll(HEADS, 1, 1), "shifted by one along axis 1"),
    "shifted back": (HEADS, np.roll(HEADS, -1, 0), "shifted by minus one along axis 0"),
    "reversed": (HEADS, HEADS[::-1], "reversed along axis 0"),
    "heads in reverse": (
        *(HEADS, HEADS.reshape(4, 6, 10)[::-1].reshape(24, 10)),
        "4 heads in reverse order along axis 0",
    ),
}


@pytest.mark.parametrize("what", REARRANGED)
def test_another_order(what: str) -> None:
    torch, jax, words = REARRANGED[what]
    assert weight_cause("a.scale", torch, jax, floor_of(torch)) == f"JAX's is torch's, {words}"
    # An output that is the other's transpose is taken for another layout (``align``).
    assert what == "transposed" or cause(torch, jax) == f"JAX's output is torch's, {words}"


def test_weights_that_are_off_by_one() -> None:
    floor, norm = floor_of(WEIGHT), " (a norm that multiplies by 1 + weight)"
    assert weight_cause("a.scale", WEIGHT, WEIGHT + 1, floor) == f"JAX's is torch's plus 1{norm}"
    assert weight_cause("a.scale", WEIGHT + 1, WEIGHT, floor) == f"torch's is JAX's plus 1{norm}"
    assert weight_cause("a.bias", WEIGHT + 1, WEIGHT, floor) == "torch's is JAX's plus 1"


@pytest.mark.parametrize(
    ("factor", "said"),
    [(0.295, ""), (7.0, "JAX's is 7 times torch's"), (1 / 4, "JAX's is 0.25 times torch's")],
)
def test_the_factor_of_a_single_number_is_named_only_if_it_is_whole(factor: float, said: str) -> None:
    value = np.full((1, 1), 0.37)
    assert weight_cause("scale", value, factor * value, floor_of(value)).partition(",")[0] == said


DIFFERENCES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "all of it": lambda x: np.random.default_rng(9).standard_normal(x.shape),
    "a little": lambda x: x + 1e-3 * np.random.default_rng(9).standard_normal(x.shape),
    "hardly more than rounding": lambda x: x + 1e-6 * np.random.default_rng(9).standard_normal(x.shape),
    "one row": lambda x: np.concatenate([x[:1] * 1.01, x[1:]]),
    "NaN": lambda x: np.where(np.arange(x.shape[-1]) == 1, np.nan, x),
    "infinite": lambda x: np.where(np.arange(x.shape[-1]) == 1, np.inf, x),
    "zeros": np.zeros_like,
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_nothing_is_named_for_a_difference_by_chance(what: str) -> None:
    change = DIFFERENCES[what]
    for value in (MATRIX, HEADS, WEIGHT):
        assert weight_cause("a.scale", value, change(value), floor_of(value)) == ""
    for value in (rms(), layer_norm(), X @ MATRIX + BIAS):
        assert cause(value, change(value), BIASED) == ""
    silu = ACTIVATIONS["silu"](G) * U
    assert cause(X, X, inner=children(G, U, silu, change(silu))) == ""


def test_a_norm_with_another_difference_besides_is_not_named() -> None:
    noisy = rms(1e-5) + 1e-5 * RNG.standard_normal(X.shape)
    assert cause(rms(1e-6), noisy, NORM) == ""


def test_equal_modules_have_no_cause() -> None:
    assert cause(X, X.copy(), BIASED) == ""
