"""How a torch array and its JAX twin lie to each other."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.parity.recorded.align import Moves, align, match_leaves

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4, 5))


@pytest.mark.parametrize(
    ("twin", "words"),
    [
        (X, ""),
        (X.reshape(2, 3, 20), "reshape"),
        (X.transpose(0, 2, 3, 1), "axes (0, 2, 3, 1)"),
        (X.transpose(0, 2, 1, 3).reshape(2, 4, 15), "axes (0, 2, 1, 3), reshape"),
    ],
)
def test_values_decide_between_the_ways_that_shapes_allow(twin: np.ndarray, words: str) -> None:
    for noise in (0.0, 1e-3):
        seen = twin + noise * RNG.standard_normal(twin.shape)
        way = align(X, seen)
        assert way is not None
        assert str(way) == words
        assert np.array_equal(way.to_jax(X), twin)
        assert np.array_equal(way.to_torch(twin), X)
        back = align(seen, X)
        assert back is not None
        assert np.array_equal(back.to_jax(twin), X)


def test_axes_of_one_size_are_moved_only_where_nothing_else_explains_the_values() -> None:
    square = RNG.standard_normal((4, 3, 3))
    moved = align(square, square.transpose(0, 2, 1))
    assert moved is not None
    assert str(moved) == "axes (0, 2, 1)"
    # Nearly equal as they are, and nearer by no order of axes.
    plain = align(square, square + 0.1 * RNG.standard_normal(square.shape))
    assert plain is not None
    assert str(plain) == ""


def test_other_sizes_have_no_way() -> None:
    assert align(X, X[:1]) is None
    copies = np.stack([X[0]] * 3)
    way = align(copies, X[0])
    assert way is not None
    assert str(way) == "one of 3 copies"
    assert np.array_equal(way.to_jax(copies), X[0])
    assert np.array_equal(way.to_torch(X[0]), copies)
    assert align(np.zeros((2, 3)), np.zeros((3, 2))) is not None


def test_leaves_go_by_name_and_then_by_order() -> None:
    a, b, numbers = RNG.standard_normal(6), RNG.standard_normal(6), np.arange(6)
    matched = match_leaves(
        {"positions": numbers, "x": a, "y": b}, {"0": b.reshape(2, 3), "x": a, "1": numbers.reshape(2, 3)}
    )
    assert [(name, other) for name, other, _ in matched] == [("positions", "1"), ("x", "x"), ("y", "0")]


LAST = ((0, 2, 3, 1), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("torch", "jax", "known", "moves"),
    [
        # Square images, a faulty output: the noise does not exchange height and width.
        ((4, 6, 7, 7), (4, 7, 7, 6), (), LAST),
        # As many rows as channels: the rows stay where they are.
        ((4, 4, 5, 5), (4, 5, 5, 4), (), LAST),
        # As many heads as tokens: other arrays tell, and without them the axes stay.
        ((2, 4, 4, 8), (2, 4, 4, 8), (), ((0, 1, 2, 3), (0, 1, 2, 3))),
        ((2, 4, 4, 8), (2, 4, 4, 8), (((0, 2, 1, 3), (0, 1, 2, 3)),), ((0, 2, 1, 3), (0, 1, 2, 3))),
        ((2, 4, 4, 8), (2, 4, 32), (((0, 2, 1, 3), (0, 1, 2)),), ((0, 2, 1, 3), (0, 1, 2))),
        # A sequence as long as its channels.
        ((3, 8, 8), (3, 8, 8), (((0, 2, 1), (0, 1, 2)),), ((0, 2, 1), (0, 1, 2))),
        # What other arrays do is no way here.
        ((4, 6, 7, 7), (4, 7, 7, 6), (((0, 2, 1, 3), (0, 1, 2, 3)),), LAST),
    ],
)
@pytest.mark.parametrize("seed", range(8))
def test_noise_chooses_no_layout(
    torch: tuple[int, ...], jax: tuple[int, ...], known: tuple[Moves, ...], moves: Moves, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    way = align(rng.standard_normal(torch), rng.standard_normal(jax), None, known)
    assert way is not None
    assert way.moves == moves
    assert way.certain == (moves in known)
    assert way.certain != way.doubt.startswith("layout not certain")


def test_a_layout_that_values_alone_choose_is_said_and_another_arrays_makes_it_usual() -> None:
    x = RNG.standard_normal((4, 6, 7, 7))
    turned = align(x, x.transpose(0, 3, 2, 1))
    assert turned is not None
    assert turned.axes == (0, 3, 2, 1)
    assert "values alone chose axes (0, 3, 2, 1), where shapes allow axes (0, 2, 3, 1)" in turned.doubt
    known = align(x, x.transpose(0, 3, 2, 1), None, (turned.moves,))
    assert known is not None
    assert (known.moves, known.doubt) == (turned.moves, "")
    plain = align(x, x.transpose(0, 2, 3, 1))
    assert plain is not None
    assert (plain.certain, plain.doubt) == (True, "")


def test_a_reshape_that_mixes_axes_is_no_layout() -> None:
    # A port that reshapes [C, H, W] to [H, W, C] instead of moving the axis has other numbers at each place.
    x = RNG.standard_normal((2, 3, 5, 5))
    way = align(x, x.reshape(2, 5, 5, 3))
    assert way is not None
    assert way.moves == LAST
    assert not np.array_equal(way.to_jax(x), x.reshape(2, 5, 5, 3))


def test_equal_numbers_have_the_usual_layout_without_a_doubt() -> None:
    zeros = align(np.zeros((2, 3, 4, 4)), np.zeros((2, 4, 4, 3)))
    assert zeros is not None
    assert (zeros.moves, zeros.doubt) == (LAST, "")


def test_of_few_elements_only_equal_ones_choose_a_layout() -> None:
    turned = np.array([[[0.0, 1.0], [-1.0, 0.0]]])
    # Its transposition is minus itself, and so nearer by chance.
    near, equal = align(turned, -0.6 * turned), align(turned, -turned)
    assert near is not None
    assert equal is not None
    assert (str(near), near.certain) == ("", False)
    assert (str(equal), equal.certain) == ("axes (0, 2, 1)", True)
