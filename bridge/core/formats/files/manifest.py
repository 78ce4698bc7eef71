"""The manifest of a checkpoint: checksums of every chunk of every tensor, so that any later change can be noticed.

Every checkpoint that is written here has a manifest, in its directory, or next to it if it is a single file::

    step_10/twinshard_manifest.json          weights.safetensors
                                             weights.safetensors.manifest.json

    {"twinshard_manifest": 1, "format": "dcp",
     "tensors": {"model.w": {"dtype": "float32", "shape": [4, 3],
                             "chunks": [[[0, 0], [2, 3], "9ae0daaf"], [[2, 0], [2, 3], "13a92d01"]]}},
     "objects": {"train.note": "6f10c2b8"},
     "files": {".metadata": [2815, "c1d04330"], "__0_0.distcp": [25344, null, "77e0a1b2"]},
     "certificate": [{"source": "runs/torch/step_10", ...}, "5fd0c8e1"]}

Checksums are CRC-32C in hexadecimal: of a chunk's elements in row-major order, little-endian; of an object's value; of
a file's bytes. A file's checksum is null if the chunks' checksums cover its data; then a third entry is the checksum of
all bytes of the file that are not elements of chunks, such as headers. A CRC of 32 bits detects every change within 32
consecutive bits. It is not a signature: whoever can change the data can change the manifest. A conversion adds its
certificate (see `certificate.py`), which has the SHA-256 of all before it.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any

import google_crc32c

from bridge.core.formats.files.atomic import sidecar_of
from bridge.core.formats.files.certificate import Certificate, certificate_from
from bridge.core.formats.reading.regular_files import once_each, open_regular, small_file
from bridge.core.formats.reading.source_files import FileView
from bridge.core.formats.stores.listing import StorePath
from bridge.core.formats.stores.upload import UploadPath
from bridge.core.formats.tensors.arrays import encoded, extend
from bridge.core.formats.tensors.base import Box, CheckpointError, TensorInfo, dtype_from_name, dtype_name

MANIFEST_FILE = "twinshard_manifest.json"
MARK = "twinshard_manifest"
_VERSION = 1
_MAX_BYTES = 1 << 30
_BLOCK = 8 << 20
_SMALL, _TOGETHER = 4 << 10, 1 << 10
_MAX_SIZE = 1 << 63
_MAX_ALIKE = 4096
_HEAD = re.compile(r'\{"twinshard_manifest": 1, "format": "[a-z]+", "tensors": \{').match
_SIZES = r"\[(?:\d+(?:, \d+)*)?\]"
_ENTRY = re.compile(
    r'"([^"\\\0-\x1f]*)": '
    rf'(\{{"dtype": "\w+", "shape": {_SIZES}, "chunks": \[\[{_SIZES}, {_SIZES}, ")([0-9a-f]{{8}})"\]\]\}}(?:, |\Z)',
    re.ASCII,
).findall
_BESIDE = len('"": 01234567"]]}, ')
"""Characters of an entry other than its name and the second group of `_ENTRY`."""
_AFTER_TENSORS = '}, "objects": {'
_CERTIFICATE = b', "certificate": '
_HEX = re.compile("[0-9a-f]{8}").fullmatch


@dataclass(frozen=True)
class ManifestTensor:
    """A tensor's dtype by name, its global shape, and the CRC-32C of every chunk's elements."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Mapping[Box, int]

    def __post_init__(self) -> None:
        dtype_from_name(self.dtype)
        if min(self.shape, default=0) < 0 or not all(box.inside(self.shape) for box in self.chunks):
            raise ValueError(f"expected chunks inside shape {self.shape}, got others")

    @staticmethod
    def of(info: TensorInfo, crcs: Mapping[int, int]) -> ManifestTensor:
        """For a tensor in memory, not checked again. crcs: checksums of chunks, by number; others are left out."""
        chunks = {box: crcs[n] for n, box in enumerate(info.chunks) if n in crcs}
        return _unchecked(dtype_name(info.dtype), info.shape, chunks)


@dataclass(frozen=True)
class ManifestFile:
    """A file's size in bytes and the CRC-32C of all its bytes, None if the chunks' checksums cover its data.

    rest: the CRC-32C of the bytes that are not elements of chunks, None if it is not known.
    """

    size: int
    crc: int | None
    rest: int | None = None


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint; tensors and objects by their names in its reader, files by relative path.

    conversion: identifies the conversion in parts that made the checkpoint, if one did. certificate: of the conversion;
    certificate_problem: why it is not this manifest's, or "".
    """

    format: str
    tensors: Mapping[str, ManifestTensor]
    objects: Mapping[str, int]
    files: Mapping[str, ManifestFile]
    conversion: str | None = None
    certificate: Certificate | None = None
    certificate_problem: str = ""


def manifest_path(checkpoint: Path) -> Path:
    """The path of the manifest of a checkpoint, which is a directory or a single file."""
    if checkpoint.is_dir():
        return checkpoint / MANIFEST_FILE
    return sidecar_of(checkpoint)


def object_checksum(value: object) -> int:
    """CRC-32C of a value that is not a tensor: None, bool, int, float, str, and list, tuple, dict of these."""
    return int(google_crc32c.value(b"".join(encoded(value))))


def file_entry(path: Path) -> ManifestFile:
    """The entry of a small file: its size, and the checksum of all its bytes."""
    return ManifestFile(path.stat().st_size, int(google_crc32c.value(path.read_bytes())))


def gaps(ranges: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The ranges of ``size`` bytes that these ranges leave out, each from its first byte to the byte after its last."""
    position = 0
    for start, stop in (*sorted(ranges), (size, size)):
        if position < start:
            yield position, start
        position = max(position, stop)


def rest_checksum(path: Path, ranges: Iterable[tuple[int, int]], view: FileView | None = None) -> int:
    """CRC-32C of a file's bytes outside these ranges, each from its first byte to the byte after its last.

    view: the file; its small gaps are read together. CheckpointError if the file ends early.
    """
    crc = 0
    if isinstance(path, StorePath | UploadPath):
        for position, stop in gaps(ranges, path.stat().st_size):
            for start in range(position, stop, _BLOCK):
                crc = google_crc32c.extend(crc, path.read_range(start, min(start + _BLOCK, stop)))
        return int(crc)
    with os.fdopen(open_regular(path), "rb") as file:
        end = os.fstat(file.fileno()).st_size
        small: list[bytes] = []
        for position, stop in gaps(ranges, end):
            if view is not None and stop - position <= _SMALL and stop <= len(view):
                small.append(view[position:stop])
                if len(small) < _TOGETHER:
                    continue
                position = stop
            crc = extend(crc, b"".join(small))
            small.clear()
            while position < stop:
                data = os.pread(file.fileno(), min(stop - position, _BLOCK), position)
                if not data:
                    raise CheckpointError(
                        f"{path}: expected {end} bytes, but the file ends at byte {position}"
                    )
                crc = extend(crc, data)
                position += len(data)
    return extend(crc, b"".join(small))


def read_manifest(checkpoint: Path) -> Manifest | None:
    """The manifest of a checkpoint, None if it has none. CheckpointError when it is damaged."""
    path = manifest_path(checkpoint)
    try:
        if not path.is_file():
            return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return parse_manifest(
        small_file(path.parent, path.name, "the manifest", most=_MAX_BYTES, links=True), str(path)
    )


def render_manifest(manifest: Manifest) -> bytes:
    """The manifest as a file's content."""
    head = {MARK: _VERSION, "format": manifest.format}
    data: dict[str, object] = {
        "objects": {name: _hex(crc) for name, crc in manifest.objects.items()},
        "files": {
            name: [
                file.size,
                None if file.crc is None else _hex(file.crc),
                *([] if file.rest is None else [_hex(file.rest)]),
            ]
            for name, file in manifest.files.items()
        },
    }
    if manifest.conversion is not None:
        data["conversion"] = [manifest.conversion, _hex(object_checksum(manifest.conversion))]
    # Tensors as text. Thousands differ only in names and checksums, and objects for `json.dumps` take 4 times longer.
    forms: dict[tuple[object, ...], str] = {}
    entries = []
    for name, tensor in manifest.tensors.items():
        alike = tensor.dtype, tensor.shape, *tensor.chunks
        form = forms.get(alike)
        if form is None:
            chunks = [[box.offsets, box.sizes, "%08x"] for box in tensor.chunks]
            form = json.dumps({"dtype": tensor.dtype, "shape": tensor.shape, "chunks": chunks})
            forms[alike] = form
        entries.append(f"{quoted(name)}: {form % tuple(tensor.chunks.values())}")
    return f'{json.dumps(head)[:-1]}, "tensors": {{{", ".join(entries)}}}, {json.dumps(data)[1:]}'.encode()


def certify(folder: Path, certificate: Certificate) -> None:
    """Add a certificate to the manifests of the checkpoint in this directory, or of its items."""
    for path in folder.rglob(MANIFEST_FILE):
        if path.name == MANIFEST_FILE:
            path.write_bytes(certified(path.read_bytes(), certificate))


def certified(data: bytes, certificate: Certificate) -> bytes:
    """A manifest's content with this certificate in place of an earlier one, and with the digest of all else."""
    rest, _, _ = without_certificate(data)
    digests = {**certificate.digests, "manifest": hashlib.sha256(rest).hexdigest()}
    # With lists in place of tuples, as it will be read: their checksums differ.
    entry = json.loads(json.dumps(vars(replace(certificate, digests=digests))))
    return rest[:-1] + _CERTIFICATE + json.dumps([entry, _hex(object_checksum(entry))]).encode() + b"}"


def without_certificate(data: bytes) -> tuple[bytes, Certificate | None, str]:
    """A manifest's content without its certificate, the certificate, and why it is not this manifest's, or ""."""
    # No name can contain this text, since quotes in names are escaped, and nothing else has a list with a table.
    position = data.rfind(_CERTIFICATE + b"[{")
    if position < 0:
        return data, None, ""
    rest = data[:position] + data[-1:]
    try:
        entry, crc = json.loads(data[position + len(_CERTIFICATE) : -1])
        certificate = certificate_from(entry)
        digest = hashlib.sha256(rest).hexdigest()
        if _crc(crc) != object_checksum(entry) or certificate.digests.get("manifest") != digest:
            raise ValueError("expected the SHA-256 of all before it, found another")
        return rest, certificate, ""
    except (ValueError, TypeError, RecursionError) as error:
        return rest, None, f"its certificate is damaged, or of another manifest: {error!s:.200}"


def parse_manifest(data: bytes, what: str) -> Manifest:
    """A manifest from a file's content; `what` names the file in errors. CheckpointError if it is malformed."""
    try:
        data, certificate, problem = without_certificate(data)
        root, tensors = _usual(data) or (json.loads(data), None)
        if root[MARK] != _VERSION:
            raise ValueError(f"expected version {_VERSION}, got {root['twinshard_manifest']!r:.40}")
        return Manifest(
            _text(root["format"]),
            _tensors(root["tensors"]) if tensors is None else tensors,
            {_text(name): _crc(crc) for name, crc in root["objects"].items()},
            {
                _text(name): ManifestFile(
                    _sizes((size,))[0], None if crc is None else _crc(crc), *map(_crc, rest)
                )
                for name, (size, crc, *rest) in root["files"].items()
            },
            _conversion(root),
            certificate,
            problem,
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, CheckpointError) as error:
        raise CheckpointError(f"{what}: malformed or damaged manifest: {error!r:.200}") from error


def _usual(data: bytes) -> tuple[Any, dict[str, ManifestTensor]] | None:
    """A manifest without its tensors, and the tensors, if it was written here and each tensor is one chunk; else None.

    The text between a name and a checksum is parsed once for all tensors that are alike: `_tensors` takes half as long.
    """
    try:
        text = data.decode()
        head = _HEAD(text)
        start, stop = head.end() if head else 0, text.rfind(_AFTER_TENSORS)
        if not 0 < start <= stop:
            return None
        entries = _ENTRY(text, start, stop)
        # If the matches together are as long as the searched text, they leave nothing out.
        length = sum(len(name) + len(form) for name, form, _ in entries) + len(entries) * _BESIDE
        if length != stop - start + len(", ") * bool(entries):
            return None
        root = json.loads(text[:start] + text[stop:], object_pairs_hook=once_each)
        known: dict[str, tuple[ManifestTensor, Box]] = {}
        tensors: dict[str, ManifestTensor] = {}
        for name, form, crc in entries:
            like = known.get(form)
            if like is None:
                tensor = _tensor(json.loads(f'{form}{crc}"]]}}'))
                (box,) = tensor.chunks
                like = tensor, box
                if len(known) < _MAX_ALIKE:
                    known[form] = like
            tensors[name] = _unchecked(like[0].dtype, like[0].shape, {like[1]: int(crc, 16)})
        return root, tensors
    except (ValueError, LookupError, RecursionError, CheckpointError):
        return None  # the general parser reports the error


def _tensors(entries: Any) -> dict[str, ManifestTensor]:
    """The tensors of a manifest; tensors that differ only in their checksums are checked once."""
    tensors: dict[str, ManifestTensor] = {}
    known: dict[bytes, tuple[ManifestTensor, tuple[Box, ...]]] = {}
    for name, entry in entries.items():
        content = _but_checksums(entry)
        like = None if content is None else known.get(content)
        if like is None:
            tensor = tensors[name] = _tensor(entry)
            # If a chunk occurred twice, the order of checksums would be ambiguous.
            if content is not None and len(known) < _MAX_ALIKE and len(tensor.chunks) == len(entry["chunks"]):
                known[content] = tensor, tuple(tensor.chunks)
        else:
            first, boxes = like
            crcs = {box: _crc(crc) for box, (_, _, crc) in zip(boxes, entry["chunks"], strict=True)}
            tensors[name] = _unchecked(first.dtype, first.shape, crcs)
    return tensors


def _unchecked(dtype: str, shape: tuple[int, ...], chunks: Mapping[Box, int]) -> ManifestTensor:
    # Takes a sixth of the time of `ManifestTensor(...)`, which would repeat the checks.
    tensor = object.__new__(ManifestTensor)
    put = object.__setattr__
    put(tensor, "dtype", dtype)
    put(tensor, "shape", shape)
    put(tensor, "chunks", chunks)
    return tensor


def _but_checksums(entry: Any) -> bytes | None:
    """Bytes that two entries share only if they differ at most in checksums; None for a malformed entry."""
    try:
        # Unlike keys of a dict, these bytes distinguish 1, 1.0 and true. In version 2 they depend only on values.
        return marshal.dumps([entry["dtype"], entry["shape"], [chunk[:2] for chunk in entry["chunks"]]], 2)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def _tensor(entry: Any) -> ManifestTensor:
    chunks = {Box(_sizes(low), _sizes(sizes)): _crc(crc) for low, sizes, crc in entry["chunks"]}
    return ManifestTensor(_text(entry["dtype"]), _sizes(entry["shape"]), chunks)


def _conversion(root: Mapping[str, Any]) -> str | None:
    unknown = root.keys() - {MARK, "format", "tensors", "objects", "files", "conversion"}
    if unknown:
        raise ValueError(f"expected no further entries, got {min(unknown)!r:.40}")
    if "conversion" not in root:
        return None
    text, crc = root["conversion"]
    # Nothing else detects damage to this text.
    if _crc(crc) != object_checksum(_text(text)):
        raise ValueError(f"expected another checksum for {text!r:.40}")
    return _text(text)


def _sizes(values: Iterable[Any]) -> tuple[int, ...]:
    sizes = tuple(values)
    if sizes and (set(map(type, sizes)) != {int} or min(sizes) < 0 or max(sizes) >= _MAX_SIZE):
        raise ValueError(f"expected sizes of at least 0, got {sizes!r:.40}")
    return sizes


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {value!r:.40}")
    return value


def _hex(crc: int) -> str:
    return f"{crc:08x}"


def _crc(value: Any) -> int:
    # Exactly as written: capitals would be the same number, so a flipped bit would go undetected.
    if not isinstance(value, str) or not _HEX(value):
        raise ValueError(f"expected a checksum of 8 hexadecimal digits in lower case, got {value!r:.40}")
    return int(value, 16)
