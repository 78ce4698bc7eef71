"""Ranges of bytes of files in a store: blocks are joined, and nothing is read beyond a file's end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from bridge.core.formats.stores.ranges import FileRanges


def test_bytes_of_several_blocks_are_joined_up_to_the_end_of_the_file(tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes((2 << 20) + 5)
    path = str(tmp_path / "a")
    Path(path).write_bytes(content)
    ranges = FileRanges(LocalFileSystem(), {path: len(content)}, {path: "store://a"})
    ranges.block = 1 << 20
    for start, stop in (
        (0, len(content)),
        (1, 3),
        ((1 << 20) - 1, (2 << 20) + 1),
        (len(content) - 1, len(content)),
    ):
        target = bytearray(stop - start)
        ranges.read_into(path, start, memoryview(target))
        assert bytes(target) == content[start:stop]
    with pytest.raises(
        OSError, match=f"store://a: expected {len(content) + 1} bytes or more, the listing says"
    ):
        ranges.read_into(path, len(content) - 1, memoryview(bytearray(2)))
    ranges.close()
