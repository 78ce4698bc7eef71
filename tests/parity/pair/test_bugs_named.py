"""Planted bugs are named, and right pairs are the same."""

from __future__ import annotations

import pytest

from tests.support.parity.bugs import BUGS, FRESH_BUGS, Bug
from tests.support.parity.pair_tools import compare_pair
from tests.support.parity.pairs import FRESH, FURTHER, PAIRS, build

SHARE = 0.95
SEEDS = range(20)
# Small ones that compile fast, for every test run.
QUICK = ("convnet, jax: stale variance", "tied, torch: kernel not trained by the decoder")


def wrong_name(bug: Bug) -> str | None:
    """None where the first place that is named is the right one."""
    pair = build(bug.pair, 0)
    bug.apply(pair)
    report = compare_pair(pair, dtype=bug.dtype)
    first = report.first_divergence
    if first is None:
        return f"{bug.name}: nothing found"
    stored = {name for row in report.stage("weights") for name in row.name.split(", ")}
    if bug.parameter in stored:
        right = first.stage == "weights" and bug.parameter in first.name.split(", ")
    else:
        right = first.stage != "weights" and first.name in (bug.module, bug.also)
    if right and bug.direction == "backward":
        right = first.stage in ("backward", "gradients")
    return (
        None if right else f"{bug.name}: expected {bug.module or 'the root'}, got {first.stage} {first.name}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_small_pairs_bugs_are_named(name: str) -> None:
    (bug,) = (bug for bug in BUGS + FRESH_BUGS if bug.name == name)
    assert wrong_name(bug) is None


# Some 6 s each on an idle machine, and more than the usual limit together.
@pytest.mark.timeout(5400)
@pytest.mark.slow
def test_nearly_all_planted_bugs_are_named() -> None:
    _judge(BUGS)


@pytest.mark.timeout(5400)
@pytest.mark.slow
def test_nearly_all_bugs_of_the_fresh_pairs_are_named() -> None:
    _judge(FRESH_BUGS)


def _judge(bugs: tuple[Bug, ...]) -> None:
    wrong = [said for said in map(wrong_name, bugs) if said is not None]
    assert len(bugs) >= 60
    assert len(wrong) <= (1 - SHARE) * len(bugs), "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_right_pairs_are_the_same_over_many_seeds(name: str) -> None:
    for seed in SEEDS:
        report = compare_pair(build(name, seed), steps=2 if seed == 0 else 0)
        assert report.same, f"seed {seed}: {report.summary()}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FURTHER, *FRESH])
def test_pairs_of_hand_written_mappings_are_the_same(name: str) -> None:
    for seed in range(3):
        report = compare_pair(build(name, seed), steps=2)
        assert report.same, f"seed {seed}: {report.summary()}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "vit"])
def test_right_pairs_are_the_same_in_bfloat16(name: str) -> None:
    report = compare_pair(build(name, 0), dtype="bfloat16")
    assert report.same, report.summary()
