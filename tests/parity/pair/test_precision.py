"""What a low compute dtype does to each side, and when that is a fault of one module."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bridge.parity.partners.rows import Row, row_of
from bridge.parity.stages.forward import odd_ones, precision_rows
from bridge.parity.stages.rerun_module import Rounding

X = np.ones((16, 32))
ALIKE = Rounding(1.0, 1.0, 0.0)
ELSEWHERE = Rounding(1.0, 1.0, 1.0)
COARSE = Rounding(1.0, 3.0, 2.5)


def verdicts(*roundings: tuple[str, Rounding]) -> list[str]:
    rows: list[Row] = []
    for number, (module_class, rounding) in enumerate(roundings):
        forward = row_of("forward", (f"m{number}", f"m{number}"), X, X, 1.0, kind=module_class, local=0.0)
        rows += precision_rows(forward, [""], {"": rounding}, "bfloat16")
    return [row.verdict for row in odd_ones(rows)]


def test_a_module_that_rounds_unlike_its_peers_is_named() -> None:
    assert verdicts(("Norm", ALIKE), ("Norm", ELSEWHERE), ("Norm", ALIKE)) == ["same", "introduced", "same"]
    assert verdicts(("Norm", ALIKE), ("Norm", COARSE)) == ["same", "introduced"]


def test_kernels_that_round_elsewhere_in_all_modules_of_a_kind_are_no_fault() -> None:
    assert verdicts(("BatchNorm", ELSEWHERE), ("BatchNorm", COARSE)) == ["same", "same"]
    assert verdicts(("Attention", ELSEWHERE), ("Norm", ALIKE)) == ["same", "same"]


def test_one_side_that_loses_much_more_is_named_where_no_peer_says_otherwise() -> None:
    assert verdicts(("Norm", COARSE), ("Linear", ALIKE)) == ["introduced", "same"]


def test_float32_has_no_rows() -> None:
    forward = replace(row_of("forward", ("m", "m"), X, X, 1.0), kind="Norm")
    assert list(precision_rows(forward, [""], {"": COARSE}, "float32")) == []


def test_a_module_whose_values_one_side_computes_without_a_loss_has_no_row() -> None:
    forward = replace(row_of("forward", ("m", "m"), X, X, 1.0), kind="Norm")
    for rounding in (Rounding(0.0, 0.0, 0.0), Rounding(0.0, 3.0, 3.0)):
        assert list(precision_rows(forward, [""], {"": rounding}, "bfloat16")) == []
