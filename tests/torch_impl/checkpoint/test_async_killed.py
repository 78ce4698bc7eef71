"""Runs on one and two ranks that are killed at any instant of their asynchronous saves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.killed_saves import Reference, Zygote, check_instants


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote("tests.support.torch_impl.killed_saves") as zygote:
        yield zygote


@pytest.fixture(scope="module")
def references(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return [Reference(zygote, tmp_path_factory.mktemp("whole"), world) for world in (1, 2)]


@pytest.mark.slow
def test_a_run_killed_at_some_instants_loses_nothing_committed_and_goes_on(
    tmp_path: Path, zygote: Zygote, references: list[Reference]
) -> None:
    check_instants(zygote, references, tmp_path, count=4, seed=0)


# In four parts, each of which ends before the time limit of a test.
@pytest.mark.slow  # 100 processes each
@pytest.mark.parametrize("part", range(4))
def test_a_run_killed_at_100_instants_loses_nothing_committed_and_goes_on(
    tmp_path: Path, zygote: Zygote, references: list[Reference], part: int
) -> None:
    check_instants(zygote, references, tmp_path, count=25, seed=1 + part)
