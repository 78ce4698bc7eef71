"""Compressed chunks and indexes are refused when they ask for more memory than belongs to them, and else read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
import zstandard
from typer.testing import CliRunner

from bridge import verify
from bridge.commands.main import app
from bridge.core.formats import CheckpointError, open_checkpoint
from tests.support.bridge.orbax_helpers import stock_save

VALUE = np.arange(96, dtype=np.float32).reshape(8, 12) % 7
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
BLOSC = {
    "name": "blosc",
    "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4, "blocksize": 0},
}
ZSTD = {"name": "zstd", "configuration": {"level": 1}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}
CRC = {"name": "crc32c"}


def shard(*codecs: Any, index: tuple[Any, ...] = (BYTES, CRC), location: str = "end") -> list[Any]:
    configuration = {
        "chunk_shape": [4, 6],
        "codecs": list(codecs),
        "index_codecs": list(index),
        "index_location": location,
    }
    return [{"name": "sharding_indexed", "configuration": configuration}]


LAYOUTS: dict[str, Any] = {
    "zarr2 blosc": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
    "zarr2 zstd": {"id": "zstd", "level": 1},
    "zarr3 blosc": [BYTES, BLOSC],
    "zarr3 blosc and crc": [BYTES, BLOSC, CRC],
    "zarr3 zstd": [BYTES, ZSTD],
    "transposed": [{"name": "transpose", "configuration": {"order": [1, 0]}}, BYTES, BLOSC],
    "shard of blosc": shard(BYTES, BLOSC),
    "shard of zstd": shard(BYTES, ZSTD),
    "index at the start": shard(BYTES, BLOSC, location="start"),
    "index without crc": shard(BYTES, BLOSC, index=(BYTES,)),
}


def save(item: Path, layout: Any) -> Path:
    """An item with the array `w`, and the file of the array's first chunk."""
    zarr3 = isinstance(layout, list)
    stock_save(item, {"w": VALUE}, use_ocdbt=False, use_zarr3=zarr3)
    for file in [file for file in (item / "w").rglob("*") if file.is_file()]:
        file.unlink()
    if zarr3:
        grid = {"name": "regular", "configuration": {"chunk_shape": [8, 12]}}
        metadata = {"shape": [8, 12], "data_type": "float32", "chunk_grid": grid, "codecs": layout}
    else:
        metadata = {"shape": [8, 12], "dtype": "<f4", "chunks": [8, 12], "compressor": layout}
    spec = {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": {"driver": "file", "path": f"{item}/w/"},
        "metadata": metadata,
    }
    ts.open(spec, create=True).result().write(VALUE).result()
    return next(file for file in (item / "w").rglob("*") if file.is_file() and "z" not in file.name)


def ask_for_more(file: Path) -> None:
    """Let the last of the file's compressed chunks ask for nearly 2 GiB, with all checksums right."""
    data = bytearray(file.read_bytes())
    magic = data.rfind(b"\x28\xb5\x2f\xfd")
    # The frame of zstd: of one segment with a size, which becomes a window of 2 GiB.
    if magic >= 0 and data[magic + 4] & 0x20:
        data[magic + 4] &= ~0x20 & 0x3F
        data[magic + 5] = (31 - 10) << 3
    else:
        at = next(
            i
            for i in range(len(data) - 16, -1, -1)
            if data[i] == 2 and struct.unpack_from("<I", data, i + 4)[0] in (96, 384)
        )
        struct.pack_into("<I", data, at + 4, (1 << 31) - 1000)
    file.write_bytes(data)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_chunk_that_asks_for_2_gib_is_refused_by_its_first_bytes(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = save(tmp_path / "c", LAYOUTS[name])
    with open_checkpoint(tmp_path / "c") as reader:
        assert np.array_equal(reader.read("w"), VALUE)
    ask_for_more(file)
    with open_checkpoint(tmp_path / "c") as reader:
        monkeypatch.setattr(ts, "open", lambda *_, **__: pytest.fail("tensorstore was asked"))
        with pytest.raises(CheckpointError, match=r"tensor 'w'.*header asks for 2\d{9} bytes of memory"):
            reader.read("w")
    monkeypatch.undo()
    report = verify(tmp_path / "c")
    assert report.damaged == ("w",)


@pytest.mark.parametrize("codecs", [[BYTES, BLOSC, GZIP], shard(*shard(BYTES, BLOSC))])
def test_blosc_inside_of_another_compression_is_refused(tmp_path: Path, codecs: Any) -> None:
    save(tmp_path / "c", [BYTES, BLOSC])
    metadata = json.loads((tmp_path / "c/w/zarr.json").read_bytes())
    (tmp_path / "c/w/zarr.json").write_text(json.dumps({**metadata, "codecs": codecs}))
    with pytest.raises(CheckpointError, match="expected blosc as the last compression"):
        open_checkpoint(tmp_path / "c")


def test_two_compressions_of_which_blosc_is_the_last_are_read(tmp_path: Path) -> None:
    save(tmp_path / "c", [BYTES, GZIP, BLOSC])
    with open_checkpoint(tmp_path / "c") as reader:
        assert np.array_equal(reader.read("w"), VALUE)


def test_a_manifest_that_inflates_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock_save(tmp_path / "c", {"w": VALUE}, use_ocdbt=True)
    body = zstandard.ZstdCompressor().compress(bytes(100 << 20))
    head = struct.pack(">I", 0x0CDB3A2A) + struct.pack("<Q", len(body) + 18) + b"\0\1" + body
    (tmp_path / "c/manifest.ocdbt").write_bytes(head + struct.pack("<I", google_crc32c.value(head)))
    monkeypatch.setattr(ts.ocdbt, "dump", lambda *_: pytest.fail("tensorstore was asked"))
    with pytest.raises(CheckpointError, match=r"manifest.ocdbt: expected at most 16777216 bytes"):
        open_checkpoint(tmp_path / "c")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "c")])
    assert result.exit_code == 2
