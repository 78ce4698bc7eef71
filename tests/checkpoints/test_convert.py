"""Conversion of whole checkpoints on disk, both ways, and what is left when it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.tensors.base import DTYPES, CheckpointError, TensorInfo, TreePath, Wanted
from bridge.core.formats.tensors.leaves import MAX_NAME
from bridge.core.mapping import MappingError
from tests.support.bridge import stock_dcp
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.dcp_files import stock_save
from tests.support.bridge.decoder_trees import dcp_arrays, expected_orbax
from tests.support.bridge.memory_reader import MemoryReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HYPERPARAMETERS: dict[TreePath, object] = {
    ("optimizer", "param_groups", 0, "lr"): 3e-3,
    ("optimizer", "param_groups", 0, "betas"): (0.9, 0.95),
    ("optimizer", "param_groups", 0, "amsgrad"): False,
    ("optimizer", "param_groups", 0, "foreach"): None,
    ("optimizer", "param_groups", 0, "params"): ["embed.weight", "norm.weight"],
}


def write(
    path: Path, format: str, arrays: Mapping[str, np.ndarray], objects: Mapping[TreePath, object]
) -> None:
    paths = {name: info.path for name, info in MemoryReader(format, arrays).tensors.items()}
    with create_checkpoint(path, format) as writer:
        # First, as the header of safetensors, which has them, comes before the data.
        for object_path, value in objects.items():
            writer.add_object(object_path, value)
        for name, array in arrays.items():
            stored = writer.add_tensor(paths[name], array.shape, array.dtype).name
            for box in writer.chunks(stored):
                writer.write(stored, box, array if not array.shape else array[box.slices()])


def tensors(path: Path) -> dict[str, np.ndarray]:
    with open_checkpoint(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


def objects(path: Path) -> dict[TreePath, object]:
    with open_checkpoint(path) as reader:
        return {reader.object_paths[name]: reader.objects[name] for name in reader.objects}


def assert_same(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not same_bits(actual[name], expected[name])] == []


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["decoder", "decoder_stacked"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_stock_dcp_checkpoint_becomes_the_orbax_tree_written_by_hand_and_comes_back(
    tmp_path: Path, family: str, tied: bool
) -> None:
    stock_dcp.save(tmp_path / "dcp", tied=tied)
    source = tensors(tmp_path / "dcp")
    report = convert(tmp_path / "dcp", tmp_path / "orbax", mapping=family)
    expected = expected_orbax(source, stacked=family == "decoder_stacked")
    assert_same(tensors(tmp_path / "orbax"), expected)
    assert (report.source_format, report.format, report.tensors) == ("dcp", "orbax", len(expected))
    assert report.bytes == sum(array.nbytes for array in expected.values())

    convert(tmp_path / "orbax", tmp_path / "back", mapping=family)
    assert_same(tensors(tmp_path / "back"), source)
    assert objects(tmp_path / "back") == objects(tmp_path / "dcp")
    assert isinstance(objects(tmp_path / "back")["optimizer", "param_groups", 0, "betas"], tuple)
    convert(tmp_path / "back", tmp_path / "again", mapping=family)
    assert_same(tensors(tmp_path / "again"), expected)


def test_stock_torch_loads_a_checkpoint_that_went_through_orbax_and_takes_the_same_next_step(
    tmp_path: Path,
) -> None:
    model, optimizer = stock_dcp.save(tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "orbax", mapping="decoder")
    convert(tmp_path / "orbax", tmp_path / "back", mapping="decoder")
    loaded, its_optimizer = stock_dcp.load(tmp_path / "back", steps=1)
    assert its_optimizer.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for network, adamw in ((model, optimizer), (loaded, its_optimizer)):
        stock_dcp.step(network, adamw)
    before = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_orbax_without_hyperparameters_becomes_dcp_without_param_groups(tmp_path: Path) -> None:
    arrays = dcp_arrays()
    write(tmp_path / "orbax", "orbax", expected_orbax(arrays), {})
    convert(tmp_path / "orbax", tmp_path / "dcp", mapping="decoder")
    assert_same(tensors(tmp_path / "dcp"), arrays)
    assert objects(tmp_path / "dcp") == {}


@pytest.mark.parametrize("workers", [1, 3])
def test_orbax_to_dcp_and_back_keeps_every_byte_and_value(tmp_path: Path, workers: int) -> None:
    arrays = expected_orbax(dcp_arrays())
    write(tmp_path / "orbax", "orbax", arrays, HYPERPARAMETERS)
    convert(tmp_path / "orbax", tmp_path / "dcp", mapping="decoder", workers=workers)
    assert_same(tensors(tmp_path / "dcp"), dcp_arrays())
    convert(tmp_path / "dcp", tmp_path / "back", mapping="decoder", workers=workers)
    assert_same(tensors(tmp_path / "back"), arrays)
    assert objects(tmp_path / "dcp") == objects(tmp_path / "back") == HYPERPARAMETERS


@pytest.mark.each_value
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("family", ["decoder", "decoder_stacked"])
def test_tensors_of_many_chunks_in_many_regions_arrive_whole_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, workers: int
) -> None:
    monkeypatch.setattr("bridge.core.formats.tensors.boxes.CHUNK_BYTES", 60)
    monkeypatch.setattr("bridge.core.formats.orbax.zarr.chunks._CHUNK", 72)
    monkeypatch.setattr("bridge.core.formats.tensors.boxes.group_boxes.__defaults__", (200,))
    arrays = dcp_arrays()
    write(tmp_path / "dcp", "dcp", arrays, {})
    with open_checkpoint(tmp_path / "dcp") as reader:
        assert len(reader.tensors["model.layers.0.mlp.w13.weight"].chunks) == 7
    convert(tmp_path / "dcp", tmp_path / "orbax", mapping=family, workers=workers)
    assert_same(tensors(tmp_path / "orbax"), expected_orbax(arrays, stacked=family == "decoder_stacked"))
    convert(tmp_path / "orbax", tmp_path / "back", mapping=family, workers=workers)
    assert_same(tensors(tmp_path / "back"), arrays)


def foreign() -> dict[str, np.ndarray]:
    """Every dtype, empty and 0-d tensors, and names that no mapping knows."""
    arrays = {f"all/{name}": random_bits((3, 5), dtype, k) for k, (name, dtype) in enumerate(DTYPES.items())}
    arrays["empty"] = np.zeros((0, 4), np.float32)
    arrays["deep/er/scalar"] = np.asarray(2.5, ml_dtypes.bfloat16)
    return arrays


@pytest.mark.parametrize("to", ["dcp", "orbax"])
@pytest.mark.parametrize("held", ["dcp", "orbax"])
def test_any_checkpoint_moves_as_it_is_without_a_mapping(tmp_path: Path, held: str, to: str) -> None:
    own = foreign()
    source = {name.replace("/", "." if held == "dcp" else "/"): a for name, a in own.items()}
    extra: dict[TreePath, object] = {
        ("note",): "x",
        ("list", 0, "value"): [1, (2.5, None)],
        ("list", 1, "value"): True,
    }
    write(tmp_path / "source", held, source, extra)
    convert(tmp_path / "source", tmp_path / "there", to=to)
    convert(tmp_path / "there", tmp_path / "back", to=held)
    assert_same(
        tensors(tmp_path / "there"), {n.replace("/", "." if to == "dcp" else "/"): a for n, a in own.items()}
    )
    assert_same(tensors(tmp_path / "back"), source)
    assert objects(tmp_path / "there") == objects(tmp_path / "back") == extra
    with open_checkpoint(tmp_path / "source") as reader, open_checkpoint(tmp_path / "back") as back:
        assert {n: i.path for n, i in reader.tensors.items()} == {n: i.path for n, i in back.tensors.items()}


def test_a_stock_checkpoint_of_another_model_passes_through_and_loads_in_stock_torch(tmp_path: Path) -> None:
    model, _ = stock_dcp.save(tmp_path / "dcp")
    convert(tmp_path / "dcp", tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back")
    loaded, _ = stock_dcp.load(tmp_path / "back", steps=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize("format", ["dcp", "orbax", "safetensors"])
def test_what_a_writer_takes_as_a_name_a_reader_takes(tmp_path: Path, format: str) -> None:
    longest = "x" * MAX_NAME
    write(tmp_path / "a", format, {longest: np.ones(3)}, {"y" * MAX_NAME: 1})
    with open_checkpoint(tmp_path / "a") as reader:
        assert (list(reader.tensors), list(reader.objects)) == ([longest], ["y" * MAX_NAME])
    match = f"expected .*name.? of at most {MAX_NAME} characters, got one of {MAX_NAME + 1}: 'x"
    for tensors, objects in (({longest + "x": np.ones(3)}, {}), ({"w": np.ones(3)}, {longest + "x": 1})):
        with pytest.raises(CheckpointError, match=match):
            write(tmp_path / "b", format, tensors, objects)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_progress_ends_at_the_total_and_never_goes_back(tmp_path: Path) -> None:
    write(tmp_path / "a", "dcp", dcp_arrays(), {})
    calls: list[tuple[int, int, str]] = []
    report = convert(
        tmp_path / "a", tmp_path / "b", mapping="decoder", progress=lambda *call: calls.append(call)
    )
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1][:2] == (report.bytes, report.bytes)


def failing(tmp_path: Path, error: type[BaseException], match: str | None, **options: Any) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=match):
        convert(tmp_path / "source", tmp_path / "target", **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    failing(tmp_path, FileNotFoundError, "source")


def test_an_existing_destination_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "source", "dcp", dcp_arrays(), {})
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("x")
    failing(tmp_path, FileExistsError, "target exists already", mapping="decoder")
    assert (tmp_path / "target" / "mine").read_text() == "x"


def test_a_destination_inside_the_source_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "source", "dcp", dcp_arrays(), {})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"is inside the source .*: expected a destination outside"):
        convert(tmp_path / "source", tmp_path / "source" / "new", mapping="decoder")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_of_another_model_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "source", "dcp", {"model.blocks.0.w": np.ones((2, 2))}, {})
    failing(tmp_path, MappingError, r"match no rule: model\.blocks\.0\.w", mapping="decoder")


@pytest.mark.parametrize("held", ["dcp", "orbax"])
def test_a_truncated_source_leaves_nothing(tmp_path: Path, held: str) -> None:
    arrays = dcp_arrays() if held == "dcp" else expected_orbax(dcp_arrays())
    write(tmp_path / "source", held, arrays, {})
    largest = max(
        (p for p in (tmp_path / "source").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-100])
    failing(tmp_path, CheckpointError, "source", mapping="decoder")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_read_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    write(tmp_path / "source", "dcp", dcp_arrays(), {})
    from bridge.core.formats.dcp.reader import DcpReader

    part, read_into = DcpReader._part, DcpReader.read_into

    def broken(self: DcpReader, info: TensorInfo, *rest: Any) -> Any:
        if info.name == "optimizer.state.norm.weight.exp_avg":
            raise CheckpointError("broken disk")
        return part(self, info, *rest)

    def broken_into(self: DcpReader, wanted: Sequence[Wanted]) -> Any:
        if "optimizer.state.norm.weight.exp_avg" in dict(wanted):
            raise CheckpointError("broken disk")
        return read_into(self, wanted)

    monkeypatch.setattr(DcpReader, "_part", broken)
    monkeypatch.setattr(DcpReader, "read_into", broken_into)
    failing(tmp_path, CheckpointError, "broken disk", mapping="decoder", workers=workers)


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "source", "dcp", dcp_arrays(), {})

    def interrupt(done: int, total: int, name: str) -> None:
        raise KeyboardInterrupt

    failing(tmp_path, KeyboardInterrupt, None, mapping="decoder", progress=interrupt)


def test_the_source_is_not_written_to(tmp_path: Path) -> None:
    write(tmp_path / "source", "orbax", expected_orbax(dcp_arrays()), HYPERPARAMETERS)
    shutil.copytree(tmp_path / "source", tmp_path / "copy")
    convert(tmp_path / "source", tmp_path / "target", mapping="decoder")
    files = sorted(p.relative_to(tmp_path / "copy") for p in (tmp_path / "copy").rglob("*") if p.is_file())
    assert files == sorted(
        p.relative_to(tmp_path / "source") for p in (tmp_path / "source").rglob("*") if p.is_file()
    )
    for file in files:
        assert (tmp_path / "copy" / file).read_bytes() == (tmp_path / "source" / file).read_bytes()


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    failing(
        tmp_path,
        ValueError,
        "expected a checkpoint format out of dcp, orbax, safetensors, got 'zip'",
        to="zip",
    )
    failing(tmp_path, ValueError, "expected 1 worker or more, got 0", workers=0)
    failing(tmp_path, ValueError, "expected a mapping for the axis sizes", axes={"d": 4})


def test_converting_needs_neither_framework(tmp_path: Path) -> None:
    write(tmp_path / "dcp", "dcp", dcp_arrays(), HYPERPARAMETERS)
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['jax'] = None\n"
        "from bridge.commands.main import main\n"
        "sys.argv[0] = 'twinshard'\n"
        "main()\n"
    )
    arguments = ["convert", str(tmp_path / "dcp"), str(tmp_path / "orbax"), "--mapping", "decoder"]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=120)
    assert_same(tensors(tmp_path / "orbax"), expected_orbax(dcp_arrays()))


@pytest.mark.parametrize("through", ["orbax", "safetensors"])
def test_lists_of_tensors_and_other_values_come_back_as_lists(tmp_path: Path, through: str) -> None:
    groups = [{"lr": 0.1, "params": [0]}, {"lr": torch.tensor(0.2), "params": [1]}]
    state = {"opt": {"param_groups": groups}, "x": [1, torch.ones(2), "s", None], "w": torch.ones(3)}
    stock_save(state, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to=through)
    convert(tmp_path / "b", tmp_path / "c", to="dcp")
    states = []
    for name in ("a", "c"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        states.append(torch.load(tmp_path / f"{name}.pt"))
    assert str(states[1]) == str(states[0]) == str(state)
