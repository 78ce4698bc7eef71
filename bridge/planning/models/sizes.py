"""Amounts and shares of memory as people write them: GB is 10**9 bytes, GiB is 2**30, 10% is a tenth."""

from __future__ import annotations

import re
from fractions import Fraction

from bridge.planning.models.errors import PlanError

_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}


def parse_bytes(text: str) -> int:
    """``"80GB"``, ``"79.5 GiB"`` or ``"1000B"``; fractions of a byte are dropped. Raises ``PlanError`` otherwise."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*+([A-Za-z]*)\s*+", text)
    if match is not None and not match[2]:
        raise PlanError(
            f"memory: expected an amount with its unit, got {text!r}; write {match[1]}GB (or {match[1]}B for bytes)"
        )
    if match is None or match[2].lower() not in _UNITS:
        raise PlanError(f"memory: expected an amount such as 80GB or 79.5GiB, got {text!r}")
    nbytes = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if not nbytes:
        raise PlanError(f"memory: expected at least one byte, such as 80GB, got {text!r}")
    return nbytes


def parse_share(text: str) -> Fraction:
    """``"10%"``, ``"7.5 %"`` or ``"0"``, from 0 to below 1. Raises ``PlanError`` otherwise."""
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*+(%?)\s*+", text)
    if match is None:
        raise PlanError(f"reserve: expected a share of the memory such as 10%, or 0, got {text!r}")
    share = Fraction(match[1]) / 100
    if share and not match[2]:
        raise PlanError(f"reserve: expected a share with its %, got {text!r}; write {match[1]}% (or 0)")
    if share >= 1:
        raise PlanError(f"reserve: expected less than 100%, got {text!r}")
    return share


def parse_counts(text: str, name: str = "devices") -> tuple[int, ...]:
    """``"8,64,512"``: numbers, each once. Raises ``PlanError`` that begins with ``name`` otherwise."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", word) for word in words):
        raise PlanError(f"{name}: expected numbers such as 8,64,512, each from 1 to 999999999, got {text!r}")
    return tuple(dict.fromkeys(map(int, words)))
