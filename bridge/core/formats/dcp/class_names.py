"""The classes and functions of PyTorch that `.metadata` is made of, by their dotted names."""

from __future__ import annotations

from typing import Final

_PACKAGE: Final = "torch.distributed.checkpoint"
METADATA: Final = f"{_PACKAGE}.metadata.Metadata"
STORAGE_META: Final = f"{_PACKAGE}.metadata.StorageMeta"
TENSOR: Final = f"{_PACKAGE}.metadata.TensorStorageMetadata"
BYTES: Final = f"{_PACKAGE}.metadata.BytesStorageMetadata"
CHUNK: Final = f"{_PACKAGE}.metadata.ChunkStorageMetadata"
INDEX: Final = f"{_PACKAGE}.metadata.MetadataIndex"
PROPERTIES: Final = f"{_PACKAGE}.metadata.TensorProperties"
MEMORY_FORMAT: Final = f"{_PACKAGE}.metadata._MEM_FORMAT_ENCODING"
STORAGE_INFO: Final = f"{_PACKAGE}.filesystem._StorageInfo"
SIZE: Final = "torch.Size"
LAYOUT: Final = "torch.serialization._get_layout"
