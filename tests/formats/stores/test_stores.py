"""Checkpoints at URLs: read by ranges, written whole or not at all. fsspec's memory stands for an object store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.convert.plan import ConvertOptions, planned
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.commands.main import app
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.stores import ranges
from bridge.core.formats.stores.listing import Listing
from bridge.core.formats.stores.store import store_errors
from bridge.core.formats.tensors.base import Box, CheckpointError
from bridge.propose.propose import propose
from tests.support.bridge.bits import random_bits

FORMATS = ("dcp", "orbax", "safetensors")
BLOCK = 4096
ROOT = Path(__file__).parents[3]


class Counting(MemoryFileSystem):
    """A store in memory that counts the bytes it gives."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    served: ClassVar[dict[str, int]] = {}
    fails: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data = super().cat_file(path, start=start, end=end, **kwargs)
        self.served[path] = self.served.get(path, 0) + len(data)
        return data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if any(path.endswith(end) for end in self.fails):
            raise PermissionError(f"may not write {path}")
        super().pipe_file(path, value, mode=mode, **kwargs)

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode == "wb" and any(path.endswith(end) for end in self.fails):
            raise PermissionError(f"may not write {path}")
        return super().open(path, mode, *args, **kwargs)


class Buckets(MemoryFileSystem):
    """An object store as s3fs shows it: names begin with a bucket, which ``makedirs`` creates if it is not there."""

    protocol = "buckets"
    root_marker = ""
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    buckets: ClassVar[set[str]] = set()
    hidden: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("buckets://").strip("/")

    def exists(self, path: str, **kwargs: Any) -> bool:
        if self.hidden and "/" not in path:
            raise PermissionError(path)
        return path in self.buckets or any(f"{name}/".startswith(f"{path}/") for name in self.store)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.buckets.add(path.partition("/")[0])

    def find(self, path: str, maxdepth: int | None = None, detail: bool = False, **_: Any) -> Any:
        below = {name: self.info(name) for name in self.store if name.startswith(f"{path}/") or name == path}
        return below if detail else list(below)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.require(path)
        super().pipe_file(path, value, mode=mode, **kwargs)

    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        self.require(path)
        return super().open(path, mode, *args, **kwargs)

    def require(self, path: str) -> None:
        if path.partition("/")[0] not in self.buckets:
            raise FileNotFoundError("The specified bucket does not exist")


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Counting]:
    fsspec.register_implementation("counted", Counting, clobber=True)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(ranges, "BLOCK", BLOCK)
    monkeypatch.setattr(ranges, "_PAUSE", 0.0)
    fsspec.register_implementation("buckets", Buckets, clobber=True)
    monkeypatch.setattr(Buckets, "hidden", False)
    for table in (Counting.store, Counting.served, Buckets.store, Buckets.buckets):
        table.clear()
    Counting.fails = set()
    Counting.pseudo_dirs[:] = [""]
    yield Counting()
    assert not any((tmp_path / "temporary").iterdir()), "something temporary was left"


def tensors() -> dict[str, np.ndarray]:
    return {
        "model.a": random_bits((300, 91), np.dtype(np.float32), 0),
        "model.b": random_bits((41, 77), np.dtype(np.int16), 1),
        "model.scalar": random_bits((), np.dtype(np.float64), 2),
        "model.none": np.zeros((0, 3), np.float32),
        "optimizer.state.model.a.exp_avg": random_bits((300, 91), np.dtype(np.float32), 3),
    }


def save(path: Path, format: str, arrays: Mapping[str, np.ndarray], objects: Mapping[str, object]) -> Path:
    with create_checkpoint(path, format) as writer:
        for name, value in objects.items():
            writer.add_object(tuple(name.split(".")), value)
        names = {
            name: writer.add_tensor(tuple(name.split(".")), array.shape, array.dtype).name
            for name, array in arrays.items()
        }
        for name, array in arrays.items():
            for box in writer.chunks(names[name]):
                writer.write(names[name], box, array[box.slices()])
    return path


def put(store: Counting, local: Path, url: str) -> None:
    files = [local] if local.is_file() else [p for p in local.rglob("*") if p.is_file()]
    for file in files:
        name = url if file == local else f"{url}/{file.relative_to(local)}"
        store.pipe_file(name, file.read_bytes())


def local_source(tmp_path: Path, format: str) -> Path:
    return save(tmp_path / f"source_{format}", format, tensors(), {"train.step": 7, "train.note": "none"})


@pytest.mark.parametrize("format", FORMATS)
def test_a_checkpoint_at_a_url_is_what_it_is_as_files(tmp_path: Path, store: Counting, format: str) -> None:
    local, url = local_source(tmp_path, format), "counted://bucket/runs/step_40"
    put(store, local, url)
    with open_checkpoint(url) as there, open_checkpoint(local) as here:
        assert (there.format, there.path) == (format, url)
        assert dict(there.tensors) == dict(here.tensors)
        assert dict(there.objects) == dict(here.objects)
        for name, info in here.tensors.items():
            assert there.read(name).tobytes() == here.read(name).tobytes()
            if info.numel > 1:
                box = Box((7, 30), (30, 41))
                assert there.read(name, box).tobytes() == here.read(name, box).tobytes()
    assert verify(url).good
    assert verify(url).path == url
    assert inspect(url).manifest
    assert diff(url, local).max_ulp == 0
    assert propose(url, local).rules == propose(local, local).rules


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.parametrize("format", FORMATS)
def test_conversions_from_url_to_url(tmp_path: Path, store: Counting, format: str, target: str) -> None:
    local, url, out = local_source(tmp_path, format), "counted://a/step_40", "counted://b/deep/step_40"
    put(store, local, url)
    told: list[tuple[int, int]] = []
    report = convert(url, out, to=target, workers=2, progress=lambda done, all_, _: told.append((done, all_)))
    assert {all_ for _, all_ in told} == {report.bytes}
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == report.bytes
    assert (report.source, report.destination) == (url, out)
    assert verify(out).good
    back = tmp_path / "back"
    convert(out, back, to=format)
    assert diff(local, back).within
    with open_checkpoint(local) as reader, open_checkpoint(back) as other:
        assert {n: reader.read(n).tobytes() for n in reader.tensors} == {
            n: other.read(n).tobytes() for n in other.tensors
        }
        assert dict(reader.objects) == dict(other.objects)


def test_one_safetensors_file_and_its_manifest(tmp_path: Path, store: Counting) -> None:
    local = tmp_path / "weights.safetensors"
    save(local, "safetensors", tensors(), {})
    convert(local, "counted://b/w.safetensors", to="safetensors")
    assert sorted(store.find("b")) == ["/b/w.safetensors", "/b/w.safetensors.manifest.json"]
    assert verify("counted://b/w.safetensors").manifest
    assert diff(local, "counted://b/w.safetensors").max_ulp == 0


@pytest.mark.parametrize("format", FORMATS)
def test_only_what_is_needed_is_fetched(tmp_path: Path, store: Counting, format: str) -> None:
    big = {f"t{k}": random_bits((64, 256), np.dtype(np.float32), k) for k in range(16)}
    save(tmp_path / "big", format, big, {})
    url = "counted://bucket/big"
    put(store, tmp_path / "big", url)
    data = max(store.find("bucket/big"), key=lambda name: store.info(name)["size"])
    size = store.info(data)["size"]
    inspect(url)
    assert store.served.get(data, 0) <= size / 8
    store.served.clear()
    with planned(url, ConvertOptions(selection=Selection(("t3",)))):
        assert store.served.get(data, 0) <= size / 8
    convert(url, tmp_path / "part", to="safetensors", selection=Selection(("t3",)))
    assert 64 * 256 * 4 <= store.served[data] <= size / 3
    with open_checkpoint(url) as reader:
        store.served.clear()
        for name in reader.tensors:
            reader.read(name)
            reader.read(name)
        assert store.served[data] <= size


def test_what_stock_orbax_compresses_and_shards_is_read(tmp_path: Path, store: Counting) -> None:
    import orbax.checkpoint as ocp

    rng = np.random.default_rng(2)
    tree = {"w": rng.standard_normal((200, 130)).astype(np.float32), "tiny": np.arange(3, dtype=np.int32)}
    for number, options in enumerate(
        ({"use_ocdbt": True}, {"use_ocdbt": False}, {"use_ocdbt": True, "use_zarr3": True})
    ):
        local = tmp_path / f"stock{number}"
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(local, tree)
        url = f"counted://bucket/stock{number}"
        put(store, local, url)
        with open_checkpoint(url) as reader:
            for name, array in tree.items():
                assert reader.read(name).tobytes() == array.tobytes()
            assert reader.read("w", Box((150, 7), (20, 100))).tobytes() == tree["w"][150:170, 7:107].tobytes()


def test_damage_in_a_store_is_named_by_url(tmp_path: Path, store: Counting) -> None:
    put(store, local_source(tmp_path, "dcp"), "counted://bucket/step_1")
    (name,) = (n for n in store.find("bucket/step_1") if n.endswith(".distcp"))
    data = bytearray(store.cat_file(name))
    with open_checkpoint("counted://bucket/step_1") as reader:
        start, _ = reader._reader.data_ranges()[name.rpartition("/")[2]][0]  # type: ignore[attr-defined] # in no protocol
    data[start] ^= 1
    store.pipe_file(name, bytes(data))
    with pytest.raises(CheckpointError, match=r"^counted://bucket/step_1/__0_0.distcp: tensor .* damaged"):
        convert("counted://bucket/step_1", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    problems = verify("counted://bucket/step_1").problems
    assert problems
    assert all(str(tmp_path) not in problem.text for problem in problems)
    assert any("counted://bucket/step_1/__0_0.distcp" in problem.text for problem in problems)


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path, store: Counting) -> None:
    put(store, local_source(tmp_path, "safetensors"), "counted://bucket/x")
    (name,) = (n for n in store.find("bucket/x") if n.endswith(".safetensors"))
    with open_checkpoint("counted://bucket/x") as reader:
        store.pipe_file(name, store.cat_file(name)[:20000])
        with pytest.raises(
            (CheckpointError, OSError), match=r"counted://bucket/x/model.safetensors: expected"
        ):
            reader.read("model.a")
        store.rm_file(name)
        with pytest.raises(OSError, match=r"cannot read counted://bucket/x/model.safetensors: FileNotFound"):
            reader.read("model.a")


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/outside", "a//b"])
def test_names_that_lead_elsewhere_are_refused(
    store: Counting, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store.pipe_file("/bucket/x/.metadata", b"1")
    listing = {
        "/bucket/x/.metadata": {"size": 1, "type": "file"},
        f"/bucket/x/{name}": {"size": 1, "type": "file"},
    }
    monkeypatch.setattr(Counting, "find", lambda *_, **__: dict(listing))
    with pytest.raises(CheckpointError, match="expected names of files below it"):
        Listing("counted://bucket/x")


def test_names_that_cannot_be_files_beside_each_other_are_refused(
    store: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = {f"/bucket/x/{n}": {"size": 1, "type": "file"} for n in ("a", "a/b")}
    monkeypatch.setattr(Counting, "find", lambda *_, **__: dict(listing))
    with pytest.raises(
        CheckpointError,
        match=r"counted://bucket/x: expected files and directories of different names, found 'a'",
    ):
        Listing("counted://bucket/x")


def test_sizes_that_no_file_has_are_refused(store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1 << 62, -1, None):
        listing = {"/bucket/x/a": {"size": size, "type": "file"}}
        monkeypatch.setattr(Counting, "find", lambda *_, listing=listing, **__: dict(listing))
        with pytest.raises(CheckpointError, match="counted://bucket/x"):
            Listing("counted://bucket/x")
    monkeypatch.setattr(
        Counting, "find", lambda *_, **__: {"/bucket/x/.metadata": {"size": 1 << 31, "type": "file"}}
    )
    with pytest.raises(
        CheckpointError, match=r"counted://bucket/x/.metadata: expected at most 268435456 bytes"
    ):
        open_checkpoint("counted://bucket/x")


def test_nothing_there_and_stores_that_are_not_known() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"counted://bucket/none does not exist: expected a checkpoint there"
    ):
        convert("counted://bucket/none", "out")
    with pytest.raises(CheckpointError, match=r"cannot open nosuch://x: Protocol not known"):
        inspect("nosuch://x")


def test_protocols_in_capitals_are_known(tmp_path: Path) -> None:
    local = local_source(tmp_path, "dcp")
    with open_checkpoint(f"FILE://{local}") as reader:
        assert reader.tensors
    convert(local, f"File://{tmp_path}/b", to="dcp")
    assert verify(tmp_path / "b").good


def test_missing_credentials_are_told_with_what_to_do() -> None:
    with (
        pytest.raises(
            OSError, match=r"^cannot list x: RuntimeError: Unable to locate credentials; log in with"
        ),
        store_errors("cannot list x"),
    ):
        raise RuntimeError("Unable to locate credentials")


@pytest.mark.parametrize("end", [".distcp", "twinshard_manifest.json", ".metadata"])
@pytest.mark.parametrize("resume", [False, True])
def test_an_upload_that_fails_leaves_nothing_and_can_be_resumed(
    tmp_path: Path, store: Counting, end: str, resume: bool
) -> None:
    local, out = local_source(tmp_path, "orbax"), "counted://bucket/out"
    Counting.fails = {end}
    with pytest.raises(OSError, match=rf"cannot write counted://bucket/out/.*{end}: PermissionError"):
        convert(local, out, resume=resume)
    assert bool(store.find("bucket")) == resume
    with pytest.raises((CheckpointError, FileNotFoundError)):
        open_checkpoint(out)
    Counting.fails = set()
    convert(local, out, resume=resume)
    assert verify(out).good
    assert diff(local, out).max_ulp == 0


@pytest.mark.parametrize("resume", [False, True])
def test_no_bucket_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool) -> None:
    local = local_source(tmp_path, "dcp")
    for url in ("buckets://typo/runs/x", "buckets://typo"):
        with pytest.raises(
            FileNotFoundError, match=f"in {url}, found no bucket 'typo' .* create the bucket first"
        ):
            convert(local, url, resume=resume)
    monkeypatch.setattr(Buckets, "hidden", True)
    with pytest.raises(FileNotFoundError, match=r"cannot write buckets://typo/runs/.*bucket does not exist"):
        convert(local, "buckets://typo/runs/x")
    assert not Buckets.buckets
    Buckets.buckets.add("real")
    for url in ("buckets://real/runs/x", "buckets://real/runs/y"):
        convert(local, url, resume=resume)
    assert Buckets.buckets == {"real"}
    assert {name.rpartition("/")[0] for name in Buckets.store} >= {"real/runs/x", "real/runs/y"}


def test_a_store_that_cannot_be_reached_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library has tried several times before it raises."""

    class ClientConnectorError(OSError):
        pass

    tried = []

    def exists(_: Buckets, path: str, **__: object) -> bool:
        tried.append(path)
        raise ClientConnectorError("no network")

    monkeypatch.setattr(Buckets, "exists", exists)
    with pytest.raises(OSError, match=r"^cannot look at buckets://b/x: ClientConnectorError: no network$"):
        convert(local_source(tmp_path, "dcp"), "buckets://b/x")
    assert tried == ["b"]


def test_a_url_without_a_name_is_no_place_for_a_checkpoint(tmp_path: Path) -> None:
    local = local_source(tmp_path, "dcp")
    with pytest.raises(
        CheckpointError, match=r"^counted://: expected the URL of a new checkpoint, such as counted"
    ):
        convert(local, "counted://")


@pytest.mark.parametrize(
    ("url", "example"),
    [
        ("s3://", "s3://bucket/runs/step_40"),
        ("gs:///", "gs://bucket/runs/step_40"),
        ("hf://", "hf://org/model"),
        ("file://", "file:///runs/step_40"),
        ("memory://", "memory://bucket/runs/step_40"),
    ],
)
def test_a_protocol_alone_is_refused_in_our_words(
    url: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_source(tmp_path, "safetensors")
    monkeypatch.chdir(tmp_path)
    for arguments in (["inspect", url], ["verify", url], ["convert", url, "b", "--step", "3"]):
        failed = CliRunner().invoke(app, arguments)
        assert failed.exit_code == 2
        assert failed.output == (
            f"error: {url.partition('://')[0]}:// is only a protocol: expected the URL of a checkpoint, such as "
            f"{example}, got no name: is a variable in your script unset?\n"
        )


def test_metadata_is_sent_last(tmp_path: Path, store: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    pipe_file = Counting.pipe_file
    monkeypatch.setattr(
        Counting,
        "pipe_file",
        lambda self, name, data, **_: (sent.append(name), pipe_file(self, name, data))[1],
    )
    local = local_source(tmp_path, "orbax")
    for format, last in (("dcp", [".metadata"]), ("orbax", ["_METADATA", "commit_success.txt"])):
        sent.clear()
        convert(local, f"counted://bucket/{format}", to=format)
        assert [name.rpartition("/")[2] for name in sent[-len(last) :]] == last


def test_places_that_are_taken_are_refused_before_anything_is_read(tmp_path: Path, store: Counting) -> None:
    local = local_source(tmp_path, "dcp")
    store.pipe_file("/bucket/out/file", b"precious")
    with pytest.raises(FileExistsError, match=r"expected nothing at counted://bucket/out, found something"):
        convert(local, "counted://bucket/out")
    with pytest.raises(
        CheckpointError, match="is in an object store, which cannot replace a checkpoint atomically"
    ):
        convert(local, "counted://bucket/out", replace=True)
    put(store, local, "counted://bucket/source")
    with pytest.raises(CheckpointError, match=r"is inside the source .*: expected a destination outside"):
        convert("counted://bucket/source", "counted://bucket/source/below")
    assert store.cat_file("/bucket/out/file") == b"precious"


def test_urls_of_local_files_are_known_to_be_the_source(tmp_path: Path) -> None:
    source = local_source(tmp_path, "safetensors")
    before = sorted(path.name for path in source.iterdir())
    outside = "(is inside|contains) the source .*: expected a destination (outside|that does not)"
    for src, dst in (
        (f"file://{source}", str(source)),
        (f"file://{source}", str(source / "below")),
        (f"local://{source}", str(tmp_path)),
    ):
        with pytest.raises(CheckpointError, match=outside):
            convert(src, dst, to="safetensors", replace=True)
    with pytest.raises(CheckpointError, match=outside):
        convert(source, f"file://{source}/below", to="safetensors")
    with pytest.raises(FileExistsError, match="exists already"):
        convert(source, f"file://{source}", to="safetensors")
    assert sorted(path.name for path in source.iterdir()) == before


def test_a_store_of_files_from_the_command_line(tmp_path: Path) -> None:
    local = local_source(tmp_path, "dcp")
    run = CliRunner()
    result = run.invoke(app, ["convert", f"file://{local}", f"file://{tmp_path}/there/orbax", "--parents"])
    assert result.exit_code == 0, result.output
    assert f"file://{tmp_path}/there/orbax (orbax)" in result.output
    assert run.invoke(app, ["verify", f"file://{tmp_path}/there/orbax"]).exit_code == 0
    assert run.invoke(app, ["diff", str(local), f"file://{tmp_path}/there/orbax"]).exit_code == 0
    shown = run.invoke(app, ["inspect", f"file://{tmp_path}/there/orbax", "--layout"])
    assert shown.output.startswith(f"file://{tmp_path}/there/orbax: orbax"), shown.output
    failed = run.invoke(app, ["convert", "nosuch://a", "b"])
    assert failed.exit_code == 2
    assert "error: cannot open nosuch://a: Protocol not known: nosuch" in failed.output
