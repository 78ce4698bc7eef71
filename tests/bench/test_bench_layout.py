"""Tests that the planner keeps its promises on all reference groups, and that the other rules are right."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from tests.bench.bench_layout import (
    MOST_MEDIAN,
    ROOT,
    SHARDS,
    SPEED_KINDS,
    Cell,
    as_printed,
    medians,
    notes_figures,
    percent,
    save_plot,
    speed_shapes,
    sweep,
    violations,
)
from tests.bench.layout_groups import reference_groups
from tests.bench.layout_rules import fsdp2_rule, lcm_layout, lcm_rule, row_bound


def test_the_lcm_rule_shares_a_chunk_and_fills_the_gap() -> None:
    # chunk 12:  0 (2,6)   | 12 (4,4) ..28 .(1,2). 32 (4,4)| 48 (1,6)
    layout = lcm_layout(((2, 6), (4, 4), (4, 4), (1, 2), (1, 6)))
    assert (layout.chunk, layout.offsets, layout.end) == (12, (0, 12, 32, 28, 48), 54)
    assert lcm_rule([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5) == 60
    assert lcm_rule([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 4) == 96
    assert lcm_rule([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 2, 8) == 96


@pytest.mark.parametrize(
    ("shapes", "offsets"),
    [
        # Chunk 4: 6 leaves a gap of 2; the remainder 3 of the first 7 does not fit, the remainder 1 of 5 does.
        (((6,), (7, 1), (5,), (1, 4)), (0, 12, 7, 20)),
        # Remainder 0 shares no chunk, and of the two with remainder 1 the first does.
        (((6,), (1, 4), (5,), (9,)), (0, 12, 7, 16)),
        # Nothing can share when remainders are 0; small ones fill by falling size, on their rows.
        (((3, 3), (1, 2), (2, 6), (5,), (1, 3)), (0, 30, 12, 24, 9)),
        # Two kinds of equal size keep model order; empty tensors take no room; a scalar is one element.
        (((1, 6), (6,), (0, 5), (), (2, 3), (1, 12)), (12, 18, 0, 30, 24, 0)),
    ],
)
def test_the_lcm_rule_by_hand(shapes: tuple[tuple[int, ...], ...], offsets: tuple[int, ...]) -> None:
    assert lcm_layout(shapes).offsets == offsets


def test_fsdp2_pads_each_parameter_to_whole_rows_per_rank() -> None:
    assert fsdp2_rule([(10, 3)], 4) == 3 * 4 * 3
    assert fsdp2_rule([(8, 3, 2), (5,), ()], 4) == 48 + 8 + 4


def test_the_row_bound_by_hand() -> None:
    assert row_bound([(10, 3)], 4) == 4 * 9  # 30 elements over 4 ranks, in rows of 3
    assert row_bound([(1, 100), (4,)], 8) == 8 * 100  # somebody holds the longest row
    assert row_bound([(10, 4), (10, 6), (3,)], 4) == 4 * 26  # 100 elements in twos, 3 vectors beside
    assert row_bound([(1, 100), (1, 3)], 8) == 8 * 100  # also when rows have no common divisor
    assert row_bound([(2, 3, 4)], 6) == 24  # the row of a stack is its last dimension
    assert row_bound([(7,)], 2) == 8
    assert row_bound([(0, 4)], 2) == 0
    assert row_bound([(10, 3)], 4, 8) == 4 * 16  # a shard of 9 is a tile and one more


@pytest.fixture(scope="module", params=[(256,), pytest.param(SHARDS, marks=pytest.mark.slow)])
def shards(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


@pytest.fixture(scope="module")
def cells(shards: tuple[int, ...]) -> list[Cell]:
    return sweep(reference_groups(), shards)


@pytest.mark.slow
def test_every_group_is_at_or_below_its_figures(cells: list[Cell], shards: tuple[int, ...]) -> None:
    assert len(cells) == 34 * len(shards)
    assert sum(cell.flat for cell in cells) == 25 * len(shards)
    assert violations(cells) == []


@pytest.mark.slow
@pytest.mark.parametrize("column", [0, 1], ids=["LCM", "FSDP2"])
def test_the_rules_give_the_figures_of_the_notes(cells: list[Cell], column: int) -> None:
    figures = notes_figures()
    assert len(figures) == 14 * len(SHARDS)
    for cell in cells:
        if (cell.group, cell.shards) in figures:
            figure = figures[cell.group, cell.shards][column]
            value = (cell.lcm, cell.fsdp2)[column]
            assert abs(value - float(figure)) <= 0.501 * 10 ** -len(figure.partition(".")[2]), cell


def test_each_kind_of_violation_is_reported(cells: list[Cell]) -> None:
    cell = next(c for c in cells if (c.group, c.shards) == ("Llama3-8B layer", 256))

    def broken(**changes: float) -> list[str]:
        return violations([dataclasses.replace(cell, **changes)])

    assert broken() == []
    assert broken(ours=0.484) == []  # printed as .48
    assert broken(ours=0.486) == [
        "Llama3-8B layer, 256 shards: expected at most the notes' .48 %, got 0.4860 %"
    ]
    assert "the LCM rule's 0.0000 %" in broken(lcm=0.0, ours=0.001)[0]
    assert "at least the bound's 1.0000 %" in broken(bound=1.0)[0]
    assert "align=128: expected from the bound's" in broken(tiled_bound=99.0)[0]
    assert "align=128: expected from the bound's" in broken(tiled_lcm=0.0)[0]
    for n, most in MOST_MEDIAN.items():
        if n not in {c.shards for c in cells}:
            continue
        worse = [dataclasses.replace(c, ours=most + 0.01, lcm=1e9) if c.shards == n else c for c in cells]
        assert any(text.startswith(f"median over {n} shards: expected at most") for text in violations(worse))
        worse = [
            dataclasses.replace(c, tiled=most + 0.01, tiled_lcm=1e9) if c.shards == n else c for c in cells
        ]
        assert any(text.startswith(f"median over {n} shards, align=128: ") for text in violations(worse))


def test_alignment_costs_next_to_nothing_on_usual_widths_and_tensors_start_on_tiles(
    cells: list[Cell],
) -> None:
    assert sum(not cell.starts for cell in cells) <= 1
    assert sum(cell.auto_align != 128 for cell in cells) <= 14
    for cell in cells:
        if cell.group.startswith(("Llama", "Mixtral")) and cell.shards <= 1024:
            assert cell.tiled - cell.ours < 0.07, cell


def test_medians_are_by_shards(cells: list[Cell]) -> None:
    three = [dataclasses.replace(cells[0], shards=8, ours=x, lcm=9.0) for x in (5.0, 1.0, 2.0)]
    by_shards = medians([*three, dataclasses.replace(cells[0], shards=64, ours=7.0)])
    assert {n: row["ours"] for n, row in by_shards.items()} == {8: 2.0, 64: 7.0}
    assert by_shards[8]["lcm"] == 9.0


def test_figures_are_rounded_as_they_are_printed() -> None:
    assert as_printed(0.0149, ".01") == 0.01
    assert as_printed(99.6, "100") == 100
    assert as_printed(3.84, "3.8") == 3.8
    texts = [percent(x) for x in (0.0, 0.004, 0.024, 0.5, 2.04, 9.96, 1326.4)]
    assert texts == ["0", "<.01", "0.02", "0.50", "2.0", "10", "1,326"]


def test_the_large_cases_have_their_number_of_rows() -> None:
    for case, rows in zip(SPEED_KINDS, (5, 23, 20_000), strict=True):
        shapes = speed_shapes(case)
        assert len(shapes) == 100_000
        assert len({shape[1] for shape in shapes.values() if len(shape) > 1}) == rows


def test_the_script_prints_one_group_and_draws(tmp_path, cells: list[Cell]) -> None:
    command = [sys.executable, "-m", "tests.bench.bench_layout", "--groups", "gpt-2 xl", "--shards", "8,64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| GPT-2 XL layer | 0.43 / 0 / **" in done.stdout
    assert "SigLIP" not in done.stdout
    assert done.stdout.endswith("Ours pads no more than allowed in every case.\n")
    save_plot(cells, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000
