"""Each formula of attention is recognized in what plain loops over heads compute, on either side, and no other is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bridge.parity.causes.attention import attention_cause, minimum
from bridge.parity.causes.attention_in_module import _masks, _Mixing
from bridge.parity.causes.causes import module_cause
from bridge.parity.causes.formulas import AttentionInputs, base_of
from bridge.parity.partners.modules import ModulePair
from bridge.parity.partners.runs import CallPair, Children
from bridge.parity.recorded.recording import Call, Leaves

B, T, H, K, D = 2, 14, 4, 2, 8
RNG = np.random.default_rng(0)
Q, KEY, V = (1.5 * RNG.standard_normal((B, T, heads, D)) for heads in (H, K, K))
FLOOR = 1e-6
Values = dict[str, Any]


def turned(x: np.ndarray, base: float, pairing: str, share: float, later: int, sign: int) -> np.ndarray:
    """One head ``[T, D]`` after its rotary embedding, by complex numbers."""
    n = int(x.shape[-1] * share)
    halves = (
        (np.arange(n // 2), np.arange(n // 2, n))
        if pairing == "half"
        else (np.arange(0, n, 2), np.arange(1, n, 2))
    )
    positions = np.arange(len(x)) + later
    frequencies = np.array([base ** (-2 * i / n) for i in range(n // 2)])
    numbers = (x[:, halves[0]] + 1j * x[:, halves[1]]) * np.exp(sign * 1j * np.outer(positions, frequencies))
    output = x.copy()
    output[:, halves[0]], output[:, halves[1]] = numbers.real, numbers.imag
    return output


def mixed(q: np.ndarray = Q, k: np.ndarray = KEY, v: np.ndarray = V, **options: Any) -> np.ndarray:
    """``[B, T, H * D]`` by loops over rows and heads; right but for ``options``."""
    o: Values = {"kind": "half", "base": 1e4, "share": 1.0, "later": 0, "sign": 1, "turn": "qk", "cap": None}
    o |= {
        "scale": D**-0.5,
        "sees": lambda i, j: j <= i,
        "shares": lambda h: h // (H // K),
        "axis": 1,
    } | options
    heads = np.zeros((len(q), T, H, D))
    for row in range(len(q)):
        for head in range(H):
            ours, theirs, values = (
                q[row, :, head],
                k[row, :, o["shares"](head)],
                v[row, :, o["shares"](head)],
            )
            if o["kind"]:
                args = o["base"], o["kind"], o["share"]
                ours = turned(ours, *args, 0, o["sign"]) if "q" in o["turn"] else ours
                theirs = turned(theirs, *args, o["later"], o["sign"]) if "k" in o["turn"] else theirs
            scores = ours @ theirs.T * o["scale"]
            if o["cap"]:
                scores = o["cap"] * np.tanh(scores / o["cap"])
            for i in range(T):
                for j in range(T):
                    # As large as what programs add instead of minus infinity.
                    scores[i, j] = scores[i, j] if o["sees"](i, j) else -1e30
            weights = np.exp(scores - scores.max(o["axis"], keepdims=True))
            heads[row, :, head] = weights / weights.sum(o["axis"], keepdims=True) @ values
    return heads.reshape(len(q), T, H * D)


def inputs(result: np.ndarray, **options: Any) -> AttentionInputs:
    return AttentionInputs(Q, KEY, V, result, **options)


def window(n: int) -> Callable[[int, int], bool]:
    return lambda i, j: i - n < j <= i


RIGHT = mixed()
ONE: dict[str, tuple[Values, str, str]] = {
    "base": ({"base": 5e5}, "rotary base 10000", "rotary base 500000"),
    "doubled base": ({"base": 2e4}, "rotary base 10000", "rotary base 20000"),
    "base of no catalogue": ({"base": 32768.0}, "rotary base 10000", "rotary base 32768"),
    "interleaved": (
        {"kind": "interleaved"},
        "rotary embedding of halves",
        "rotary embedding of neighbours (interleaved)",
    ),
    "none": ({"kind": None}, "rotary embedding of halves", "no rotary embedding"),
    "quarter": (
        {"share": 0.25},
        "rotary embedding of 1 of each head",
        "rotary embedding of 0.25 of each head",
    ),
    "half": ({"share": 0.5}, "rotary embedding of 1 of each head", "rotary embedding of 0.5 of each head"),
    "later": ({"later": 1}, "keys at the queries' positions", "keys one position later"),
    "earlier": ({"later": -1}, "keys at the queries' positions", "keys one position earlier"),
    "backwards": ({"sign": -1}, "rotary embedding forwards", "rotary embedding backwards"),
    "queries alone": (
        {"turn": "q"},
        "rotary embedding of queries and keys",
        "rotary embedding of queries alone",
    ),
    "never scaled": ({"scale": 1.0}, "scores times 1 / sqrt(8)", "scores not scaled"),
    "scaled twice": ({"scale": 1 / D}, "scores times 1 / sqrt(8)", "scores times 1 / 8"),
    "scaled by another size": ({"scale": 7**-0.5}, "scores times 1 / sqrt(8)", "scores times 1 / sqrt(7)"),
    "scaled by anything": ({"scale": 0.3}, "scores times 1 / sqrt(8)", "scores times 0.3"),
    "capped": ({"cap": 30.0}, "scores not capped", "scores capped at 30"),
    "capped at anything": ({"cap": 2.5}, "scores not capped", "scores capped at 2.5"),
    "no mask": ({"sees": lambda i, j: True}, "causal mask", "no mask"),
    "next": (
        {"sees": lambda i, j: j <= i + 1},
        "causal mask",
        "causal mask that lets the next token through",
    ),
    "strict": ({"sees": lambda i, j: j < i}, "causal mask", "causal mask that hides a token from itself"),
    "window": ({"sees": window(9)}, "no window", "window of 9 tokens"),
    "tiled": (
        {"shares": lambda h: h % K},
        "key heads repeated (neighbouring query heads share one)",
        "key heads tiled (query heads share one in turn)",
    ),
    "softmax": ({"axis": 0}, "softmax over keys", "softmax over queries"),
}


@pytest.mark.parametrize("what", ONE)
def test_one_field(what: str) -> None:
    options, right, wrong = ONE[what]
    other = mixed(**options)
    assert attention_cause(inputs(RIGHT), inputs(other), FLOOR) == f"torch: {right}; JAX: {wrong}"
    assert attention_cause(inputs(other), inputs(RIGHT), FLOOR) == f"torch: {wrong}; JAX: {right}"


def test_windows_that_are_off_by_one() -> None:
    for ours, theirs in ((5, 6), (6, 5), (10, 9)):
        cause = attention_cause(inputs(mixed(sees=window(ours))), inputs(mixed(sees=window(theirs))), FLOOR)
        assert cause == f"torch: window of {ours} tokens; JAX: window of {theirs} tokens"


def test_two_fields() -> None:
    other = mixed(scale=1.0, kind="interleaved")
    assert attention_cause(inputs(RIGHT), inputs(other), FLOOR) == (
        "torch: rotary embedding of halves, scores times 1 / sqrt(8); "
        "JAX: rotary embedding of neighbours (interleaved), scores not scaled"
    )


def test_joined_otherwise() -> None:
    heads = RIGHT.reshape(B, T, H, D)
    for axes, words in (((0, 1, 3, 2), "elements before heads"), ((0, 2, 1, 3), "heads before positions")):
        other = heads.transpose(axes).reshape(RIGHT.shape)
        assert attention_cause(inputs(RIGHT), inputs(other), FLOOR) == (
            f"torch: outputs joined with heads before elements; JAX: outputs joined with {words}"
        )


def test_exchanged_projections() -> None:
    other = mixed(np.repeat(KEY, 2, 2), Q[:, :, ::2], V)
    same = AttentionInputs(np.repeat(KEY, 2, 2), Q[:, :, ::2], V, other)
    exchanged = AttentionInputs(Q, np.repeat(KEY, 2, 2), np.repeat(V, 2, 2), RIGHT)
    assert attention_cause(same, same, FLOOR) == ""
    values = mixed(Q, V, KEY)
    assert attention_cause(inputs(RIGHT), inputs(values), FLOOR) == (
        "torch: projections used as query, key, value; JAX: projections used as query, value, key"
    )
    assert attention_cause(exchanged, exchanged, FLOOR) == ""


def tables(base: float, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    angles = np.outer(np.arange(T) + first, base ** (-np.arange(D // 2) / (D // 2)))
    return np.cos(angles)[None], np.sin(angles)[None]


def test_tables_are_read() -> None:
    for base in (300.0, 1e4, 123456.0):
        cos, sin = tables(base, first=3)
        assert base_of(cos[0], sin[0]) == pytest.approx(base, rel=1e-4)
        assert base_of(*(x[0].astype(np.float32) for x in (cos, sin))) == pytest.approx(base, rel=1e-4)
    cos, sin = tables(300.0)
    assert base_of(cos[0] ** 2, sin[0]) is None
    named_tables = {"torch's cos": tables(300.0), "JAX's cos": tables(600.0)}
    ours, theirs = mixed(base=300.0), mixed(base=600.0)
    assert attention_cause(inputs(ours, tables=named_tables), inputs(theirs, tables=named_tables), FLOOR) == (
        "torch: rotary base 300; JAX: rotary base 600"
    )


def test_tables_without_a_base_are_named() -> None:
    odd = np.outer(np.arange(T), [1.0, 0.4, 0.3, 0.0])
    named_tables = {"torch's cos": (np.cos(odd)[None], np.sin(odd)[None])}
    output = np.stack([turned_by(odd, row) for row in range(B)])
    assert attention_cause(
        inputs(output, tables=named_tables), inputs(RIGHT, tables=named_tables), FLOOR
    ) == ("torch: rotary angles of torch's cos; JAX: rotary base 10000")


def turned_by(angles: np.ndarray, row: int) -> np.ndarray:
    """One row ``[T, H * D]`` with these angles."""
    turn = np.exp(1j * angles)[:, None]

    def rotated(x: np.ndarray) -> np.ndarray:
        numbers = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * turn
        return np.concatenate([numbers.real, numbers.imag], -1)

    return mixed(rotated(Q[row])[None], rotated(KEY[row])[None], V[row : row + 1], kind=None)[0]


def test_masks_that_are_given() -> None:
    padded = np.ones((B, 1, 1, T), bool)
    padded[1, ..., 10:] = False
    both = mixed(sees=lambda i, j: j < 10)
    rows = np.stack([mixed(sees=lambda i, j: True)[0], both[1]])
    masks = {"JAX's mask": padded}
    assert attention_cause(inputs(mixed(sees=lambda i, j: True)), inputs(rows, masks=masks), FLOOR) == (
        "torch: no mask; JAX: JAX's mask as mask or added to the scores"
    )


UNKNOWN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "all of it": lambda x: np.random.default_rng(9).standard_normal(x.shape),
    "a little": lambda x: x + 1e-4 * np.random.default_rng(9).standard_normal(x.shape),
    "late queries": lambda x: np.concatenate([x[:, :-1], 1.001 * x[:, -1:]], 1),
    "another row": lambda x: np.concatenate([x[:1], x[:1]]),
    "NaN": lambda x: np.where(np.arange(x.shape[-1]) == 1, np.nan, x),
    "zeros": np.zeros_like,
}


@pytest.mark.fast_cases("all of it", "NaN")
@pytest.mark.parametrize("what", UNKNOWN)
def test_nothing_is_named_for_an_unknown_formula(what: str) -> None:
    other = UNKNOWN[what](RIGHT)
    assert attention_cause(inputs(RIGHT), inputs(other), FLOOR) == ""
    assert attention_cause(inputs(other), inputs(RIGHT), FLOOR) == ""


def test_a_known_difference_with_more_than_the_floor_besides_is_not_named() -> None:
    other = mixed(scale=1.0) + 1e-4 * RNG.standard_normal(RIGHT.shape)
    assert attention_cause(inputs(RIGHT), inputs(other), FLOOR) == ""
    assert attention_cause(inputs(RIGHT), inputs(RIGHT.copy()), FLOOR) == ""


def test_the_least_of_a_function() -> None:
    assert minimum(lambda x: abs(x - 2.34567), 0.0, 5.0) == pytest.approx(2.34567, abs=1e-8)
    assert minimum(lambda x: math.inf, 0.0, 5.0) is None


X = RNG.standard_normal((B, T, 12))


def module(
    torch: np.ndarray,
    jax: np.ndarray,
    *,
    fused: str = "",
    heads: bool = False,
    norm: np.ndarray | None = None,
) -> str:
    """The cause of a module with projections inside, whose heads no array shows unless ``heads``.

    ``fused``: order in one projection. ``norm``: what JAX gives to a norm of the keys.
    """
    if fused == "blocks":
        parts = {"c_attn": np.concatenate([x.reshape(B, T, -1) for x in (Q, KEY, V)], -1)}
    elif fused == "heads":
        grouped = Q.reshape(B, T, K, H // K, D)
        parts = {
            "c_attn": np.concatenate([grouped, KEY[:, :, :, None], V[:, :, :, None]], 3).reshape(B, T, -1)
        }
    else:
        parts = {"v_proj": V, "q_proj": Q, "k_proj": KEY if norm is None else 2 * KEY}
    pairs = []
    for name, value in parts.items():
        flat = value.reshape(B, T, -1)
        calls = [
            Call(name, 0, "Linear", {"0": X}, {"": output}) for output in (flat, value if heads else flat)
        ]
        pairs.append(CallPair(ModulePair(name, name, 0), 0, calls[0], calls[1]))
    if norm is not None:
        call = Call("k_norm", 0, "Norm", {"0": 2 * KEY}, {"": KEY})
        pairs.append(CallPair(ModulePair("k_norm", "k_norm", 0), 0, call, call))
    calls = [Call("o_proj", 0, "Linear", {"0": array}, {"": X}) for array in (torch, jax)]
    pairs.append(CallPair(ModulePair("o_proj", "o_proj", 0), 0, calls[0], calls[1]))
    outer = Call("attn", 0, "Attention", {"0": X}, {"": X})
    jax_inputs: dict[int, Leaves] = {index: pair.jax.inputs for index, pair in enumerate(pairs)}
    if norm is not None:
        jax_inputs[3] = {"0": norm}
    inner = Children(tuple(pairs), (0,) * len(pairs), (0,) * len(pairs))
    whole = CallPair(ModulePair("attn", "attn", 0), 0, outer, outer)
    return module_cause(whole, inner, {"": X}, jax_inputs, {"": 1e-7}, {})


def test_projections_are_found_in_a_module() -> None:
    other = mixed(scale=1.0)
    expected = "torch: scores times 1 / sqrt(8); JAX: scores not scaled"
    assert module(RIGHT, other) == expected
    assert module(RIGHT, other, heads=True) == expected
    for fused in ("blocks", "heads"):
        assert module(RIGHT, other, fused=fused) == expected


def test_a_fused_projection_that_is_cut_otherwise() -> None:
    # What "heads" reads from features that lie in blocks.
    features = np.concatenate([x.reshape(B, T, -1) for x in (Q, KEY, V)], -1).reshape(B, T, K, -1, D)
    q = features[:, :, :, :-2].reshape(B, T, H, D)
    other = mixed(q, features[:, :, :, -2], features[:, :, :, -1])
    assert module(RIGHT, other, fused="blocks") == (
        "torch: query, key and value as blocks of their projection; "
        "JAX: query, key and value of each head side by side in their projection"
    )


def test_what_differs_before_the_last_norm_is_not_blamed_on_what_follows() -> None:
    other = mixed(turn="q")
    assert module(RIGHT, other, norm=2 * KEY).startswith("torch: rotary embedding of queries and keys")
    assert module(RIGHT, other, norm=3 * KEY) == ""


def test_nothing_is_named_in_a_module_that_is_no_attention() -> None:
    ours, theirs = (X @ RNG.standard_normal((12, H * D)) for _ in range(2))
    assert module(ours, theirs, heads=True) == ""


def test_a_mask_of_another_size_is_no_mask() -> None:
    masks = {f"torch's {shape}": np.zeros(shape) for shape in ((1, 1, 2, T), (1, 3, T, T), (5, 1, T, T))}
    ours, theirs = (inputs(output, masks=masks) for output in (RIGHT, mixed(scale=1.0)))
    assert attention_cause(ours, theirs, FLOOR) == "torch: scores times 1 / sqrt(8); JAX: scores not scaled"
    assert attention_cause(ours, inputs(UNKNOWN["all of it"](RIGHT), masks=masks), FLOOR) == ""


@pytest.mark.parametrize("dtype", [bool, np.int64, np.float32])
def test_a_mask_of_rows_and_keys_tells_which_keys_are_seen(dtype: type) -> None:
    seen = np.array([[1, 1, 0], [1, 0, 0]])
    features = np.zeros((2, 3, 8))
    side = _Mixing(
        (features,) * 3, features, {"mask": seen.astype(dtype), "x": features[..., :2]}, 3, exchanged=False
    )
    ((name, mask),) = _masks(side)
    assert name == "mask"
    np.testing.assert_array_equal(mask, seen[:, None, None] == 1)


def test_an_added_mask_keeps_its_numbers() -> None:
    added = np.array([[0, -1e9, -1e9], [0, 0, -1e9], [0, 0, 0]], np.float32)
    features = np.zeros((2, 3, 8))
    side = _Mixing((features,) * 3, features, {"mask": added}, 3, exchanged=False)
    ((_, mask),) = _masks(side)
    np.testing.assert_array_equal(mask, added[None, None])
