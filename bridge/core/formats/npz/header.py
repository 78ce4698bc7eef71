"""The header of a .npy file: a literal of Python, read by a parser that takes nothing else.

\\x93NUMPY | version | length | {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }      \\n | elements
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np

from bridge.core.formats.tensors.arrays import NUMBER
from bridge.core.formats.tensors.base import COPY_AGAIN, DTYPES, CheckpointError

_MAGIC: Final = b"\x93NUMPY"
_MAX_HEADER: Final = 1 << 20
_MAX_RANK: Final = 64
_DESCR: Final = re.compile(r"'descr':\s*+'([<>|=][A-Za-z]\d{0,9}(?:\[\w+\])?)'", re.ASCII)
_ORDER: Final = re.compile(r"'fortran_order':\s*+(True|False)", re.ASCII)
# No two ways to match a text: what stands between the brackets is looked at afterwards, size by size.
_SHAPE: Final = re.compile(r"'shape':\s*+\(([\d\s,L]*+)\)", re.ASCII)
_DIM: Final = re.compile(r"\d{1,19}L?", re.ASCII)


@dataclass(frozen=True)
class NpyHeader:
    """An array in a .npy file. start: of its elements. dtype: as stored, perhaps big-endian.

    unreadable: what its elements are where that is nothing that a checkpoint holds; dtype is then as wide.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    start: int
    unreadable: str | None

    @property
    def native(self) -> np.dtype:
        """The dtype of the array in memory."""
        return self.dtype.newbyteorder("<")


def read_npy_header(read: Callable[[int, int], bytes], what: str) -> NpyHeader:
    """The header of the file that ``read(start, stop)`` reads. CheckpointError, beginning with `what`, for no .npy."""
    head = read(0, 12)
    if not head.startswith(_MAGIC) or len(head) < 12 or head[6] not in (1, 2, 3):
        raise CheckpointError(f"{what}: expected a .npy file of version 1 to 3, found another file")
    wide = head[6] > 1
    length = struct.unpack_from("<I" if wide else "<H", head, 8)[0]
    start = (12 if wide else 10) + length
    if length > _MAX_HEADER:
        raise CheckpointError(f"{what}: expected a header of at most {_MAX_HEADER} bytes, got {length}")
    raw = read(start - length, start)
    if len(raw) != length:
        raise CheckpointError(f"{what}: truncated in its header: {COPY_AGAIN}")
    text = raw.decode("utf-8" if head[6] == 3 else "latin1", "replace")
    order, shape = _ORDER.search(text), _SHAPE.search(text)
    if order is None or shape is None or "'descr'" not in text:
        raise CheckpointError(
            f"{what}: expected descr, fortran_order and shape in its header, found {text!r:.200}"
        )
    # One comma may follow the last size.
    words = [word.strip() for word in shape[1].split(",")]
    words = words if words[-1] else words[:-1]
    if not all(map(_DIM.fullmatch, words)):
        raise CheckpointError(
            f"{what}: expected sizes with a comma after each in its shape, found {shape[1]!r:.200}"
        )
    sizes = tuple(int(word.removesuffix("L")) for word in words)
    if len(sizes) > _MAX_RANK or any(size >= 1 << 63 for size in sizes):
        raise CheckpointError(f"{what}: expected at most {_MAX_RANK} sizes below 2**63, got {sizes!r:.200}")
    descr = _DESCR.search(text)
    dtype, unreadable = _dtype(descr[1]) if descr else (np.dtype(np.uint8), "a record of several fields")
    return NpyHeader(sizes, dtype, order[1] == "True", start, unreadable)


def _dtype(descr: str) -> tuple[np.dtype, str | None]:
    order, code = descr[0], descr[1:]
    # What np.save makes of ml_dtypes' types. Only bfloat16 has two bytes; many have one, and are not told apart.
    if descr == "<V2":
        return np.dtype(ml_dtypes.bfloat16), None
    if code == "f1":
        return np.dtype(ml_dtypes.float8_e5m2), None
    if NUMBER.fullmatch(code):
        dtype = np.dtype(f"{'>' if order == '>' else '<'}{code}")
        if DTYPES.get(dtype.newbyteorder("<").name) == dtype.newbyteorder("<"):
            return dtype, None
    named = {
        "O": "pickled objects, which are never loaded",
        "U": "text",
        "S": "bytes",
        "M": "dates",
        "m": "times",
    }
    why = named.get(code[0])
    if code == "V1":
        why = "elements of one byte whose type NumPy does not say (float8, int4 or another of ml_dtypes)"
    width = int(re.sub(r"\D.*", "", code[1:]) or 0) * (4 if code[0] == "U" else 1)
    return np.dtype((np.void, max(1, min(width, 1 << 20)))), f"{why or 'of a dtype unknown here'} ({descr})"
