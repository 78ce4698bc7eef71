"""Elements of less than a byte: a leaf of them hides no other; it is carried, or named with the way out."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.compare.ulp import Tolerance, largest_ulp
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.verify.verification import verify
from bridge.commands.main import app
from bridge.core.formats import open_checkpoint
from bridge.core.formats.safetensors.header import PACKED
from bridge.core.formats.tensors.base import ORBAX_DTYPES, CheckpointError
from bridge.core.mapping import parse_mapping
from bridge.propose.propose import propose

NARROW = ("int4", "int2", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz")


def saved(path: Path, dtype: str, **options: bool) -> np.ndarray:
    """A tree with one leaf of this dtype, saved by stock Orbax."""
    values = np.asarray([[0, 1, -2, 1], [1, 0, 1, -1], [-1, 1, 0, 0]]).astype(ORBAX_DTYPES[dtype])
    tree = {"params": {"a": jnp.asarray(values), "b": jnp.ones((3, 2), jnp.float32)}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, tree)
    return values


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("zarr3", [False, True])
def test_orbax_to_orbax_carries_them_for_stock_orbax(tmp_path: Path, dtype: str, zarr3: bool) -> None:
    values = saved(tmp_path / "a", dtype, use_zarr3=zarr3)
    convert(tmp_path / "a", tmp_path / "b", to="orbax")
    assert verify(tmp_path / "b").good
    assert diff(tmp_path / "a", tmp_path / "b").max_ulp == 0
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "b")["params"]
    assert restored["a"].dtype == values.dtype
    assert np.asarray(restored["a"]).tobytes() == values.tobytes()
    assert restored["b"].tolist() == [[1.0, 1.0]] * 3
    listed = json.loads(CliRunner().invoke(app, ["inspect", str(tmp_path / "a"), "--json"]).stdout)
    assert {t["name"]: t["dtype"] for t in listed["tensors"]} == {"params/a": dtype, "params/b": "float32"}


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.parametrize("dtype", ["int4", "float8_e3m4"])
def test_formats_without_them_name_them_before_anything_is_written(
    tmp_path: Path, to: str, dtype: str
) -> None:
    saved(tmp_path / "a", dtype)
    message = (
        rf"expected dtypes that {to} has, found 'params\.a' \({dtype}\): leave these tensors out "
        r"\(--drop 'params/a'\), or write another format \(--to orbax\)"
    )
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "a", tmp_path / "b", to=to)
    assert not (tmp_path / "b").exists()
    convert(tmp_path / "a", tmp_path / "b", to=to, selection=Selection(drop=("params/a",)))
    with open_checkpoint(tmp_path / "b") as reader:
        assert list(reader.tensors) == ["params.b"]


def test_a_mapping_turns_them_and_does_not_calculate_with_integers(tmp_path: Path) -> None:
    values = saved(tmp_path / "a", "int4")
    text = '[convention.one]\n[convention.two]\n[[rule]]\none = "a : x y"\ntwo = "z/a : y x"\n'
    text += '[[rule]]\none = "b"\ntwo = "z/b"\n'
    rules = parse_mapping(text.replace('"a', '"o/a').replace('one = "b"', 'one = "o/b"'), "test")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = {"params": {"o": {"a": jnp.asarray(values), "b": jnp.ones(2)}}}
        checkpointer.save(tmp_path / "c", tree)
    convert(tmp_path / "c", tmp_path / "d", to="orbax", mapping=rules, into="two")
    with open_checkpoint(tmp_path / "d") as reader:
        assert reader.read("params/z/a").tobytes() == np.ascontiguousarray(values.T).tobytes()
    scaled = parse_mapping(
        text.replace('"a', '"o/a').replace('one = "b"', 'one = "o/b"').replace("x y", "x y | times(2)"), "t"
    )
    with pytest.raises(CheckpointError, match="expected a floating-point tensor to calculate with, got int4"):
        convert(tmp_path / "c", tmp_path / "e", to="orbax", mapping=scaled, into="two")


def test_int4_differs_as_integers_do(tmp_path: Path) -> None:
    for name, last in (("a", 1), ("b", -8)):
        tree = {"w": jnp.asarray(np.asarray([7, -1, last]).astype(ml_dtypes.int4))}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, tree)
    report = diff(tmp_path / "a", tmp_path / "b", tolerance=Tolerance(max_ulp=8))
    assert (report.max_ulp, report.within) == (9, False)
    with pytest.raises(CheckpointError, match=r"--cast|cast"):
        convert(tmp_path / "a", tmp_path / "c", to="orbax", casts=["w=bfloat16"])
    with pytest.raises(CheckpointError, match="got 'int4'"):
        convert(tmp_path / "a", tmp_path / "c", to="orbax", casts=["w=int4"])


def test_every_float4_has_its_place_in_their_order(tmp_path: Path) -> None:
    values = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    order = np.argsort(values.astype(np.float32), kind="stable")
    shifted = np.roll(values[order], -1)
    for name, array in (("a", values[order]), ("b", shifted)):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, {"w": jnp.asarray(array)})
    report = diff(tmp_path / "a", tmp_path / "b")
    # Neighbours are one apart, the two zeros among them, and the last is compared with the first.
    assert report.tensors[0].difference.max_ulp == 15
    assert report.tensors[0].difference.elements == 16


@pytest.mark.parametrize(("dtype", "bits"), [("int4", 4), ("int2", 2), ("float4_e2m1fn", 4)])
def test_no_two_patterns_of_a_byte_are_equal(dtype: str, bits: int) -> None:
    """Also where they stand for one number: the bits of a byte above an element's have no meaning."""
    patterns = np.arange(256, dtype=np.uint8)
    left, right = (
        np.ascontiguousarray(side).view(ORBAX_DTYPES[dtype])
        for side in np.broadcast_arrays(patterns[:, None], patterns)
    )
    equal = [largest_ulp(x, y) == 0 for x, y in zip(left.reshape(-1, 1), right.reshape(-1, 1), strict=True)]
    assert np.array_equal(np.reshape(equal, (256, 256)), np.eye(256, dtype=bool))
    canonical = patterns[: 1 << bits].view(ORBAX_DTYPES[dtype])
    order = np.argsort(canonical.astype(np.float32), kind="stable")
    assert largest_ulp(canonical[order][1:], canonical[order][:-1]) in (1, 2)


@pytest.mark.parametrize("code", PACKED)
def test_a_packed_tensor_of_a_safetensors_file_hides_no_other(tmp_path: Path, code: str) -> None:
    bits = PACKED[code][1]
    packed, plain = bytes(range(8 * bits // 8)), np.ones(3, np.float32).tobytes()
    header = {
        "p": {"dtype": code, "shape": [2, 4], "data_offsets": [0, len(packed)]},
        "w": {"dtype": "F32", "shape": [3], "data_offsets": [len(packed), len(packed) + len(plain)]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + packed + plain)
    dtype = PACKED[code][0].name
    listed = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)
    assert {t["name"]: t["dtype"] for t in listed["tensors"]} == {"p": dtype, "w": "float32"}
    report = verify(path)
    assert (report.good, report.unread) == (True, ("p",))
    said = CliRunner().invoke(app, ["verify", str(path)]).stdout
    assert "1 of the tensors cannot be read, so they were not checked: p" in said
    why = f"{dtype}, {bits} bits per element, so that elements share bytes"
    message = rf"found 'p' \({why}\): leave them out \(--drop 'p'\)"
    with pytest.raises(CheckpointError, match=message):
        convert(path, tmp_path / "b")
    convert(path, tmp_path / "b", selection=Selection(drop=("p",)))
    with open_checkpoint(tmp_path / "b") as reader:
        assert reader.read("w").tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(CheckpointError, match=message):
        diff(path, path)
    assert diff(path, path, selection=Selection(drop=("p",))).within
    assert (
        "# uncertain: the elements cannot be read, which settles nothing"
        in propose(path, path, values=True).text
    )
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        open_checkpoint(path)
