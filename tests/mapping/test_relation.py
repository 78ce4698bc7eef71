"""Region reads through axis expressions, against einops on whole arrays."""

from __future__ import annotations

import math

import einops
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.formats.tensors.base import DTYPES, Box
from bridge.core.mapping.language import relation
from bridge.core.mapping.language.entries import Entry, Rule
from bridge.core.mapping.language.expression import Affine
from bridge.core.mapping.language.relation import Block, TensorView, identity, whole_source
from bridge.core.mapping.one_rule.apply import apply_rule
from bridge.core.mapping.one_rule.instance import Axes
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.memory_reader import MemoryReader
from tests.support.examples import examples


def views(rule: Rule, source: str, reader: MemoryReader, sizes: dict[str, int]) -> dict[str, TensorView]:
    target = "jax" if source == "torch" else "torch"
    return dict(apply_rule(rule, source, target, reader.tensors, Axes(sizes, {}, {})))


def rule(torch: str | list[str], jax: str | list[str]) -> Rule:
    sides = [[side] if isinstance(side, str) else side for side in (torch, jax)]
    torch_side, jax_side = (tuple(Entry.parse(text) for text in side) for side in sides)
    return Rule({"torch": torch_side, "jax": jax_side})


@st.composite
def factorization(draw: st.DrawFn, axes: list[str]) -> str:
    """A random order of the axes, randomly grouped into composite ones, with an axis of size one here and there."""
    order = draw(st.permutations(axes))
    words: list[str] = []
    while order:
        count = draw(st.integers(1, len(order)))
        group, order = order[:count], order[count:]
        words.append(group[0] if count == 1 else f"({' '.join(group)})")
        if draw(st.integers(0, 4)) == 0:
            words.append("1")
    return " ".join(words)


@st.composite
def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - low)) for size, low in zip(shape, offsets, strict=True))
    return Box(offsets, sizes)


@examples(300)
@given(st.data())
def test_any_box_of_any_regrouping_equals_einops_on_the_whole_array(data: st.DataObject) -> None:
    axes = ["a", "b", "c", "d", "e"][: data.draw(st.integers(1, 5))]
    sizes = {axis: data.draw(st.integers(0 if k == 0 else 1, 5)) for k, axis in enumerate(axes)}
    left, right = data.draw(factorization(axes)), data.draw(factorization(axes))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    numbers = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in axes])
    names = " ".join(axes)
    # einops cannot handle every dtype: it arranges positions, which then pick from the random bits.
    bits = random_bits((numbers.size,), dtype, data.draw(st.integers(0, 99)))
    source = bits[einops.rearrange(numbers, f"{names} -> {left}")]
    expected = bits[einops.rearrange(numbers, f"{names} -> {right}")]

    reader = MemoryReader("dcp", {"w": source})
    (view,) = views(rule(f"w : {left}", f"w : {right}"), "torch", reader, sizes).values()
    assert view.shape == expected.shape
    box = data.draw(box_in(expected.shape))
    assert same_bits(view.read(reader, box), np.array(expected[box.slices()], order="C"))


@examples(150)
@given(st.data())
def test_fused_and_stacked_tensors_equal_numpy_both_ways(data: st.DataObject) -> None:
    layers, groups, r, d, m = (data.draw(st.integers(1, 4)) for _ in range(5))
    fused = rule(
        "layers.{i}.qkv : (g (r d + k + v)) m", ["q : {i} m (g r) d", "k : m {i} g k", "v : {i} m (g v)"]
    )
    sizes = {"r": r, "d": d, "k": d, "v": d}
    torch = [random_bits((groups, (r + 2) * d, m), np.dtype(np.float32), i) for i in range(layers)]
    q = np.stack([w[:, : r * d].reshape(groups * r, d, m).transpose(2, 0, 1) for w in torch])
    k = np.stack([w[:, r * d : (r + 1) * d].transpose(2, 0, 1) for w in torch], axis=1)
    v = np.stack([w[:, (r + 1) * d :].reshape(groups * d, m).T for w in torch])
    jax = {"q": q, "k": k, "v": v}
    flat = {f"layers.{i}.qkv": w.reshape(-1, m) for i, w in enumerate(torch)}

    for source, arrays, expected in (("torch", flat, jax), ("jax", jax, flat)):
        reader = MemoryReader("dcp" if source == "torch" else "orbax", arrays)
        made = views(fused, source, reader, sizes)
        assert made.keys() == expected.keys()
        for name, view in made.items():
            assert view.shape == expected[name].shape
            box = data.draw(box_in(view.shape))
            assert same_bits(view.read(reader, box), np.array(expected[name][box.slices()], order="C"))


def test_a_thin_slice_reads_a_thin_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relation, "SMALL_READ_BYTES", 64)
    weight = random_bits((8 * 40, 64), np.dtype(np.float32), 1)
    reader = MemoryReader("dcp", {"wq": weight})
    (view,) = views(rule("wq : (h d) m", "q : m h d"), "torch", reader, {"d": 40}).values()
    got = view.read(reader, Box((3, 0, 7), (1, 8, 1)))
    assert same_bits(got, np.array(weight.T.reshape(64, 8, 40)[3:4, :, 7:8], order="C"))
    assert reader.largest_read <= 16


def test_a_large_region_is_split_into_bounded_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relation, "READ_BYTES", 4096)
    monkeypatch.setattr(relation, "SMALL_READ_BYTES", 256)
    weight = random_bits((160, 96), np.dtype(np.float32), 2)
    reader = MemoryReader("dcp", {"w2": weight})
    (view,) = views(rule("w2 : m f", "down : f m"), "torch", reader, {}).values()
    assert same_bits(view.read(reader, Box.whole((96, 160))), np.array(weight.T, order="C"))
    assert reader.largest_read <= 1024
    assert reader.reads <= 160 * 96 * 4 // 4096 * 4


@pytest.mark.parametrize(
    ("h", "d", "small", "largest", "reads"),
    [
        # The rows of `a` follow each other: only `h` has elements between that nobody wants.
        (4, 10, 8, 1 << 20, 4),
        # Half of the elements are wanted, and the region has the largest size that is read.
        (2, 3, 8, 6 * 4 * 4, 1),
        # The region has the size up to which all of it is read.
        (4, 10, 6 * 31 * 4, 0, 1),
    ],
)
def test_a_region_is_split_where_it_has_unwanted_elements(
    monkeypatch: pytest.MonkeyPatch, h: int, d: int, small: int, largest: int, reads: int
) -> None:
    monkeypatch.setattr(relation, "SMALL_READ_BYTES", small)
    monkeypatch.setattr(relation, "READ_BYTES", largest)
    weight = random_bits((6, h * d), np.dtype(np.float32), 3)
    reader = MemoryReader("dcp", {"w": weight})
    (view,) = views(rule("w : a (h d)", "x : d a h"), "torch", reader, {"d": d}).values()
    got = view.read(reader, Box((1, 0, 0), (1, 6, h)))
    assert same_bits(got, np.array(weight.reshape(6, h, d).transpose(2, 0, 1)[1:2], order="C"))
    assert reader.reads == reads


def test_a_view_of_a_whole_tensor_is_known() -> None:
    dtype = np.dtype(np.float32)
    whole = identity("w", (2, 3), dtype)
    assert whole_source(whole) == "w"
    (block,) = whole.blocks
    turned = Block("w", block.source_index, block.target_index[::-1], block.sizes)
    assert whole_source(TensorView((3, 2), dtype, (turned,))) is None
    rows = tuple(Block(n, (Affine(0, ()),), (Affine(k, ()),), {}) for k, n in enumerate("ab"))
    assert whole_source(TensorView((2,), dtype, rows)) is None
    assert whole_source(np.zeros((2, 3))) is None


def test_a_view_with_missing_elements_is_refused() -> None:
    index = Entry.parse("w : a b").expression
    assert index is not None
    (plain,) = index.alternatives({"a": 2, "b": 3})
    block = Block("w", plain, plain, {"a": 2, "b": 3})
    with pytest.raises(ValueError, match=r"expected 8 elements for shape \(2, 4\), got 6"):
        TensorView((2, 4), np.dtype(np.float32), (block,))
