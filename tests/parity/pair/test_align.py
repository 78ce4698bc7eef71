"""How a torch array and its JAX twin lie to each other."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.parity.pair.align import align, match_leaves

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
    found = match_leaves(
        {"positions": numbers, "x": a, "y": b}, {"0": b.reshape(2, 3), "x": a, "1": numbers.reshape(2, 3)}
    )
    assert [(name, other) for name, other, _ in found] == [("positions", "1"), ("x", "x"), ("y", "0")]
