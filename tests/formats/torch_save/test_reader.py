"""Files of torch.save, compared with what torch.load and torch's own conversion to DCP make of them."""

from __future__ import annotations

import argparse
import collections
import json
import os
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.commands.main import app
from bridge.core.formats import Box, CheckpointError, detect_format, open_checkpoint
from bridge.core.formats.tensors.arrays import raw_bytes
from tests.support.bridge.mutants import hostile_pickles

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    base = torch.randn(100)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4))
    model[2].bias = torch.nn.Parameter(model[2].bias.detach().bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [
            base[10:20],
            base.view(10, 10).t()[2:, 1:4],
            base[3].expand(7),
            base.view(2, 5, 10)[::1, 1::2],
        ],
        "tied": base,
        "unsigned": torch.arange(5).to(torch.uint16),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "buffer": torch.nn.Buffer(torch.ones(2)),
        "step": 3,
        "lr": 0.1,
        "defaults": collections.defaultdict(dict, {1: {"a": None}}),
        "size": torch.Size([1, 2]),
        "deep": [{"x": [1, {"y": torch.eye(2)}]}, "text"],
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torch") / "a.pt"
    torch.save(state(), path)
    return path


def tensors_of(node: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return {path: node}
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return {k: t for key, value in items for k, t in tensors_of(value, f"{path}.{key}".strip(".")).items()}


@pytest.mark.parametrize("protocol", [2, pytest.param(4, marks=pytest.mark.slow), 5])
def test_every_tensor_has_the_bits_that_torch_loads(tmp_path: Path, protocol: int) -> None:
    torch.save(state(), tmp_path / "a.pt", pickle_protocol=protocol)
    expected = tensors_of(torch.load(tmp_path / "a.pt", weights_only=False))
    with open_checkpoint(tmp_path / "a.pt") as reader:
        assert reader.format == "torch"
        assert list(reader.tensors) == list(expected)
        for name, tensor in expected.items():
            info = reader.tensors[name]
            assert (info.shape, f"torch.{info.dtype.name}") == (tuple(tensor.shape), str(tensor.dtype))
            whole = (
                tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                if tensor.numel()
                else b""
            )
            assert raw_bytes(reader.read(name)).tobytes() == whole
        assert reader.objects["size"] == (1, 2)
        assert reader.objects["optimizer.param_groups.0.params"] == [0, 1, 2, 3, 4, 5]


def test_any_box_of_a_view_is_read(saved: Path) -> None:
    expected = tensors_of(state()["views"])
    rng = np.random.default_rng(0)
    with open_checkpoint(saved) as reader:
        for name, tensor in expected.items():
            for _ in range(40):
                offsets = tuple(int(rng.integers(0, n + 1)) for n in tensor.shape)
                box = Box(
                    offsets,
                    tuple(
                        int(rng.integers(0, n - o + 1)) for n, o in zip(tensor.shape, offsets, strict=True)
                    ),
                )
                assert np.array_equal(reader.read(f"views.{name}", box), tensor.numpy()[box.slices()])
                loan = reader.lend(f"views.{name}", box)
                if loan is not None:
                    assert np.array_equal(loan.array, tensor.numpy()[box.slices()])
                    loan.give_back()


def test_names_and_values_are_those_of_torchs_own_conversion(saved: Path, tmp_path: Path) -> None:
    torch_save_to_dcp(saved, tmp_path / "torch")
    convert(saved, tmp_path / "ours", to="dcp")
    # Torch pickles a torch.Size there, by its class.
    report = diff(tmp_path / "ours", tmp_path / "torch", selection=Selection(drop=("size",)))
    assert (report.max_ulp, report.within) == (0, True), report
    assert verify(tmp_path / "ours").good
    with open_checkpoint(tmp_path / "torch") as theirs, open_checkpoint(saved) as reader:
        assert {n: t.path for n, t in theirs.tensors.items()} == {
            n: t.path for n, t in reader.tensors.items()
        }
        # Torch loses containers without content.
        assert dict(theirs.object_paths) == dict(reader.object_paths)


@pytest.mark.parametrize("to", ["orbax", pytest.param("safetensors", marks=pytest.mark.slow)])
def test_other_formats_have_it_whole(saved: Path, tmp_path: Path, to: str) -> None:
    convert(saved, tmp_path / "b", to=to)
    report = diff(saved, tmp_path / "b")
    assert (report.max_ulp, report.within) == (0, True)
    assert verify(tmp_path / "b").good


def test_arrays_and_scalars_of_numpy_are_tensors(tmp_path: Path) -> None:
    content = {
        "a": np.arange(6.0).reshape(2, 3).T,
        "s": np.float32(3),
        "b": np.arange(3, dtype=">i4"),
        "rng": ("MT19937", np.arange(4, dtype=np.uint32), 1, 0, 0.0),
        "object": np.array([None, {}], dtype=object),
    }
    torch.save(content, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as reader:
        assert {n: (t.path, t.shape, t.dtype.name) for n, t in reader.tensors.items()} == {
            "a": (("a",), (3, 2), "float64"),
            "s": (("s",), (), "float32"),
            "b": (("b",), (3,), "int32"),
            "rng.1": (("rng", 1), (4,), "uint32"),
        }
        assert np.array_equal(reader.read("a"), content["a"])
        assert reader.read("a", Box((1, 0), (1, 2))).tolist() == [[1.0, 4.0]]
        assert reader.read("b").tolist() == [0, 1, 2]
        with pytest.raises(
            CheckpointError, match="'object': expected a plain value, found an array of NumPy"
        ):
            reader.objects["object"]


def test_an_array_of_a_type_that_numpy_does_not_know_is_no_tensor(saved: Path, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "a": np.arange(3, dtype="<i8")}, tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", tmp_path / "b.pt", lambda n, d: d.replace(b"\2\0\0\0i8", b"\2\0\0\0b8"))
    assert list(open_checkpoint(tmp_path / "a.pt").tensors) == ["w", "a"]
    with open_checkpoint(tmp_path / "b.pt") as reader:
        assert list(reader.tensors) == ["w"]


class Named:
    """Pickled as a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_classes_and_calls_are_named_and_hide_nothing_else(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    content = {
        "w": torch.ones(3),
        "args": argparse.Namespace(lr=1.0),
        "bad": Named(os.system, f"touch {marker}"),
        "deep": {"worse": [torch.ones(1), Named(exec, f"open({str(marker)!r}, 'w')")]},
        "set": {1},
        "sparse": torch.eye(3).to_sparse(),
    }
    torch.save(content, tmp_path / "a.pt")
    assert not marker.exists()
    listed = inspect(tmp_path / "a.pt")
    assert [t.name for t in listed.tensors] == ["w", "deep.worse.0"]
    reasons = {name: text.partition("found ")[2] for name, text in listed.unreadable.items()}
    assert reasons.keys() == {"args", "bad", "deep.worse.1", "set", "sparse"}
    assert reasons["args"].startswith("an object of class argparse.Namespace")
    assert reasons["bad"].startswith("a call of posix.system, which Twinshard does not execute")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "a.pt"), str(tmp_path / "b")])
    assert result.exit_code == 2
    assert "--drop" in result.stderr
    drop = tuple(reasons)
    convert(tmp_path / "a.pt", tmp_path / "b", selection=Selection(drop=drop))
    with open_checkpoint(tmp_path / "b") as reader:
        assert reader.read("w").tolist() == [1.0, 1.0, 1.0]
    assert not marker.exists()


@pytest.mark.parametrize("number", range(len(hostile_pickles(Path("x")))))
def test_a_hostile_pickle_is_refused_or_stays_a_description(tmp_path: Path, number: int) -> None:
    marker = tmp_path / "executed"
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", hostile_pickles(marker)[number])
        archive.writestr("a/byteorder", "little")
    with pytest.raises(CheckpointError):
        convert(tmp_path / "a.pt", tmp_path / "b")
    assert not marker.exists()
    assert not (tmp_path / "b").exists()


def rewritten(
    source: Path, target: Path, change: Callable[[str, bytes], bytes | None], **options: Any
) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", **options) as new:
        for entry in old.infolist():
            data = change(entry.filename, old.read(entry))
            if data is not None:
                new.writestr(entry.filename, data)


def described(*, first: int = 0, shape: tuple[int, ...] = (2, 3), strides: tuple[int, ...] = (3, 1)) -> bytes:
    def number(value: int) -> bytes:
        size = max(1, (value.bit_length() + 8) // 8)
        return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\3\0\0\0cpuK\6tQ"
    arguments = (
        storage + number(first) + numbers(shape) + numbers(strides) + b"\x89ccollections\nOrderedDict\n)R"
    )
    return b"\x80\x02}X\1\0\0\0wctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tRs."


@pytest.mark.parametrize(
    "geometry",
    [
        {"first": 1},
        {"first": -1},
        {"shape": (3, 3)},
        {"strides": (4, 1)},
        {"strides": (-3, 1)},
        {"shape": (2**62, 2**62)},
        {"shape": (2**40,), "strides": (2**40,)},
        {"shape": (-2, 3)},
        {"shape": (2,), "strides": (3, 1)},
        {"shape": (1,) * 65, "strides": (1,) * 65},
        {"first": 2**64},
    ],
)
def test_tensors_outside_of_their_storage_are_refused(tmp_path: Path, geometry: dict[str, Any]) -> None:
    torch.save({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "a.pt")
    for name, text in (("ok", described()), ("bad", described(**geometry))):
        changed = {"data.pkl": text}
        rewritten(
            tmp_path / "a.pt", tmp_path / f"{name}.pt", lambda n, d, c=changed: c.get(n.rpartition("/")[2], d)
        )
    with open_checkpoint(tmp_path / "ok.pt") as reader:
        assert reader.read("w").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    with pytest.raises(CheckpointError, match=r"tensor 'w': expected"):
        open_checkpoint(tmp_path / "bad.pt")


def test_a_small_storage_that_claims_to_be_large_by_repeating_it_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(1 << 40), "v": torch.ones(1)}, tmp_path / "a.pt")
    assert inspect(tmp_path / "a.pt").tensors[0].nbytes == 4 << 40
    with pytest.raises(CheckpointError, match=r"'w' \(4398046511104 bytes that repeat 4 stored bytes\)"):
        convert(tmp_path / "a.pt", tmp_path / "b")
    convert(tmp_path / "a.pt", tmp_path / "b", selection=Selection(drop=("w",)))


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "of another format": (lambda p: p.write_text("hello"), "found a file of another kind"),
    "legacy": (
        lambda p: torch.save({"a": torch.ones(2)}, p, _use_new_zipfile_serialization=False),
        "found the format before PyTorch 1.6",
    ),
    "TorchScript": (
        lambda p: torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), p),
        "a TorchScript program",
    ),
    "a module": (
        lambda p: torch.save(torch.nn.Linear(2, 2), p),
        "an object of class torch.nn.modules.linear.Linear",
    ),
    "one tensor": (lambda p: torch.save(torch.ones(2), p), "found one tensor"),
    "a number": (lambda p: torch.save(3, p), "found a value of type int"),
    "empty": (lambda p: p.write_bytes(b""), "the file is empty"),
    "a pickle": (lambda p: p.write_bytes(b"\x80\x02K\1."), "found a pickle"),
    "a zip file": (
        lambda p: zipfile.ZipFile(p, "w").close() or p.write_bytes(b"PK\3\4" + p.read_bytes()),
        "expected",
    ),
}


@pytest.mark.parametrize("file_type", OTHERS)
def test_files_of_other_kinds_are_named(tmp_path: Path, file_type: str) -> None:
    make, message = OTHERS[file_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "a.pt")


def test_compressed_repeated_and_missing_members_are_refused(saved: Path, tmp_path: Path) -> None:
    rewritten(saved, tmp_path / "z.pt", lambda _, data: data, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"is compressed"):
        open_checkpoint(tmp_path / "z.pt")
    rewritten(saved, tmp_path / "m.pt", lambda n, data: None if n.endswith("data/1") else data)
    with pytest.raises(CheckpointError, match=r"tensor '.*': expected a record of \d+ bytes, got none"):
        open_checkpoint(tmp_path / "m.pt")
    rewritten(saved, tmp_path / "s.pt", lambda n, data: data[:-4] if n.endswith("data/1") else data)
    with pytest.raises(CheckpointError, match=r"expected a record of \d+ bytes, got \d+"):
        open_checkpoint(tmp_path / "s.pt")
    rewritten(saved, tmp_path / "b.pt", lambda n, data: b"big" if n.endswith("byteorder") else data)
    with pytest.raises(CheckpointError, match="little-endian"):
        open_checkpoint(tmp_path / "b.pt")
    rewritten(saved, tmp_path / "w.pt", lambda n, data: data)
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "w.pt", "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("a/data/1", b"1234")
    with pytest.raises(CheckpointError, match="occurs twice"):
        open_checkpoint(tmp_path / "w.pt")


def test_members_that_overlap_are_refused(saved: Path, tmp_path: Path) -> None:
    data = bytearray(saved.read_bytes())
    directory = data.rfind(b"PK\6\6")
    position = struct.unpack_from("<Q", data, directory + 48)[0]
    name = struct.unpack_from("<H", data, position + 28)[0]
    # The first two entries get one place; their headers are found to differ only when they are read.
    second = position + 46 + sum(struct.unpack_from("<3H", data, position + 28))
    assert name
    struct.pack_into("<I", data, second + 42, struct.unpack_from("<I", data, position + 42)[0] + 8)
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"its members .* and .* overlap$"):
        open_checkpoint(tmp_path / "a.pt")


def test_every_flip_in_a_storage_is_found(saved: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        offsets = []
        for entry in archive.infolist():
            if "/data/" in entry.filename and entry.file_size:
                header = entry.header_offset
                start = header + 30 + sum(struct.unpack_from("<2H", saved.read_bytes(), header + 26))
                offsets.append(start + entry.file_size // 2)
    assert len(offsets) > 20
    data = saved.read_bytes()
    for offset in offsets:
        flipped = bytearray(data)
        flipped[offset] ^= 1
        (tmp_path / "a.pt").write_bytes(flipped)
        with pytest.raises(CheckpointError, match="CRC-32"):
            convert(tmp_path / "a.pt", tmp_path / "b", to="dcp")
        assert not verify(tmp_path / "a.pt").good
    convert(tmp_path / "a.pt", tmp_path / "b", to="dcp", verify=False)
    assert verify(saved).protected == sum(t.nbytes for t in inspect(saved).tensors)


def test_shards_of_a_hub_folder_are_one_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    parts = {"pytorch_model-00001-of-00002.bin": ["a", "b"], "pytorch_model-00002-of-00002.bin": ["c"]}
    arrays = {name: torch.randn(3, 4) for name in "abc"}
    for file, names in parts.items():
        torch.save({name: arrays[name] for name in names}, folder / file)
    torch.save({"not": "weights"}, folder / "training_args.bin")
    torch.save({"state": {}}, folder / "optimizer.pt")
    index = folder / "pytorch_model.bin.index.json"
    weight_map = {name: file for file, names in parts.items() for name in names}
    index.write_text(json.dumps({"metadata": {"total_size": 144}, "weight_map": weight_map}))
    for path in (folder, index):
        with open_checkpoint(path) as reader:
            assert {name: reader.read(name).tolist() for name in reader.tensors} == {
                name: array.tolist() for name, array in arrays.items()
            }
    index.write_text(json.dumps({"weight_map": {**weight_map, "d": "pytorch_model-00002-of-00002.bin"}}))
    with pytest.raises(
        CheckpointError, match=r"1 is not in that file: 'd' of pytorch_model-00002-of-00002\.bin"
    ):
        open_checkpoint(folder)
    index.write_text(json.dumps({"weight_map": {**weight_map, "c": "../c.bin"}}))
    with pytest.raises(CheckpointError, match="expected the name of a file beside the index"):
        open_checkpoint(folder)
    index.unlink()
    with open_checkpoint(folder) as reader:
        assert {*reader.tensors} == {*arrays}
    torch.save(arrays, folder / "pytorch_model.bin")
    assert detect_format(folder) == "torch"
    with open_checkpoint(folder) as reader:
        assert list(reader.tensors) == ["a", "b", "c"]


def test_at_a_url_only_what_is_asked_for_is_fetched(tmp_path: Path, saved: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.pipe("/torch/a.pt", saved.read_bytes())
    with open_checkpoint("memory://torch/a.pt") as reader, open_checkpoint(saved) as local:
        assert list(reader.tensors) == list(local.tensors)
        assert all(np.array_equal(raw_bytes(reader.read(n)), raw_bytes(local.read(n))) for n in local.tensors)
    convert("memory://torch/a.pt", tmp_path / "b")
    assert diff(saved, tmp_path / "b").max_ulp == 0
