"""Flipped bytes: every one in tensor data is noticed, and elsewhere every one that matters."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.checkpoints.verify.verification import verify
from tests.support.bridge.verify_files import (
    FORMATS,
    arrays,
    contents,
    converted,
    copy,
    flipped,
    places,
    where,
)

__all__ = ["converted", "copy"]  # fixtures


def test_every_flipped_byte_of_small_dcp_tensors_is_found_in_its_tensor(
    copy: Callable[[str], Path],
) -> None:
    path, rng = copy("dcp"), random.Random(1)
    for name, array in arrays().items():
        for file, position in places(path, {name: array}) if array.nbytes < 100 else ():
            restore = flipped(file, position, rng)
            assert where(verify(path, workers=1)) == {name}, f"byte {position} of {file.name}"
            restore()
    assert verify(path).good


def test_flipped_bytes_of_the_nodes_that_hold_small_orbax_tensors_are_found(
    copy: Callable[[str], Path],
) -> None:
    _flip_nodes(copy("orbax"), step=29)


@pytest.mark.slow  # 3,000 verifications, three minutes
def test_every_flipped_byte_of_the_nodes_that_hold_small_orbax_tensors_is_found(
    copy: Callable[[str], Path],
) -> None:
    _flip_nodes(copy("orbax"), step=1)


def _flip_nodes(path: Path, step: int) -> None:
    rng = random.Random(6)
    expected, noticed = contents(path), 0
    for file in sorted((path / "d").iterdir()):
        for position in range(0, file.stat().st_size, step):
            restore = flipped(file, position, rng)
            if verify(path, workers=1).good:
                # Nodes that later ones replaced stay in the file.
                assert contents(path) == expected, f"byte {position} of {file.name} was changed unnoticed"
            else:
                noticed += 1
            restore()
    assert noticed > 1000 // step


@pytest.mark.parametrize("format", FORMATS)
def test_flipped_bytes_of_a_large_tensor_are_found(copy: Callable[[str], Path], format: str) -> None:
    _flip_large(copy(format), step=37)


@pytest.mark.slow  # 3,256 verifications, three minutes
@pytest.mark.parametrize("format", FORMATS)
def test_every_flipped_byte_of_a_large_tensor_is_found(copy: Callable[[str], Path], format: str) -> None:
    _flip_large(copy(format), step=1)


def _flip_large(path: Path, step: int) -> None:
    rng = random.Random(2)
    for file, position in list(places(path, {"w.large": arrays()["w.large"]}))[::step]:
        restore = flipped(file, position, rng)
        report = verify(path, workers=1)
        assert not report.good, f"byte {position} of {file.name} was changed unnoticed"
        assert {name.replace("/", ".") for name in where(report)} == {"w.large"}
        restore()


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_byte_anywhere_is_found_or_harmless(copy: Callable[[str], Path], format: str) -> None:
    _flip_anywhere(copy(format), count=60)


@pytest.mark.slow  # 4,000 verifications, five minutes
@pytest.mark.parametrize("format", FORMATS)
def test_thousands_of_flipped_bytes_are_found_or_harmless(copy: Callable[[str], Path], format: str) -> None:
    _flip_anywhere(copy(format), count=2000)


def _flip_anywhere(path: Path, count: int) -> None:
    rng = random.Random(3)
    expected = contents(path)
    files = [file for file in sorted(path.rglob("*")) if file.is_file()]
    for number in range(count):
        file = files[number % len(files)]
        position = rng.randrange(file.stat().st_size)
        restore = flipped(file, position, rng)
        if verify(path, workers=1).good:
            assert contents(path) == expected, f"byte {position} of {file.name} was changed unnoticed"
        restore()


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_flipped_bytes_of_headers_and_padding_are_found(copy: Callable[[str], Path], format: str) -> None:
    path, rng = copy(format), random.Random(7)
    (file,) = (file for file in path.iterdir() if file.suffix in (".distcp", ".safetensors"))
    for position in range(0, file.stat().st_size, file.stat().st_size // 80):
        restore = flipped(file, position, rng)
        assert not verify(path, workers=1).good, f"byte {position} of {file.name} was changed unnoticed"
        restore()
