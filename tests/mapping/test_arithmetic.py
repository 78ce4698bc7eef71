"""One evaluator for all arithmetic in mappings: what it takes, and what it refuses."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.mapping.language.arithmetic import POWERS, PRODUCT, QUOTIENT, evaluate, names_in

VALUES = {"d": 16, "in": 9, "text.heads": 4, "{block}": 3}


@pytest.mark.parametrize(
    ("text", "operators", "value"),
    [
        ("4 * {block}", PRODUCT, 12),
        ("d ** -0.5 * 2", POWERS, 0.5),
        ("-2 ** 2", POWERS, 4.0),
        ("in ** 0.5", POWERS, 3.0),
        ("d // 5", QUOTIENT, 3),
        ("d / text.heads", QUOTIENT, 4),
    ],
)
def test_what_kinds_of_texts_may_say(text: str, operators: tuple[type, ...], value: float) -> None:
    assert set(names_in(text, operators)) <= VALUES.keys()
    evaluated = evaluate(text, VALUES)
    assert (evaluated, type(evaluated)) == (value, type(value))


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "d d",
            "d +",
            "(d)",
            "d + 1",
            "d(1)",
            "d[0]",
            "d.__class__()",
            "'d'",
            "d if d else d",
            "d := 1",
        ),
        *("lambda: d", "d, d", "d; d", "d # d", "d == d", "~d", "d @ d", "1e9", "é", "d" * 301, "1" * 41),
        *("*".join("d" * 200), "-" * 400 + "1"),
    ],
)
def test_all_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        names_in(text, POWERS)


def test_a_kind_of_text_takes_its_own_operators() -> None:
    for text, operators in (
        ("d ** 2", PRODUCT),
        ("d / 2", POWERS),
        ("2 * d", QUOTIENT),
        ("0.5 * d", PRODUCT),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            names_in(text, operators)


@given(st.text(alphabet="d2.*/-+ _{}()[],:='\"\\n"))
def test_any_text_is_a_number_or_an_error_of_its_own(text: str) -> None:
    for operators in (PRODUCT, POWERS, QUOTIENT):
        try:
            names = names_in(text, operators)
            evaluate(text, dict.fromkeys(names, 2))
        except (ValueError, ArithmeticError):
            pass
