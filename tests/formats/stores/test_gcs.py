"""Checkpoints in a bucket of an emulator of Google's storage, over HTTP: streamed, composed, killed and resumed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import open_checkpoint
from bridge.core.formats.stores import numbered_parts, upload
from bridge.core.formats.stores.folder import CLAIM
from bridge.core.formats.stores.store import open_store
from bridge.core.formats.tensors.base import CheckpointError
from tests.formats.stores.test_s3 import FORMATS, ROOT, require_same, source
from tests.support.buckets import Proxy, Request, free_port, kill_at, server

PART = 1 << 18
CONVERT = f"""
import sys
from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats.files import record
from bridge.core.formats.stores import numbered_parts, upload
upload.PART, record.SYNC_BYTES, numbered_parts.PAUSE, numbered_parts.MOST_SOURCES = {PART}, {PART}, 0.01, 3
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], resume=sys.argv[4] == "resume", workers=2)
"""


@dataclass(frozen=True)
class Bucket:
    """A bucket behind a proxy; `direct` is a file system that goes to the server past it."""

    name: str
    proxy: Proxy
    direct: Any

    def url(self, path: str) -> str:
        return f"gs://{self.name}/{path}"

    def names(self, path: str = "") -> list[str]:
        """Names of all objects below a path."""
        self.direct.invalidate_cache()
        root = f"{self.name}/{path}".rstrip("/")
        return [name[len(root) + 1 :] for name in self.direct.find(root)]

    def components(self, path: str) -> int:
        """Of how many parts an object is."""
        self.direct.invalidate_cache()
        return int(self.direct.info(f"{self.name}/{path}").get("componentCount", 1))


@pytest.fixture(scope="session")
def emulator() -> Iterator[int]:
    """The port of a server."""
    pytest.importorskip("gcp_storage_emulator")
    # Before gcsfs is imported: it asks for the kind of a bucket by gRPC, which the emulator does not have.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    pytest.importorskip("gcsfs")
    port = free_port()
    with server("-m", "tests.support.gcs_server", str(port), port=port):
        yield port


def options(url: str) -> dict[str, Any]:
    return {"token": "anon", "project": "test", "endpoint_url": url, "skip_instance_cache": True}


@pytest.fixture
def bucket(
    emulator: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Bucket]:
    import fsspec
    from fsspec.config import conf

    with Proxy(emulator) as proxy:
        for protocol in ("gs", "gcs"):
            monkeypatch.setitem(conf, protocol, options(proxy.url))
            monkeypatch.setenv(f"FSSPEC_{protocol.upper()}", json.dumps(options(proxy.url)))
        monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
        monkeypatch.setenv("TMPDIR", "/nonexistent")
        monkeypatch.setattr(numbered_parts, "PAUSE", 0.01)
        monkeypatch.setattr(upload, "PART", PART)
        direct = fsspec.filesystem("gs", **options(f"http://127.0.0.1:{emulator}"))
        name = f"bucket-{abs(hash(request.node.name)) % 10**12}-{free_port()}"
        direct.mkdir(name)
        yield Bucket(name, proxy, direct)


def is_part(request: Request) -> bool:
    return request.method == "POST" and "/upload/" in request.path and request.sent >= PART


def require_clean(bucket: Bucket, path: str) -> None:
    """Nothing of the attempts is there but the checkpoint."""
    names = bucket.names(path)
    assert names
    assert not [name for name in names if CLAIM in name]


@pytest.mark.fast_cases("orbax")
@pytest.mark.parametrize("format", FORMATS)
def test_from_bucket_to_bucket(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    local = source(tmp_path / "local", "dcp", rows=400)
    # More parts than are composed at once; then more than two levels.
    monkeypatch.setattr(upload, "PART", PART // 4)
    convert(local, bucket.url("a"), to=format, workers=2)
    assert max(bucket.components(f"a/{file}") for file in bucket.names("a")) > 32
    monkeypatch.setattr(upload, "PART", PART)
    monkeypatch.setattr(numbered_parts, "MOST_SOURCES", 3)
    convert(bucket.url("a"), bucket.url("b"), to=format, workers=2)
    for name in ("a", "b"):
        assert verify(bucket.url(name)).good
        require_same(local, bucket.url(name))
        require_clean(bucket, name)
    assert max(bucket.components(f"b/{file}") for file in bucket.names("b")) > 9
    with pytest.raises(FileExistsError, match="expected nothing at"):
        convert(local, bucket.url("a"), to=format, resume=True)
    with pytest.raises(FileNotFoundError, match="found no bucket 'no-such-bucket'"):
        convert(local, "gs://no-such-bucket/x")


@pytest.mark.parametrize("data", [b"", b"a\r", b"\r", b"a\n--==0==--b", b"a\n", b"a\r\n"], ids=repr)
def test_objects_keep_bytes_that_look_like_the_end_of_a_mime_part(bucket: Bucket, data: bytes) -> None:
    system = open_store(bucket.url("object"))[0]
    numbered_parts.put_object(system, f"{bucket.name}/object", data)
    assert bucket.direct.cat_file(f"{bucket.name}/object") == data


def test_an_upload_that_fails_is_resumed_with_the_parts_that_are_there(
    tmp_path: Path, bucket: Bucket
) -> None:
    local, url = source(tmp_path / "local", "dcp", large=5, rows=300), bucket.url("w.safetensors")
    size = sum(file.stat().st_size for file in local.iterdir())
    bucket.direct.pipe_file(f"{bucket.name}/w.safetensors.{CLAIM}s", b"of somebody else")
    sent = 0

    def fault(request: Request) -> Any:
        nonlocal sent
        sent += is_part(request)
        # One that gcsfs does not try again.
        return "404" if is_part(request) and sent > 10 else None

    bucket.proxy.fault = fault
    with pytest.raises(OSError, match=rf"^cannot write {url}"):
        convert(local, url, resume=True, workers=2)
    bucket.proxy.fault = lambda _: None
    with pytest.raises((CheckpointError, FileNotFoundError)):
        open_checkpoint(url)
    left = [name for name in bucket.names() if f".{CLAIM}.w.safetensors." in name]
    assert len(left) == 10
    bucket.proxy.seen.clear()
    assert convert(local, url, resume=True).resumed_bytes > 5 * PART
    again = sum(request.sent for request in bucket.proxy.seen if is_part(request))
    assert size - 11 * PART < again < size - 8 * PART
    assert verify(url).good
    require_same(local, url)
    assert bucket.names() == ["w.safetensors", "w.safetensors.manifest.json", f"w.safetensors.{CLAIM}s"]


def test_parts_without_a_claim_are_removed(tmp_path: Path, bucket: Bucket) -> None:
    local, url = source(tmp_path / "local", "dcp", large=2, rows=300), bucket.url("out")
    for name in ("__0_0.distcp.00001", "__0_0.distcp.00099", "__0_0.distcp.1-00000", "000001"):
        bucket.direct.pipe_file(f"{bucket.name}/out/{CLAIM}.{name}", b"x" * PART)
    convert(local, url, to="dcp", resume=True)
    require_same(local, url)
    require_clean(bucket, "out")


def test_buckets_that_do_not_compose_get_their_parts_in_order(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, url = source(tmp_path / "local", "dcp", large=2, rows=300), bucket.url("out")

    def refuse(*_: object) -> None:
        raise NotImplementedError("Server-side compose/merge is not supported for Zonal buckets.")

    monkeypatch.setattr(type(bucket.direct), "merge", refuse)
    convert(local, url, to="dcp")
    assert max(bucket.components(f"out/{file}") for file in bucket.names("out")) == 1
    require_same(local, url)
    require_clean(bucket, "out")


def run(bucket: Bucket, *arguments: str, kill: int | None = None) -> int:
    """Convert in a process of its own, killed as its request of this number arrives; its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONVERT, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    bucket.proxy.before = kill_at(kill, lambda: process.pid) if kill else lambda _: True
    try:
        return process.wait(120)
    finally:
        process.kill()
        while bucket.proxy.busy:
            time.sleep(0.01)
        bucket.proxy.before = lambda _: True


def killed_and_resumed(
    tmp_path: Path, bucket: Bucket, target: str, kill: int, resume: bool, number: int = 0
) -> tuple[bool, int]:
    """Kill a conversion, see that nothing is half there, and convert again: whether killed, bytes of parts sent."""
    local, out = tmp_path / "local", f"out{number}"
    url = bucket.url(out)
    code = run(bucket, str(local), url, target, "resume", kill=kill)
    assert code in (0, -9)
    if code == 0:
        return False, 0
    again = 0
    try:
        with open_checkpoint(url):
            pass
    except (CheckpointError, FileNotFoundError):
        bucket.proxy.seen.clear()
        assert run(bucket, str(local), url, target, "resume" if resume else "anew") == 0
        again = sum(request.sent for request in bucket.proxy.seen if is_part(request))
    else:
        # All was there but the removal of parts: the next attempt does that, and changes nothing else.
        assert run(bucket, str(local), url, target, "resume") == 1
    require_clean(bucket, out)
    assert verify(url).good
    require_same(local, url)
    return True, again


@pytest.mark.slow
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("target", FORMATS)
def test_a_killed_conversion_is_resumed(tmp_path: Path, bucket: Bucket, target: str, resume: bool) -> None:
    local = source(tmp_path / "local", "dcp", large=6, rows=300)
    size = sum(file.stat().st_size for file in local.iterdir())
    killed, again = killed_and_resumed(tmp_path, bucket, target, 28, resume)
    assert killed
    assert (again < 0.8 * size) == resume


@pytest.mark.slow
@pytest.mark.parametrize("target", FORMATS)
def test_kills_at_any_time(tmp_path: Path, bucket: Bucket, target: str) -> None:
    """Also while parts are composed, and while they are removed."""
    source(tmp_path / "local", "orbax", large=4, rows=300)
    assert run(bucket, str(tmp_path / "local"), bucket.url("whole"), target, "anew") == 0
    requests = len(bucket.proxy.seen)
    rng, kills = random.Random(target), 0
    for number in range(5):
        kill = rng.randint(4, requests) if number % 2 else requests - rng.randint(0, 40)
        kills += killed_and_resumed(tmp_path, bucket, target, kill, rng.random() < 0.6, number)[0]
    assert kills > 2
