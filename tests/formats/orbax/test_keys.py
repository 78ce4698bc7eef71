"""Typed PRNG keys of JAX in Orbax checkpoints: never their raw data without a word."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from bridge.checkpoints.convert import convert
from bridge.checkpoints.selection import Selection
from bridge.commands.main import app
from bridge.formats import open_checkpoint
from bridge.formats.base import CheckpointError
from tests.support.bridge.orbax_helpers import stock_save


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(**keys: Any) -> Path:
        stock_save(tmp_path / "source", {"params": {"w": np.ones((2, 3), np.float32)}, **keys})
        return tmp_path / "source"

    return save


@pytest.mark.parametrize("target", ["orbax", "dcp", "safetensors"])
def test_keys_of_another_implementation_are_refused_by_name(
    saved: Callable[..., Path], tmp_path: Path, target: str
) -> None:
    source = saved(rngs={"a.b": jax.random.key(3, impl="rbg")}, old=jax.random.PRNGKey(1))
    with pytest.raises(CheckpointError, match=r"tensor 'rngs/a\.b': .* got key<rbg>: .*--drop 'rngs/a\.b'"):
        convert(source, tmp_path / "out", to=target)
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", to=target, selection=Selection(drop=("rngs/a.b",)))
    with open_checkpoint(tmp_path / "out") as reader:
        assert len(reader.tensors) == 2
    store = fsspec.filesystem("memory")
    store.put(str(source), "/keys/source", recursive=True)
    with pytest.raises(CheckpointError, match=r"memory://keys/source: tensor 'rngs/a\.b': .* got key<rbg>"):
        convert("memory://keys/source", tmp_path / "of_url", to=target)
    store.rm("/keys", recursive=True)


def test_keys_of_the_default_implementation_become_their_data_with_a_warning(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    with pytest.warns(
        UserWarning, match=r"become their raw uint32: 1, such as 'rng'.*wrap_key_data"
    ) as caught:
        convert(saved(rng=keys), tmp_path / "out", to="orbax")
    assert [warning.filename for warning in caught] == [__file__]
    with open_checkpoint(tmp_path / "out") as reader:
        again = jax.random.wrap_key_data(reader.read("rng"))
    assert np.array_equal(jax.random.key_data(again), jax.random.key_data(keys))


def test_raw_keys_and_keys_that_are_left_out_are_no_matter(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    source = saved(rng=jax.random.key(3), old=jax.random.PRNGKey(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(source, tmp_path / "out", to="orbax", selection=Selection(drop=("rng",)))


def test_inspect_names_typed_keys(saved: Callable[..., Path]) -> None:
    source = saved(rng=jax.random.key(3, impl="rbg"), old=jax.random.PRNGKey(1))
    shown = CliRunner().invoke(app, ["inspect", str(source)]).stdout
    assert "rng is a typed PRNG key, key<rbg>" in shown
    assert "old is" not in shown


def test_array_metadata_that_is_none_is_refused_or_speaks_of_no_key(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    source = saved(rng=jax.random.key(3))
    (file,) = (source / "array_metadatas").iterdir()
    for number, text in enumerate(
        ("[]", '{"array_metadatas": [3, {"array_metadata": {"ext_metadata": 1}}]}')
    ):
        file.write_text(text)
        convert(source, tmp_path / str(number), to="orbax")
    file.write_text("{")
    with pytest.raises(CheckpointError, match=f"{file}: expected JSON"):
        convert(source, tmp_path / "out", to="orbax")
