"""Checkpoints in a bucket of an emulator of Google's storage, over HTTP."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.checkpoints.convert import convert
from bridge.checkpoints.verify import verify
from tests.formats.stores.test_s3 import FORMATS, require_same, source
from tests.support.buckets import free_port, server


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket."""
    pytest.importorskip("gcp_storage_emulator")
    # Before gcsfs is imported: it asks for the kind of a bucket by gRPC, which the emulator does not have.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs")
    import fsspec
    from fsspec.config import conf

    port = free_port()
    command = ("-m", "gcp_storage_emulator", "start", "--host=127.0.0.1", f"--port={port}", "--in-memory")
    with server(*command, port=port) as url:
        for protocol in ("gs", "gcs"):
            options = {"token": "anon", "project": "test", "endpoint_url": url, "skip_instance_cache": True}
            monkeypatch.setitem(conf, protocol, options)
        monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
        fsspec.filesystem("gs").mkdir("bucket-of-tests")
        yield "gs://bucket-of-tests"


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_from_bucket_to_bucket(tmp_path: Path, emulator: str, format: str) -> None:
    local = source(tmp_path / "local", "dcp")
    convert(local, f"{emulator}/a", to=format, workers=2)
    convert(f"{emulator}/a", f"{emulator}/b", to=format, workers=2)
    for url in (f"{emulator}/a", f"{emulator}/b"):
        assert verify(url).good
        require_same(local, url)
    with pytest.raises(FileExistsError, match="expected nothing at"):
        convert(local, f"{emulator}/a", to=format, resume=True)
    with pytest.raises(FileNotFoundError, match="found no bucket 'no-such-bucket'"):
        convert(local, "gs://no-such-bucket/x")
