"""Typed PRNG keys of JAX: key type and implementation travel through all formats, and stock Orbax restores them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.experimental import v1
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.verify.verification import verify
from bridge.commands.main import app
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.tensors.base import Box, CheckpointError
from bridge.core.formats.tensors.leaves import LEAVES
from tests.support.bridge.orbax_helpers import stock_save

IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")
THROUGH = (("orbax",), ("dcp", "orbax"), ("safetensors", "orbax"), ("dcp", "safetensors", "dcp", "orbax"))


def state() -> dict[str, Any]:
    """Keys of every implementation, several in an array, below names that Orbax joins, beside raw ones."""
    keys = {impl: jax.random.key(3, impl=impl) for impl in IMPLEMENTATIONS}
    return {
        "params": {"w": np.ones((2, 3), np.float32)},
        "rngs": {"a.b": jax.random.key(5, impl="rbg"), **keys},
        "split": jax.random.split(jax.random.key(1, impl="rbg"), (2, 3)),
        "old": jax.random.PRNGKey(2),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(**keys: Any) -> Path:
        stock_save(tmp_path / "source", {"params": {"w": np.ones((2, 3), np.float32)}, **keys})
        return tmp_path / "source"

    return save


def converted(source: Path, formats: tuple[str, ...]) -> Path:
    for number, format in enumerate(formats):
        path = source.with_name(f"{number}_{format}")
        convert(source, path, to=format)
        assert verify(path).problems == ()
        source = path
    return source


def typed_v0(path: Path, target: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def assert_same_keys(actual: Any, expected: Any) -> None:
    def check(key: Any, other: Any) -> None:
        assert key.dtype == other.dtype
        assert key.shape == other.shape
        if jax.dtypes.issubdtype(other.dtype, jax.dtypes.prng_key):
            assert str(jax.random.key_impl(key)) == str(jax.random.key_impl(other))
            first, second = (typed.reshape(-1)[0] for typed in (key, other))
            assert np.array_equal(jax.random.uniform(first, (3,)), jax.random.uniform(second, (3,)))
            key, other = jax.random.key_data(key), jax.random.key_data(other)
        assert np.array_equal(key, other)

    jax.tree.map(check, actual, expected)


@pytest.mark.parametrize("formats", THROUGH, ids="-".join)
def test_stock_orbax_restores_the_same_keys_from_a_copy(
    saved: Callable[..., Path], formats: tuple[str, ...]
) -> None:
    tree = state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = converted(saved(**tree), formats)
    for restore in (typed_v0, v1.load):
        assert_same_keys(restore(copy, tree), tree)
        assert_same_keys(restore(copy, jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)), tree)
    # Without a target, too, on however many devices there are.
    for whole in (typed_v0(copy, None), v1.load(copy)):
        assert_same_keys(whole, tree)
    assert diff(copy.with_name("source"), copy).within


def test_a_part_keeps_its_keys_and_a_dropped_key_leaves_no_trace(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    source = saved(rngs={"a.b": jax.random.key(3, impl="rbg"), "c": jax.random.key(4)})
    convert(source, tmp_path / "dcp", to="dcp", selection=Selection(select=("params*", "rngs/a.b")))
    with open_checkpoint(tmp_path / "dcp") as reader:
        assert reader.objects[".".join(LEAVES)] == {"rngs.a.b": "key<rbg>"}
    convert(tmp_path / "dcp", tmp_path / "weights", to="orbax", selection=Selection(drop=("rngs*",)))
    assert not (tmp_path / "weights" / "array_metadatas").exists()
    # A selection that does not name the note has what it says of the selected.
    convert(tmp_path / "dcp", tmp_path / "part", to="orbax", selection=Selection(select=("rngs*",)))
    key = typed_v0(tmp_path / "part", {"rngs": {"a.b": jax.random.key(0, impl="rbg")}})["rngs"]["a.b"]
    assert np.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(3, impl="rbg")))


def test_keys_of_a_source_at_a_url_travel(saved: Callable[..., Path], tmp_path: Path) -> None:
    tree = state()
    store = fsspec.filesystem("memory")
    store.put(str(saved(**tree)), "/keys/source", recursive=True)
    convert("memory://keys/source", "memory://keys/dcp", to="dcp")
    convert("memory://keys/dcp", tmp_path / "back")
    assert_same_keys(typed_v0(tmp_path / "back", tree), tree)
    store.rm("/keys", recursive=True)


@pytest.mark.parametrize("format", ["orbax", "dcp", "safetensors"])
def test_diff_compares_types_and_inspect_shows_them(
    saved: Callable[..., Path], tmp_path: Path, format: str
) -> None:
    data = np.asarray(jax.random.key_data(jax.random.key(3, impl="rbg")))
    source = saved(rng=jax.random.key(3, impl="rbg"), old=jax.random.PRNGKey(1))
    for name, rng in (
        ("unsafe", jax.random.wrap_key_data(data, impl="unsafe_rbg")),
        ("raw", data),
    ):
        tree = {"params": {"w": np.ones((2, 3), np.float32)}, "rng": rng, "old": jax.random.PRNGKey(1)}
        stock_save(tmp_path / name, tree)
        convert(tmp_path / name, tmp_path / f"{name}_{format}", to=format)
    convert(source, tmp_path / "same", to=format)
    assert diff(source, tmp_path / "same").within
    for name, other in (("unsafe", "key<unsafe_rbg>"), ("raw", "uint32")):
        report = diff(source, tmp_path / f"{name}_{format}")
        assert report.mismatched == (("rng", f"dtype key<rbg> in a, {other} in b"),)
        assert not report.within
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "same")]).stdout
    assert "rng is a typed PRNG key, key<rbg>" in shown
    assert "old is" not in shown
    document = json.loads(CliRunner().invoke(app, ["inspect", "--json", str(tmp_path / "same")]).stdout)
    assert document["key_types"] == {"rng": "rbg"}


_TABLE = """
[convention.one]
format = "orbax"
[convention.two]
format = "orbax"
[[rule]]
one = "net/w : a b"
two = "net/kernel : a b"
[[rule]]
one = "net/rng : {one}"
two = "net/noise : {two}"
"""


@pytest.mark.parametrize(("source_axes", "target_axes"), [("i x", "i x"), ("i x", "x i")])
def test_a_mapping_may_rename_keys_but_not_rearrange_them(
    tmp_path: Path, source_axes: str, target_axes: str
) -> None:
    net = {"w": np.ones((2, 3), np.float32), "rng": jax.random.split(jax.random.key(3), 2)}
    stock_save(tmp_path / "source", {"params": {"net": net}})
    (tmp_path / "table.toml").write_text(_TABLE.format(one=source_axes, two=target_axes))

    def run() -> None:
        convert(
            tmp_path / "source", tmp_path / "out", to="orbax", mapping=tmp_path / "table.toml", into="two"
        )

    if source_axes == target_axes:
        run()
        assert_same_keys(typed_v0(tmp_path / "out", None)["params"]["net"]["noise"], net["rng"])
        return
    with pytest.raises(
        CheckpointError, match=r"tensor 'params/net/rng': .*typed PRNG keys.*--drop 'params/net/rng'"
    ):
        run()
    assert not (tmp_path / "out").exists()


def test_a_key_that_is_no_data_of_keys_is_refused(tmp_path: Path) -> None:
    with create_checkpoint(tmp_path / "source", "dcp") as writer:
        writer.add_object(LEAVES, {"w": "key<rbg>"})
        name = writer.add_tensor(("w",), (4,), np.dtype(np.float32)).name
        writer.write(name, Box((0,), (4,)), np.ones(4, np.float32))
    with pytest.raises(CheckpointError, match=r"'w': expected uint32 .*for a key<rbg>, got float32"):
        convert(tmp_path / "source", tmp_path / "out", to="orbax")


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
