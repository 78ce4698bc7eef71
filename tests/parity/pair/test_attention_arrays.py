"""What an attention's own arrays are read as: sizes of heads, tables of angles, masks, and query, key and value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.parity.causes import attention_in_module as module

B, T, H, D = 2, 5, 3, 4
RNG = np.random.default_rng(0)


def mixing(**options: Any) -> module._Mixing:
    arrays = {
        "projected": tuple(RNG.normal(size=(B, T, H * D)) for _ in range(3)),
        "mixed": RNG.normal(size=(B, T, H * D)),
        "module_inputs": {},
    }
    return module._Mixing(**{**arrays, "length": T, "exchanged": False, **options})


def pair_of(heads: Any = ((), ()), outputs: dict[str, np.ndarray] | None = None) -> Any:
    return SimpleNamespace(
        torch=SimpleNamespace(heads=heads, outputs=outputs or {}), jax=SimpleNamespace(heads=((), ()))
    )


def angles(n: int, shape: tuple[int, ...] = (T,)) -> tuple[np.ndarray, np.ndarray]:
    turn = RNG.normal(size=(*shape, n))
    return np.cos(turn), np.sin(turn)


def tables(**inputs: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return dict(module._tables(mixing(module_inputs=inputs)))


@pytest.mark.parametrize("stored", ["once", "halves", "pairs"])
def test_each_angle_of_a_table_counts_once(stored: str) -> None:
    cos, sin = angles(D // 2)
    double = {
        "once": lambda x: x,
        "halves": lambda x: np.concatenate([x, x], -1),
        "pairs": lambda x: np.repeat(x, 2, -1),
    }[stored]
    ((name, (first, second)),) = tables(cos=double(cos), sin=double(sin)).items()
    assert name == "cos"
    np.testing.assert_array_equal(first, cos[None])
    np.testing.assert_array_equal(second, sin[None])


def test_tables_may_have_batches_and_axes_of_one() -> None:
    cos, sin = angles(3, (B, T))
    ((first, second),) = tables(c=cos[:, :, None], s=sin[:, :, None]).values()
    np.testing.assert_array_equal(first, cos)
    np.testing.assert_array_equal(second, sin)


def test_other_inputs_are_no_tables() -> None:
    cos, sin = angles(3)
    assert tables(cos=cos, sin=sin * 1.1) == {}
    assert tables(cos=cos, sin=sin[:, :2]) == {}
    assert tables(cos=cos.astype(np.int64), sin=sin.astype(np.int64)) == {}
    assert tables(cos=cos[0], sin=sin[0]) == {}
    assert tables(cos=cos[:, :0], sin=sin[:, :0]) == {}
    four = angles(3, (2, 2, 2))
    assert tables(cos=four[0], sin=four[1]) == {}


def masks(mask: np.ndarray) -> dict[str, np.ndarray]:
    return dict(module._masks(mixing(module_inputs={"mask": mask})))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((B, T), (B, 1, 1, T)),
        ((T, T), (1, 1, T, T)),
        ((1, T), (1, 1, 1, T)),
        ((B, T, T), (B, 1, T, T)),
        ((1, T, T), (1, 1, T, T)),
        ((B, H, T, T), (B, H, T, T)),
        ((B, 1, 1, T), (B, 1, 1, T)),
        ((T + 2, T + 3), (1, 1, T, T)),
    ],
)
def test_masks_of_every_layout(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    mask = RNG.integers(0, 2, shape)
    (read,) = masks(mask).values()
    assert (read.shape, read.dtype) == (expected, bool)
    whole = mask[:T, :T] if shape == (T + 2, T + 3) else mask
    np.testing.assert_array_equal(read, whole.reshape(expected) != 0)


@pytest.mark.parametrize(
    "shape", [(T - 1, T), (T, T - 1), (B + 1, T, T), (B + 1, 1, 1, T), (B, 1, T - 2, T), (T,)]
)
def test_arrays_of_other_shapes_are_no_masks(shape: tuple[int, ...]) -> None:
    assert masks(np.ones(shape)) == {}


def test_masks_that_are_added_keep_their_numbers() -> None:
    added = np.where(np.tri(T) > 0, 0.0, -1e9).astype(np.float32)
    (read,) = masks(added).values()
    assert read.dtype == np.float64
    np.testing.assert_array_equal(read[0, 0], added)
    (positive,) = masks(np.tri(T, dtype=np.float32)).values()
    assert positive.dtype == bool


def test_sizes_of_heads_come_from_arrays_modules_weights_and_tables_in_this_order() -> None:
    sizes = module._sizes
    split = mixing(mixed=RNG.normal(size=(B, T, H, 7)))
    assert sizes(pair_of(), split, mixing(), {}) == ([7], [])
    wide = mixing(mixed=RNG.normal(size=(B, T, 48)))
    weights = {"weights": np.zeros((B, 4, T, T)), "other": np.zeros((B, 6, T + 1, T))}
    found = sizes(pair_of(((16,), (24,)), weights), wide, mixing(), {"cos": angles(3)})
    assert found == ([3, 24, 12, 6, 16, 8], [])


def test_without_a_hint_other_divisors_come_after_the_usual_sizes() -> None:
    narrow = mixing(mixed=RNG.normal(size=(B, T, 6)))
    assert module._sizes(pair_of(), narrow, narrow, {}) == ([], [2, 3, 6])
    usual = mixing(mixed=RNG.normal(size=(B, T, 24)))
    assert module._sizes(pair_of(), usual, usual, {}) == ([8], [2, 3, 4, 6, 12, 24])
    many = mixing(mixed=RNG.normal(size=(1, T, 2**4 * 3**3 * 5)))
    assert len(module._sizes(pair_of(), many, many, {})[1]) == 24


def test_rows_of_arrays() -> None:
    x = RNG.normal(size=(B, T, H, D))
    flat = x.reshape(B, T, H * D)
    for array in (flat, x, x.swapaxes(1, 2)):
        rows = module._rows(array, T)
        assert rows is not None
        np.testing.assert_array_equal(rows, flat)
    rows = module._rows(flat[0], T)
    assert rows is not None
    np.testing.assert_array_equal(rows, flat[:1])


def inputs(side: module._Mixing, size: int, way: str = "") -> Any:
    return module._inputs(side, size, way, {}, {})


def test_query_key_and_value_from_their_own_projections() -> None:
    grouped = tuple(RNG.normal(size=(B, T, n * D)) for n in (4, 2, 2))
    read = inputs(mixing(projected=grouped, mixed=RNG.normal(size=(B, T, 4 * D))), D)
    for array, whole, heads in zip((read.query, read.key, read.value), grouped, (4, 2, 2), strict=True):
        np.testing.assert_array_equal(array, whole.reshape(B, T, heads, D))


@pytest.mark.parametrize("way", ["heads", "blocks"])
def test_query_key_and_value_from_one_projection(way: str) -> None:
    heads, shared = 4, 2
    q, k, v = (RNG.normal(size=(B, T, n, D)) for n in (heads, shared, shared))
    if way == "blocks":
        whole = np.concatenate([q, k, v], 2)
    else:
        grouped = q.reshape(B, T, shared, -1, D)
        whole = np.concatenate([grouped, k[:, :, :, None], v[:, :, :, None]], 3)
    side = mixing(projected=(whole.reshape(B, T, -1),), mixed=RNG.normal(size=(B, T, heads * D)))
    read = inputs(side, D, way)
    for array, expected in zip((read.query, read.key, read.value), (q, k, v), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_arrays_that_do_not_fit_are_no_inputs() -> None:
    assert inputs(mixing(), 5) is None
    uneven = tuple(RNG.normal(size=(B, T, n * D)) for n in (3, 2, 2))
    assert inputs(mixing(projected=uneven, mixed=RNG.normal(size=(B, T, 3 * D))), D) is None
    other = tuple(RNG.normal(size=(B, T, n * D)) for n in (3, 3, 1))
    assert inputs(mixing(projected=other), D) is None
    odd = mixing(projected=(RNG.normal(size=(B, T, (H + 3) * D)),))
    assert [inputs(odd, D, way) for way in ("heads", "blocks")] == [None, None]
    batches = mixing(mixed=RNG.normal(size=(B + 1, T, H * D)))
    assert inputs(batches, D) is None


SAME = SimpleNamespace(to_jax=lambda x: x)


def call(name: str, x: np.ndarray, y: np.ndarray) -> Any:
    return SimpleNamespace(
        torch=SimpleNamespace(inputs={"0": x}, outputs={"0": y}),
        jax=SimpleNamespace(inputs={"0": x}),
        inputs=[("0", "0", SAME)],
        outputs=[("0", "0", SAME)],
        modules=SimpleNamespace(torch=f"block.{name}"),
    )


def attention(names: str, projection: bool) -> tuple[Any, Any, dict[str, np.ndarray], dict[int, Any]]:
    """An attention, the modules inside, JAX's outputs, and JAX's inputs of the modules inside."""
    x = RNG.normal(size=(B, T, 6))
    inner = [call(name, x, RNG.normal(size=(B, T, H * D))) for name in names]
    out = RNG.normal(size=(B, T, H * D))
    jax_inputs = {number: {"0": x} for number in range(len(inner))}
    if projection:
        inner.append(call("o", out, RNG.normal(size=(B, T, 6))))
        jax_inputs[len(names)] = {"0": out + 1}
    return call("", x, out), SimpleNamespace(pairs=inner), {"0": out + 2}, jax_inputs


def mixings(*arguments: Any) -> list[tuple[module._Mixing, module._Mixing]]:
    return list(module._mixings(*arguments))


@pytest.mark.parametrize("projection", [True, False])
def test_what_an_attention_mixes_goes_into_its_last_projection_or_out_of_it(projection: bool) -> None:
    pair, inner, outputs, jax_inputs = attention("vkq", projection)
    read = mixings(pair, inner, outputs, jax_inputs)
    # The first order is that of the names, however the modules are called; then the other five.
    torch, jax = read[0]
    by_name = {child.modules.torch[-1]: child.torch.outputs["0"] for child in inner.pairs}
    assert [torch.projected[k] is by_name[role] for k, role in enumerate("qkv")] == [True] * 3
    assert [side.exchanged for side, _ in read[:6]] == [False, True, True, True, True, True]
    assert torch.mixed is pair.torch.outputs["0"]
    np.testing.assert_array_equal(jax.mixed, torch.mixed + (1 if projection else 2))
    assert (torch.length, jax.length) == (T, T)


def test_without_names_of_roles_the_order_of_calls_comes_first() -> None:
    pair, inner, outputs, jax_inputs = attention("cab", True)
    torch, _ = mixings(pair, inner, outputs, jax_inputs)[0]
    assert [
        x is child.torch.outputs["0"] for x, child in zip(torch.projected, inner.pairs, strict=False)
    ] == [True] * 3


def test_a_fault_before_the_mixing_is_not_in_it() -> None:
    pair, inner, outputs, jax_inputs = attention("qkv", True)
    jax_inputs[1]["0"] = jax_inputs[1]["0"] * 1.01
    assert mixings(pair, inner, outputs, jax_inputs) == []
    pair, inner, outputs, jax_inputs = attention("qkv", False)
    del jax_inputs[2]
    assert mixings(pair, inner, outputs, jax_inputs) == []
    assert mixings(pair, SimpleNamespace(pairs=[]), outputs, {}) == []


def test_two_or_four_projections_are_no_attention() -> None:
    for names in ("qk", "qkvw"):
        assert mixings(*attention(names, True)) == []
    one = mixings(*attention("q", True))
    assert [len(torch.projected) for torch, _ in one] == [1]
