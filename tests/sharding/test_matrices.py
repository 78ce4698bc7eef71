"""Which shard orthogonalizes which matrix, and which matrices travel together."""

from __future__ import annotations

from bridge.core.sharding.layout.matrices import balanced, cost, num_cut, owner_of_all, rounds


def test_the_cost_is_the_number_of_multiplications_of_a_newton_schulz_iteration() -> None:
    def product(left: tuple[int, int], right: tuple[int, int]) -> tuple[tuple[int, int], int]:
        assert left[1] == right[0]
        return (left[0], right[1]), left[0] * left[1] * right[1]

    x = (3, 5)
    gram, first = product(x, (5, 3))
    square, second = product(gram, gram)
    _, third = product(square, x)
    assert cost((3, 5)) == cost((5, 3)) == first + second + third


def test_matrices_inside_of_which_a_shard_ends_are_cut() -> None:
    # Three matrices of 4 rows; shards end after rows 4, 6, 6 and 12.
    assert num_cut((3, 4, 2), (0, 4, 6, 6, 12)) == 1
    assert num_cut((3, 4, 2), (0, 1, 3, 9, 12)) == 2
    assert num_cut((4, 2), (0, 4)) == 0


def test_one_shard_with_rows_owns_all_of_them() -> None:
    assert owner_of_all([0, 0, 5]) == 2
    assert owner_of_all([1, 0, 5]) is None
    assert owner_of_all([0, 0]) == 0


def test_matrices_go_to_whoever_is_done_first_the_large_ones_first() -> None:
    # The loads become 8 and 5, 8 and 9, 11 and 9, 11 and 11, 12 and 11.
    assert balanced([1.0, 8.0, 2.0, 4.0, 3.0], [0.0, 5.0]) == [0, 0, 1, 1, 0]
    assert balanced([2.0, 2.0], [0.0, 0.0, 9.0]) == [0, 1]


def test_a_round_has_of_each_owner_as_many_elements_as_may_travel_or_one_matrix() -> None:
    assert rounds([0, 1, 0, 1], [10, 4, 3, 5], 9) == [[0, 1, 3], [2]]
    assert rounds([0, 0, 0], [3, 3, 3], 6) == [[0, 1], [2]]
