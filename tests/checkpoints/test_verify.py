"""Verification of checkpoints: what was changed is found, all of it, and what was not is not."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import torch
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.borrowed import count_not_finite
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.commands.verify import verify as verify_command
from bridge.core.formats import create_checkpoint
from bridge.core.formats.dcp.reader import DcpReader
from bridge.core.formats.files.manifest import MANIFEST_FILE
from bridge.core.formats.tensors.base import DTYPES, Box
from bridge.core.formats.tensors.boxes import split_box
from tests.support.bridge.bits import random_bits
from tests.support.bridge.dcp_files import stock_save
from tests.support.bridge.orbax_helpers import stock_save as orbax_save
from tests.support.bridge.verify_files import FORMATS, arrays, converted, copy, flipped, places, where, write

__all__ = ["converted", "copy"]  # fixtures

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def call(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(verify_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("format", FORMATS)
def test_what_convert_wrote_is_good_and_all_of_it_is_protected(
    converted: Callable[[str], Path], format: str
) -> None:
    report = verify(converted(format))
    assert report.problems == ()
    assert report.good
    assert report.manifest
    total = sum(array.nbytes for array in arrays().values())
    assert (report.format, report.tensors, report.objects) == (format, len(arrays()), 2)
    assert report.bytes == report.protected == total


@pytest.mark.parametrize("format", FORMATS)
def test_all_damaged_tensors_are_reported_not_only_the_first(
    copy: Callable[[str], Path], format: str
) -> None:
    path, rng = copy(format), random.Random(4)
    write(
        path.with_name("wide"), format, {f"w.{k}": random_bits((50, 7), np.dtype("f4"), k) for k in range(6)}
    )
    path = path.with_name("wide")
    chosen = {f"w.{k}": random_bits((50, 7), np.dtype("f4"), k) for k in (1, 2, 5)}
    for name, array in chosen.items():
        spots = list(places(path, {name: array}))
        flipped(*spots[rng.randrange(len(spots))], rng)
    report = verify(path, workers=2)
    assert {name.replace("/", ".") for name in where(report)} == set(chosen)
    assert report.tensors == 6


def test_only_the_damaged_chunk_of_a_tensor_is_named(tmp_path: Path) -> None:
    array = random_bits((40, 11), np.dtype(np.float32), 1)
    write(tmp_path / "a", "dcp", {"w.x": array}, (8, 11))
    spots = list(places(tmp_path / "a", {"w.x": array}))
    flipped(*spots[17 * 11 * 4], random.Random(0))
    (problem,) = verify(tmp_path / "a").problems
    assert "chunk at (16, 0)" in problem.text


def _edited(path: Path, edit: Callable[[Any], object]) -> Path:
    file = path / MANIFEST_FILE
    data = json.loads(file.read_text())
    data.pop("certificate", None)
    edit(data)
    file.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("edit", "where", "text"),
    [
        (lambda m: m["tensors"].pop("w.large"), "w.large", "expected no tensor of this name"),
        (
            lambda m: m["tensors"].update(more=m["tensors"]["w.bool"]),
            "more",
            "lists this tensor, but it is missing",
        ),
        (lambda m: m["tensors"]["w.bool"].update(dtype="int8"), "w.bool", "expected int8 [3, 2]"),
        (lambda m: m["tensors"]["w.bool"].update(shape=[4, 2]), "w.bool", "expected bool [4, 2]"),
        (lambda m: m["tensors"]["w.large"]["chunks"].pop(), "w.large", "in exactly one chunk"),
        (
            lambda m: m["tensors"]["w.large"]["chunks"][0].__setitem__(2, "00000000"),
            "w.large",
            "expected CRC-32C",
        ),
        (lambda m: m["objects"].pop("run.note"), "run.note", "expected no object of this name"),
        (lambda m: m["objects"].update(gone="00000000"), "gone", "lists this object, but it is missing"),
        (lambda m: m["objects"].update({"run.note": "00000000"}), "run.note", "'by hand'"),
        (lambda m: m.update(format="orbax"), MANIFEST_FILE, "expected format orbax"),
        (lambda m: m["files"].update({"gone": [1, None]}), "gone", "it is missing"),
        (lambda m: m["files"].update({"../x": [1, None]}), "../x", "leads elsewhere"),
        (lambda m: m["files"].update({".metadata": [1, None]}), ".metadata", "expected 1 bytes"),
        (lambda m: m.pop("files"), MANIFEST_FILE, "malformed or damaged manifest"),
    ],
)
def test_each_disagreement_with_the_manifest_is_named(
    copy: Callable[[str], Path], edit: Callable[[Any], object], where: str, text: str
) -> None:
    report = verify(_edited(copy("dcp"), edit))
    assert [problem.where for problem in report.problems] == [where]
    assert text in report.problems[0].text
    assert not report.good


def test_a_checkpoint_that_cannot_be_opened_still_has_its_files_compared(copy: Callable[[str], Path]) -> None:
    path = copy("dcp")
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-9])
    (path / "__0_0.distcp").write_bytes(b"short")
    report = verify(path)
    assert not report.opened
    assert where(report) == {".metadata", "__0_0.distcp", str(path)}
    result = call(path)
    assert result.exit_code == 2
    assert "__0_0.distcp: expected" in result.stdout
    told = call(path, "--json")
    document = json.loads(told.stdout)
    assert (document["opened"], document["good"], told.exit_code) == (False, False, 2)
    error_class, message = document["error"]["kind"], document["error"]["message"]
    assert (error_class, document["error"]["status"]) == ("CheckpointError", 2)
    assert message.startswith(f"{path}: cannot be opened: {path / '.metadata'}: ")
    assert told.stderr == f"error: {message}\n"
    assert "error" not in json.loads(call(copy("orbax"), "--json").stdout)


def test_a_missing_chunk_is_found(copy: Callable[[str], Path]) -> None:
    path = copy("orbax")
    shutil.rmtree(path / "d")
    report = verify(path)
    assert not report.good
    assert any("missing" in problem.text for problem in report.problems)


def test_a_directory_of_steps_is_verified_with_the_manifest_of_its_step(tmp_path: Path) -> None:
    write(tmp_path / "runs/10/default", "orbax", arrays())
    report = verify(tmp_path / "runs")
    assert report.good
    assert report.manifest
    spots = list(places(tmp_path / "runs", {"w.large": arrays()["w.large"]}))
    flipped(*spots[100], random.Random(0))
    assert where(verify(tmp_path / "runs")) == {"w/large"}


def test_a_single_safetensors_file_is_verified_with_the_manifest_beside_it(
    tmp_path: Path, converted: Callable[[str], Path]
) -> None:
    file = tmp_path / "weights.safetensors"
    convert(converted("dcp"), file, to="safetensors")
    assert verify(file).good
    assert verify(file).manifest
    data = file.read_bytes()
    large = arrays()["w.large"].tobytes()
    at = data.index(large)
    for position in (at, at + len(large) - 1):
        restore = flipped(file, position, random.Random(0))
        assert where(verify(file)) == {"w.large"}
        restore()
    file.write_bytes(data[:-1])
    # The tensor with the smallest elements comes last.
    assert where(verify(file)) == {"w.float8_e4m3fn", file.name}
    file.write_bytes(data[:100])
    assert not verify(file).opened


def test_stock_dcp_has_its_own_checksums_and_no_manifest(tmp_path: Path) -> None:
    state = {"w": torch.randn(30, 40), "v": torch.randn(7), "lr": 0.5}
    stock_save(state, tmp_path / "a")
    report = verify(tmp_path / "a")
    assert report.good
    assert (report.manifest, report.tensors, report.objects) == (False, 2, 1)
    flipped(*next(places(tmp_path / "a", {"w": state["w"].numpy()})), random.Random(0))
    report = verify(tmp_path / "a")
    assert where(report) == {"w"}
    assert "CRC-32" in report.problems[0].text


def test_stock_orbax_is_read_whole(tmp_path: Path) -> None:
    tree = {"w": jnp.arange(5000, dtype=jnp.float32).reshape(50, 100), "v": np.full((9,), np.nan)}
    orbax_save(tmp_path / "a", tree)
    report = verify(tmp_path / "a")
    assert report.good
    assert not report.manifest
    assert [(t.name, t.nan, t.infinite) for t in report.not_finite] == [("v", 9, 0)]
    for file in (tmp_path / "a").rglob("*"):
        if file.is_file() and file.stat().st_size > 5000:
            file.write_bytes(file.read_bytes()[:-3000])
    assert not verify(tmp_path / "a").good


def test_what_no_checksum_protects_is_told(tmp_path: Path, converted: Callable[[str], Path]) -> None:
    stock_save({"w": torch.randn(30, 40)}, tmp_path / "dcp")
    orbax_save(tmp_path / "orbax", {"w": jnp.ones((30, 40))})
    save_file({"w": np.ones((30, 40), np.float32)}, tmp_path / "x.safetensors")
    for name, protected in (("dcp", 4800), ("orbax", 0), ("x.safetensors", 0)):
        report = verify(tmp_path / name)
        assert (report.good, report.bytes, report.protected) == (True, 4800, protected)
    shutil.copytree(converted("orbax"), tmp_path / "ours")
    (tmp_path / "ours" / MANIFEST_FILE).unlink()
    report = verify(tmp_path / "ours")
    assert report.protected == report.bytes
    assert "0 B of them protected by a checksum, the rest by none" in call(tmp_path / "orbax").stdout


def test_step_directories_of_a_checkpoint_manager_are_verified(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "runs") as manager:
        manager.save(3, args=ocp.args.StandardSave({"w": np.ones((4, 4), np.float32)}))
    report = verify(tmp_path / "runs" / "3")
    assert (report.good, report.format, report.tensors) == (True, "orbax", 1)


def test_numbers_that_are_not_finite_are_counted_and_refused_only_on_request(tmp_path: Path) -> None:
    a = np.ones((6, 5), np.float32)
    a[2, 3], a[0, 0], a[5, 4] = np.nan, np.inf, -np.inf
    write(
        tmp_path / "a",
        "orbax",
        {"w.x": a, "w.fine": np.ones((2, 2)), "w.c": np.full((1, 2), complex(1, np.inf))},
    )
    report = verify(tmp_path / "a")
    assert report.good
    assert {(t.name, t.nan, t.infinite) for t in report.not_finite} == {("w/x", 1, 2), ("w/c", 0, 2)}
    strict = verify(tmp_path / "a", finite=True)
    assert where(strict) == {"w/x", "w/c"}
    assert call(tmp_path / "a").exit_code == 0
    assert call(tmp_path / "a", "--finite").exit_code == 1


@pytest.mark.parametrize("dtype", [n for n in DTYPES if "float" in n or "complex" in n])
def test_nans_and_infinities_are_counted_as_numpy_counts_them(dtype: str) -> None:
    array = random_bits((64, 33), DTYPES[dtype], 7)
    parts = array.view(f"f{array.itemsize // 2}") if "complex" in dtype else array
    with np.errstate(all="ignore"):
        wide = parts.astype(np.float64)
    assert count_not_finite(array) == (int(np.isnan(wide).sum()), int(np.isinf(wide).sum()))
    special = np.asarray([np.nan, np.inf, -np.inf, 1, 0]).astype(ml_dtypes.bfloat16)
    assert count_not_finite(special) == (1, 2)


def test_chunks_above_the_budget_are_read_in_pieces_and_checked_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = random_bits((40, 30), np.dtype(np.float32), 3)
    write(tmp_path / "a", "dcp", {"w.x": array}, (40, 30))
    monkeypatch.setattr(split_box, "__defaults__", (256,))
    monkeypatch.setattr("bridge.checkpoints.verify.verification.REGION_BYTES", 256)
    read, sizes = DcpReader.read, []

    def recorded(self: DcpReader, name: str, box: Box | None = None) -> np.ndarray:
        block = read(self, name, box)
        sizes.append(block.nbytes)
        return block

    monkeypatch.setattr(DcpReader, "read", recorded)
    assert verify(tmp_path / "a").good
    assert max(sizes) <= 256
    assert sum(sizes) == array.nbytes
    flipped(*list(places(tmp_path / "a", {"w.x": array}))[-1], random.Random(0))
    assert not verify(tmp_path / "a").good


def test_the_report_does_not_depend_on_workers_and_progress_reaches_the_end(tmp_path: Path) -> None:
    tensors = {f"w.{k}": random_bits((30, 9), np.dtype(np.float32), k) for k in range(9)}
    write(tmp_path / "a", "dcp", tensors, (7, 9))
    flipped(*list(places(tmp_path / "a", {"w.4": tensors["w.4"]}))[500], random.Random(0))
    seen: list[tuple[int, int, str]] = []
    by_one = verify(tmp_path / "a", workers=1, progress=lambda *step: seen.append(step))
    by_three = verify(tmp_path / "a", workers=3)
    assert by_one.problems == by_three.problems
    assert by_one.problems
    assert seen[-1][:2] == (by_one.bytes, by_one.bytes)


def test_the_command_reports_and_exits_by_what_it_found(copy: Callable[[str], Path], tmp_path: Path) -> None:
    path = copy("orbax")
    good = call(path)
    assert good.exit_code == 0
    assert "with its manifest" in good.stdout
    assert "no problem found" in good.stdout
    document = json.loads(call(path, "--json").stdout)
    assert (document["good"], document["protected"]) == (True, document["bytes"])
    _edited(path, lambda m: m["objects"].pop("run/note"))
    bad = call(path)
    assert bad.exit_code == 1
    assert "run/note: expected no object of this name" in bad.stdout
    assert "1 problem found" in bad.stdout
    assert call(tmp_path / "none").exit_code == 2


def test_a_chunk_rewritten_with_right_checksums_is_noticed_by_the_manifest(tmp_path: Path) -> None:
    """tensorstore writes a chunk as valid as the one before: only the manifest tells that it is another."""
    array = np.random.default_rng(5).standard_normal((8, 6)).astype(np.float32)
    with create_checkpoint(tmp_path / "c", "orbax") as writer:
        writer.add_tensor(("w",), array.shape, array.dtype, (2, 6))
        for box in writer.chunks("w"):
            writer.write("w", box, array[box.slices()])
    kvstore = {"driver": "ocdbt", "base": f"file://{tmp_path / 'c'}/", "path": "w/"}
    stored = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
    stored[5, 3].write(np.float32(7)).result()
    report = verify(tmp_path / "c")
    assert any("chunk at (4, 0)" in problem.text for problem in report.problems)
    assert not any("chunk at (2, 0)" in problem.text for problem in report.problems)


def test_the_manifest_is_that_of_the_step_which_is_read(tmp_path: Path) -> None:
    write(tmp_path / "runs/step_1", "orbax", arrays())
    shutil.copytree(tmp_path / "runs/step_1", tmp_path / "runs/step_1.tmp-0123abcd")
    metadata = tmp_path / "runs/step_1/_METADATA"
    metadata.write_text(metadata.read_text().replace('"twinshard"', '"twinshared"'))
    assert where(verify(tmp_path / "runs/step_1")) == where(verify(tmp_path / "runs")) != set()


def test_a_checkpoint_is_not_judged_by_the_manifest_of_another_one_inside_it(tmp_path: Path) -> None:
    stock_save({"w": torch.ones(3)}, tmp_path / "c")
    write(tmp_path / "c/converted", "orbax", arrays())
    report = verify(tmp_path / "c")
    assert report.good
    assert not report.manifest
    assert not inspect(tmp_path / "c").manifest
