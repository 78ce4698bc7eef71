"""Tests of the compilers' benchmark: the compiled settings, and the text of a row."""

from __future__ import annotations

import pytest

from jax_impl.diagnostics.scheduled import Array, Scheduled
from tests.bench import bench_compilers
from tests.support.compilers.setting import CONTESTANTS, Compiled, Setting


def settings(*arguments: str) -> list[list[Setting]]:
    return list(bench_compilers._tables("h100:8", bench_compilers._options(arguments)))


def test_contestants_of_a_table_share_everything_else_and_engines_come_with_other_units_too():
    tables = settings()
    assert [(table[0].size, table[0].stacked, table[0].recompute) for table in tables] == [
        ("1024", False, False),
        ("1024", False, True),
        ("1024", True, False),
        ("1024", True, True),
        ("Llama-3-8B", True, True),
    ]
    for table in tables:
        assert [row.contestant for row in table] == [*CONTESTANTS, "shard_map", "pjit"]
        assert [bool(row.units) for row in table] == [False] * 4 + [True] * 2
        assert len({(row.stacked, row.recompute, row.dtype, row.rows, row.length) for row in table}) == 1
    (quick,) = settings("--quick", "--recommended")
    assert {(row.size, row.recommended) for row in quick} == {("256", True)}
    (one_table,) = settings("--size", "1024", "--layers", "scan", "--recompute", "yes")
    assert one_table[0].stacked
    assert one_table[0].recompute


def test_an_unknown_target_is_refused_with_what_was_expected(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench_compilers._options(["--target", "h100:9"])
    assert "a multiple of 8, such as h100:8" in capsys.readouterr().err


def test_a_row_has_number_bytes_and_overlap_without_scalars_and_says_what_failed():
    gathers = Scheduled("all_gather", (Array("f32", 1_000_000),), 3, True, "a")
    reduced = Scheduled("reduce_scatter", (Array("f32", 2_000_000),), 1, False, "r")
    scalar = Scheduled("psum", (Array("f32", 1),), 1, False, "loss")
    compiled = Compiled(2.4, 5_000_000, (gathers, reduced, scalar))
    rows = [
        (Setting("h100:8", "pjit"), compiled),
        (Setting("h100:8", "by hand"), "RuntimeError:\nno  memory"),
    ]
    lines = list(bench_compilers._table(rows))
    assert "| pjit engine | 2 | 5 | 3, 12, 100% | 1, 8, 0% | 0 |" in lines
    assert "| by hand | failed: RuntimeError: no memory | | | | |" in lines
