"""Reads NumPy's archives region by region: np.savez and np.savez_compressed, a zip file of .npy files.

    params.npz
      params/dense/kernel.npy     an array by its header; "/" separates the keys of its path
      step.npy

Deflated members are inflated in pieces (`inflate.py`).

The header of a .npy file is a Python literal, read by a parser that accepts nothing else:

    \\x93NUMPY | version | length | {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }      \\n | elements
"""

from __future__ import annotations

import math
import os
import re
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import ml_dtypes
import numpy as np
from isal import isal_zlib

from bridge.core.formats.dcp.archive import Record, verify_record
from bridge.core.formats.npz.inflate import Inflated
from bridge.core.formats.reading.single_chunk import SingleChunkReader
from bridge.core.formats.reading.source_files import FileArray
from bridge.core.formats.reading.zip_directory import STORED, Member, data_start, read_directory
from bridge.core.formats.tensors.arrays import NUMBER, copy_flat, strides_of
from bridge.core.formats.tensors.base import COPY_AGAIN, DTYPES, Box, CheckpointError, TensorInfo
from bridge.core.formats.tensors.leaves import flat_name
from bridge.core.formats.tensors.wrapping import one_part
from bridge.core.formats.whole.read_only import NPZ_FILES

_MAGIC: Final = b"\x93NUMPY"
_MAX_HEADER: Final = 1 << 20
_MAX_RANK: Final = 64
_DESCR: Final = re.compile(r"'descr':\s*+'([<>|=][A-Za-z]\d{0,9}(?:\[\w+\])?)'", re.ASCII)
_ORDER: Final = re.compile(r"'fortran_order':\s*+(True|False)", re.ASCII)
# Only one way to match a text: the sizes between the brackets are parsed afterwards, one by one.
_SHAPE: Final = re.compile(r"'shape':\s*+\(([\d\s,L]*+)\)", re.ASCII)
_DIM: Final = re.compile(r"\d{1,19}L?", re.ASCII)


@dataclass(frozen=True)
class NpyHeader:
    """An array in a .npy file. start: the first byte of its elements. dtype: as stored, perhaps big-endian.

    unreadable: a description of the elements if no checkpoint can contain them; dtype then has the same width.
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
    # How np.save writes ml_dtypes' types. Only bfloat16 has two bytes; many types have one, and are indistinguishable.
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
        why = "one-byte elements whose type NumPy does not record (float8, int4 or another of ml_dtypes)"
    width = int(re.sub(r"\D.*", "", code[1:]) or 0) * (4 if code[0] == "U" else 1)
    return np.dtype((np.void, max(1, min(width, 1 << 20)))), f"{why or 'of an unknown dtype'} ({descr})"


_NPY: Final = ".npy"
_MAX_INFLATED: Final = 8
_HEAD: Final = 4096


@dataclass(frozen=True, slots=True)
class _Stored:
    member: Member
    header: NpyHeader
    start: int
    """The start of the member's data in the file."""


class NpzReader(SingleChunkReader):
    """An .npz file, opened for reading; see `CheckpointReader`. `path`: the file, or a directory with one.

    Opening reads the directory and the header of each array. Arrays of pickled objects, text, dates, and elements whose
    type NumPy does not record are listed in `unreadable`; nothing is unpickled. Big-endian numbers are byte-swapped.
    `verify`: compare each array with its CRC-32 before any part of it is used. May be used by several threads.

    CheckpointError for a damaged file, and for an array that does not fill its member.
    """

    format = "npz"

    def __init__(self, path: str | os.PathLike[str], verify: bool = True) -> None:
        super().__init__(path, NPZ_FILES)
        if self._fileset.weight_map is not None or len(self._fileset.names) > 1:
            raise CheckpointError(
                f"{self.path}: expected one archive of NumPy (.npz), found {len(self._fileset.names)} archives, which "
                "Twinshard does not join: give the path of one archive"
            )
        self._verify = verify
        self._name = self._fileset.names[0]
        self._file_path = self._regular_file(self._name)
        self._verified: set[str] = set()
        self._inflated: OrderedDict[str, Inflated] = OrderedDict()
        self._lock = threading.Lock()
        self._stored: dict[str, _Stored] = {}
        for member in read_directory(self._files, self._name, "an archive of NumPy (.npz)").values():
            with one_part(member.name):
                name, stored = self._find(member)
                header = stored.header
                if header.unreadable is not None:
                    self._unreadable[name] = header.unreadable
                self._stored[name] = stored
                self._add_tensor(name, tuple(name.split("/")), header.shape, header.native)

    def files(self) -> Sequence[Path]:
        """The file."""
        return (self._file_path,)

    def checksummed(self, name: str) -> bool:
        """Always: a zip file has a CRC-32 of each member."""
        return True

    def close(self) -> None:
        """Release the file. Arrays already read stay valid."""
        super().close()
        self._inflated.clear()

    def _find(self, member: Member) -> tuple[str, _Stored]:
        what = f"{self._file_path}: {member.name!r:.200}"
        if not member.name.endswith(_NPY):
            raise CheckpointError(
                f"{what}: expected files that end in {_NPY} in an archive of NumPy, got another"
            )
        name, _ = flat_name(member.name.removesuffix(_NPY))
        begin = data_start(self._files, self._name, member)

        def read(start: int, stop: int) -> bytes:
            stop = min(stop, member.size)
            if member.method == STORED:
                return self._files.read(self._name, begin + start, begin + stop, what)
            most = min(member.stored, 2 * stop + _HEAD)
            return Inflated(self._bytes, begin, most, member.size, None, what).head(stop)[start:stop]

        header = read_npy_header(read, what)
        nbytes = math.prod(header.shape) * header.dtype.itemsize
        if header.unreadable is None and header.start + nbytes != member.size:
            raise CheckpointError(
                f"{what}: expected {nbytes} bytes for {header.dtype.name} {header.shape}, got "
                f"{member.size - header.start}"
            )
        stored = _Stored(member, header, begin)
        if self._verify and not nbytes:
            # No element will be read, so nothing else would compare the header with the checksum.
            crc = isal_zlib.crc32(b"".join(self._whole(name, stored)))
            if crc != member.crc:
                raise CheckpointError(
                    f"{what}: the header is damaged: expected CRC-32 {member.crc:08x}, got {crc:08x}"
                )
        return name, stored

    def _whole(self, name: str, stored: _Stored) -> Iterator[bytes]:
        """All bytes of a small member."""
        start, member = stored.start, stored.member
        if member.method == STORED:
            return iter([self._files.read(self._name, start, start + member.size, name)])
        return (piece for _, piece in self._inflater(name, stored).pieces(0, member.size))

    def _in_place(self, info: TensorInfo) -> bool:
        stored = self._stored[info.name]
        return stored.member.method == STORED and stored.header.dtype == info.dtype

    def _fill(self, info: TensorInfo, box: Box, target: np.ndarray) -> None:
        stored = self._stored[info.name]
        native = stored.header.dtype == info.dtype
        raw = target if native else target.view(stored.header.dtype)
        if stored.member.method == STORED:
            self._copy(info, box, raw)
        else:
            self._inflate(info.name, stored, box, raw)
        if not native:
            target[...] = raw.astype(info.dtype)

    def _part(self, info: TensorInfo, box: Box) -> FileArray:
        name, stored = info.name, self._stored[info.name]
        member, header = stored.member, stored.header
        if self._verify and name not in self._verified:
            record = Record(stored.start, member.size, member.crc)
            verify_record(self._files, self._name, record, f"{self._file_path}: array {name!r:.200}")
            self._verified.add(name)
        begin = stored.start + header.start
        order: Literal["F", "C"] = "F" if header.fortran else "C"
        strides = strides_of(header.shape, header.dtype, order)
        whole = FileArray(self._name, begin, header.shape, strides, header.dtype, f"array {name!r:.200}")
        return whole.within(box, info.chunks[0])

    def _bytes(self, start: int, stop: int) -> bytes:
        return self._files.read(self._name, start, stop)

    def _inflate(self, name: str, stored: _Stored, box: Box, target: np.ndarray) -> None:
        """Copy a box of a deflated array into `target`."""
        header, inflater = stored.header, self._inflater(name, stored)

        def read(start: int, stop: int) -> Iterator[bytes]:
            return (piece for _, piece in inflater.pieces(header.start + start, header.start + stop))

        if not header.fortran:
            copy_flat(header.shape, box, target, read)
            return
        turned = np.empty(box.sizes[::-1], header.dtype)
        copy_flat(header.shape[::-1], Box(box.offsets[::-1], box.sizes[::-1]), turned, read)
        target[...] = turned.T

    def _inflater(self, name: str, stored: _Stored) -> Inflated:
        with self._lock:
            if name not in self._inflated:
                member = stored.member
                crc = member.crc if self._verify else None
                what = f"{self._file_path}: array {name!r:.200}"
                self._inflated[name] = Inflated(
                    self._bytes, stored.start, member.stored, member.size, crc, what
                )
                if len(self._inflated) > _MAX_INFLATED:
                    self._inflated.popitem(last=False)
            self._inflated.move_to_end(name)
            return self._inflated[name]
