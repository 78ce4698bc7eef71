"""One S3 server for all tests; each has a bucket of its own, and no place for temporary files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from bridge.core.formats.stores import numbered_parts, ranges, upload
from tests.support.buckets import Proxy, free_port, s3_environment, server


@dataclass(frozen=True)
class Bucket:
    """A bucket behind a proxy; `direct` is a file system that goes to the server past it."""

    name: str
    proxy: Proxy
    direct: Any

    def url(self, path: str) -> str:
        return f"s3://{self.name}/{path}"

    def names(self, path: str = "") -> list[str]:
        """Names of all objects below a path."""
        self.direct.invalidate_cache()
        root = f"{self.name}/{path}".rstrip("/")
        return [name[len(root) + 1 :] for name in self.direct.find(root)]

    def uploads(self) -> list[str]:
        """Keys of multipart uploads that were neither finished nor aborted."""
        answer = self.direct.call_s3("list_multipart_uploads", Bucket=self.name)
        return [entry["Key"] for entry in answer.get("Uploads", ())]

    def put(self, local: Path, path: str) -> str:
        """Copy a checkpoint into the bucket."""
        for file in [local] if local.is_file() else [p for p in local.rglob("*") if p.is_file()]:
            key = path if file == local else f"{path}/{file.relative_to(local)}"
            self.direct.pipe_file(f"{self.name}/{key}", file.read_bytes())
        return self.url(path)


@pytest.fixture(scope="session")
def moto() -> Iterator[int]:
    """The port of an S3 server."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    port = free_port()
    with server("-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), port=port):
        yield port


@pytest.fixture
def bucket(moto: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bucket]:
    with Proxy(moto) as proxy:
        for name, value in s3_environment(proxy.url).items():
            monkeypatch.setenv(name, value)
        # Of a server that goes on failing there is enough with s3fs's attempts and ours.
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        # Whatever would go to a temporary file fails.
        monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
        monkeypatch.setenv("TMPDIR", "/nonexistent")
        for module, name in ((ranges, "_PAUSE"), (numbered_parts, "PAUSE")):
            monkeypatch.setattr(module, name, 0.01)
        # The least that S3 allows.
        monkeypatch.setattr(upload, "PART", 5 << 20)
        system = fsspec.get_filesystem_class("s3")
        system.clear_instance_cache()
        direct = fsspec.filesystem("s3", endpoint_url=f"http://127.0.0.1:{moto}", skip_instance_cache=True)
        name = f"bucket-{abs(hash(request.node.name)) % 10**12}-{free_port()}"
        direct.mkdir(name)
        yield Bucket(name, proxy, direct)
        system.clear_instance_cache()
