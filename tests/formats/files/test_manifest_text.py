"""The manifest as text: tensors that are alike are written in bulk, as each alone would be."""

from __future__ import annotations

import json

import pytest

from bridge.core.formats.files.manifest import (
    Manifest,
    ManifestFile,
    ManifestTensor,
    object_checksum,
    parse_manifest,
    render_manifest,
)
from bridge.core.formats.tensors.base import DTYPES, Box, TensorInfo

BOXES = (Box((0, 0), (2, 3)), Box((2, 0), (2, 3)))


def tensors() -> dict[str, ManifestTensor]:
    alike = {
        f'layers.{k} "é" %08x {{}}': ManifestTensor("float32", (2, 3), {BOXES[0]: 0xFFFFFFFF >> k})
        for k in range(5)
    }
    return {
        **alike,
        "two": ManifestTensor("float32", (4, 3), {BOXES[0]: 1, BOXES[1]: 0}),
        "back": ManifestTensor("float32", (4, 3), {BOXES[1]: 2, BOXES[0]: 3}),
        "half": ManifestTensor("float32", (4, 3), {BOXES[1]: 4}),
        "other": ManifestTensor("bfloat16", (2, 3), {BOXES[0]: 5}),
        "scalar": ManifestTensor("int64", (), {Box((), ()): 6}),
        "empty": ManifestTensor("float32", (0, 3), {}),
    }


@pytest.mark.parametrize("conversion", [None, "a %s {conversion}"])
@pytest.mark.parametrize("some", [True, False])
def test_the_manifest_is_the_json_of_its_content(conversion: str | None, some: bool) -> None:
    files = {"a %d": ManifestFile(12, None, 7), "b": ManifestFile(3, 255), "c": ManifestFile(0, None)}
    manifest = Manifest("dcp", tensors() if some else {}, {"o": 9} if some else {}, files, conversion)
    plain = {
        "twinshard_manifest": 1,
        "format": "dcp",
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "chunks": [
                    [list(b.offsets), list(b.sizes), f"{crc:08x}"] for b, crc in tensor.chunks.items()
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
        "objects": {name: f"{crc:08x}" for name, crc in manifest.objects.items()},
        "files": {"a %d": [12, None, "00000007"], "b": [3, "000000ff"], "c": [0, None]},
    }
    if conversion is not None:
        plain["conversion"] = [conversion, f"{object_checksum(conversion):08x}"]
    assert render_manifest(manifest) == json.dumps(plain).encode()
    assert parse_manifest(render_manifest(manifest), "what") == manifest


@pytest.mark.parametrize("numbers", [(), (0,), (1,), (0, 1)])
def test_what_was_written_of_a_tensor_is_in_the_manifest(numbers: tuple[int, ...]) -> None:
    info = TensorInfo("w", ("w",), (4, 3), DTYPES["float32"], BOXES)
    of = ManifestTensor.of(info, {n: 40 + n for n in reversed(numbers)})
    assert of == ManifestTensor("float32", (4, 3), {BOXES[n]: 40 + n for n in numbers})
    assert list(of.chunks) == [BOXES[n] for n in numbers]
