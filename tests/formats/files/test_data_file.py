"""Files written in any order, by several threads, past the system's cache and through it."""

from __future__ import annotations

import errno
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.core.formats.files import data_file
from bridge.core.formats.files.data_file import BLOCK, DataFile
from bridge.core.formats.safetensors.writer import SafetensorsWriter
from bridge.core.formats.tensors.base import DTYPES, Box


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "_DIRECT_BYTES", 3 * BLOCK)
    monkeypatch.setattr(data_file, "_BUFFER_BYTES", 4 * BLOCK)


def pieces(seed: int) -> list[bytes]:
    """Of all lengths around whole blocks and buffers, and others."""
    rng = np.random.default_rng(seed)
    lengths = [k * BLOCK + d for k in (0, 1, 3, 4, 5, 9) for d in (-1, 0, 1, 64) if k * BLOCK + d > 0]
    lengths += [int(n) for n in rng.integers(1, 20 * BLOCK, 20)]
    return [rng.bytes(int(n)) for n in rng.permutation(lengths)]


def write_all(path: Path, data: list[bytes], *, alignment: int) -> dict[int, bytes]:
    """By four threads, in no order; every piece at its place."""
    file = DataFile(path)
    by_offset = {file.reserve(len(piece), alignment): piece for piece in data}
    order = np.random.default_rng(0).permutation(list(by_offset))

    def write(offset: int) -> None:
        file.write(offset, by_offset[offset])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, map(int, order)))
    file.sync()
    file.close()
    return by_offset


def assert_holds(path: Path, by_offset: dict[int, bytes]) -> None:
    content = path.read_bytes()
    end = 0
    for offset, piece in by_offset.items():
        assert not any(content[end:offset])
        assert content[offset : offset + len(piece)] == piece
        end = offset + len(piece)
    assert len(content) == end


@pytest.mark.parametrize("alignment", [1, 64, BLOCK])
@pytest.mark.parametrize("seed", range(3))
def test_every_piece_is_where_it_belongs(tmp_path: Path, alignment: int, seed: int) -> None:
    assert_holds(tmp_path / "f", write_all(tmp_path / "f", pieces(seed), alignment=alignment))


def test_large_pieces_go_past_the_cache_where_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DataFile(tmp_path / "f")
    if file._direct is None:
        pytest.skip("the file system of the temporary directory has no direct writing")
    written: dict[int, int] = {}
    pwrite = os.pwrite

    def counted(descriptor: int, data: Any, offset: int) -> int:
        count = pwrite(descriptor, data, offset)
        written[descriptor] = written.get(descriptor, 0) + count
        return count

    monkeypatch.setattr(os, "pwrite", counted)
    data = np.random.default_rng(1).bytes(10 * BLOCK)
    file.write(100, data)
    assert written == {file._direct: 9 * BLOCK, file._descriptor: BLOCK}
    file.write(20 * BLOCK, data[: 2 * BLOCK])
    assert written[file._direct] == 9 * BLOCK
    file.close()
    assert (tmp_path / "f").read_bytes()[100 : 100 + len(data)] == data


def test_file_systems_without_direct_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pieces(7)
    with monkeypatch.context() as patch:
        patch.setattr(data_file, "_open_direct", lambda path: None)
        assert_holds(tmp_path / "a", write_all(tmp_path / "a", data, alignment=64))
    refused = 0
    pwrite = os.pwrite

    def only_cached(descriptor: int, data: Any, offset: int) -> int:
        nonlocal refused
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/b") and descriptor in direct:
            refused += 1
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data, offset)

    opened = data_file._open_direct
    direct: set[int | None] = set()
    monkeypatch.setattr(
        data_file, "_open_direct", lambda path: direct.add(descriptor := opened(path)) or descriptor
    )
    monkeypatch.setattr(os, "pwrite", only_cached)
    assert_holds(tmp_path / "b", write_all(tmp_path / "b", data, alignment=64))
    assert refused or direct == {None}


@pytest.mark.parametrize("length", [100, 30 * BLOCK])
def test_a_full_disk_is_an_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    file = DataFile(tmp_path / "f")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device: .*/f") as caught:
        file.write(64, b"x" * length)
    assert caught.value.errno == errno.ENOSPC
    file.close()


def test_more_shards_than_a_process_may_open_files_by_default(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        with SafetensorsWriter(tmp_path / "c", shard_bytes=4) as writer:
            for k in range(300):
                writer.add_tensor(f"w{k}", (1,), DTYPES["float32"])
            for k in range(300):
                writer.write(f"w{k}", Box((0,), (1,)), np.full(1, k, np.float32))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 300
