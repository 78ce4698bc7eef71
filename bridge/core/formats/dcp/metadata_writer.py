"""The `.metadata` file of a DCP checkpoint, written so that PyTorch reads it; see `metadata.py`."""

from __future__ import annotations

import numpy as np

from bridge.core.formats.dcp.metadata import DcpMetadata
from bridge.core.formats.dcp.pickle_records import (
    BYTES,
    CHUNK,
    INDEX,
    LAYOUT,
    MEMORY_FORMAT,
    METADATA,
    PROPERTIES,
    SIZE,
    STORAGE_INFO,
    STORAGE_META,
    TENSOR,
    Call,
    Instance,
    Name,
)
from bridge.core.formats.dcp.pickle_writer import HOLE, Filled, Pattern, Repeated, write_pickle
from bridge.core.formats.tensors.base import Box, TensorInfo, dtype_name


def format_metadata(metadata: DcpMetadata) -> bytes:
    """The `.metadata` file for this content. The same content gives the same bytes."""
    entries: dict[object, object] = {}
    paths: dict[object, object] = {}
    storage: dict[object, object] = {}
    alike: dict[tuple[np.dtype, tuple[int, ...], tuple[Box, ...]], tuple[Repeated, list[Repeated]]] = {}
    sizes: dict[tuple[int, ...], Repeated] = {}

    def size(of: tuple[int, ...]) -> Repeated:
        if of not in sizes:
            sizes[of] = Repeated(Call(SIZE, (of,)))
        return sizes[of]

    key_of = Pattern(Instance(INDEX, {"fqn": HOLE, "offset": HOLE, "index": HOLE}))
    stored_at = Pattern(Instance(STORAGE_INFO, {"relative_path": HOLE, "offset": HOLE, "length": HOLE}))
    for name, info in metadata.tensors.items():
        key = info.dtype, info.shape, info.chunks
        form = alike.get(key)
        if form is None:
            chunks = [
                Instance(CHUNK, {"offsets": size(c.offsets), "sizes": size(c.sizes)}) for c in info.chunks
            ]
            state = {"properties": _properties(info), "size": size(info.shape), "chunks": chunks}
            form = alike[key] = Repeated(Instance(TENSOR, state)), [size(c.offsets) for c in info.chunks]
        entries[name], offsets = form
        paths[name] = info.path
        for index, (offset, extent) in enumerate(zip(offsets, metadata.extents[name], strict=True)):
            storage[Filled(key_of, (name, offset, index))] = Filled(stored_at, extent)
    for name, extent in metadata.objects.items():
        entries[name] = Instance(BYTES, {})
        paths[name] = metadata.object_paths[name]
        storage[Filled(key_of, (name, None, None))] = Filled(stored_at, extent)
    # No checkpoint_id: PyTorch writes the absolute path of the directory there, which is meaningless elsewhere.
    meta: dict[str, object] = {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []}
    return write_pickle(
        Instance(
            METADATA,
            {
                "state_dict_metadata": entries,
                "planner_data": paths,
                "storage_data": storage,
                "storage_meta": Instance(STORAGE_META, meta),
                "version": "1.0.0",
            },
        ),
        4,
    )


def _properties(info: TensorInfo) -> Instance:
    layout, contiguous = Call(LAYOUT, ("torch.strided",)), Call(MEMORY_FORMAT, (0,))
    return Instance(PROPERTIES, (Name(f"torch.{dtype_name(info.dtype)}"), layout, False, contiguous, False))
