"""The result of reading a pickle: plain Python values and inert records of the names in it; and which names may occur.

`pickle.py` makes the records, and `pickle_writer.py` writes them. The names include PyTorch's dtypes, and the classes
and functions that occur in `.metadata`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeGuard

import ml_dtypes
import numpy as np

from bridge.core.formats.tensors.base import DTYPES

ORDERED_DICT: Final = "collections.OrderedDict"
GETATTR: Final = "builtins.getattr"


@dataclass(frozen=True, slots=True)
class Name:
    """A class, function or constant by its dotted name, such as torch.float32."""

    dotted: str


# Not frozen: a frozen instance takes three times as long to make, and there are six for each tensor.
@dataclass(slots=True, eq=False)
class Call:
    """`name(*args)`, not called. state: what its result would have received; items: what would have been added."""

    name: str
    args: tuple[object, ...]
    state: object = None
    items: list[object] | None = None


@dataclass(slots=True, eq=False)
class Instance:
    """An object of class `name` with this pickled state; compared by identity. items: what would have been added."""

    name: str
    state: object = None
    items: list[object] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to something stored outside of the pickle."""

    id: object


@dataclass(frozen=True)
class Vocabulary:
    """The allowed contents of a kind of pickle: names of calls, instances, constants; persistent ids; its size.

    enumerations: the classes in ``calls`` whose members may be named instead: Python before 3.11.4 writes a member as
    ``getattr(enumeration, name)``, later versions as ``enumeration(value)``. foreign: whether other names may occur,
    too. They stay names, and using them gives a Call or an Instance.
    """

    max_bytes: int
    calls: frozenset[str] = frozenset()
    instances: frozenset[str] = frozenset()
    constants: re.Pattern[str] | None = None
    persistent: bool = False
    enumerations: frozenset[str] = frozenset()
    foreign: bool = False

    def knows(self, dotted: str) -> bool:
        """Whether this name may occur."""
        if self.foreign:
            return True
        if dotted in self.calls or dotted in self.instances or (dotted == GETATTR and self.enumerations):
            return True
        return self.constants is not None and self.constants.fullmatch(dotted) is not None


# How protocol 2 writes bytes: codecs.encode(text, "latin1"), and bytes() for empty bytes.
BYTES_CALLS: Final = frozenset({"__builtin__.bytes", "builtins.bytes"})
PLAIN_VALUES = Vocabulary(max_bytes=16 << 20, calls=frozenset({ORDERED_DICT, "_codecs.encode"}) | BYTES_CALLS)
FOREIGN_VALUES: Final = Vocabulary(max_bytes=PLAIN_VALUES.max_bytes, persistent=True, foreign=True)
"""For values of any class: values that are not plain are only described. Nothing that the pickle names is called."""


def is_index(value: object) -> TypeGuard[tuple[int, ...]]:
    """Whether this is a tuple of at most 64 ints in [0, 2**63)."""
    if not isinstance(value, tuple) or len(value) > 64:
        return False
    return not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 1 << 63)


UNREADABLE: Mapping[str, np.dtype] = MappingProxyType(
    {
        **{f"{sign}int{bits}": np.dtype(np.uint8) for sign in ("u", "") for bits in range(1, 8)},
        **{
            name: np.dtype(getattr(ml_dtypes, name))
            for name in ("int1", "uint1", "int2", "uint2", "int4", "uint4")
            if hasattr(ml_dtypes, name)  # int1 and uint1 from ml_dtypes 0.6 on
        },
        "float4_e2m1fn_x2": np.dtype(ml_dtypes.float4_e2m1fn),
        **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8"), np.dtype(np.uint8)),
        "bits16": np.dtype(np.uint16),
        **dict.fromkeys(("qint8", "quint8", "quint4x2", "quint2x4"), np.dtype(np.uint8)),
        "qint32": np.dtype(np.int32),
        "complex32": np.dtype(np.uint32),
    }
)
"""Dtypes that only PyTorch has, each with a dtype of its size for listing. What their bytes mean is not documented."""


def torch_dtype(name: str) -> tuple[np.dtype, str | None] | None:
    """The dtype called "torch.<name>", and the reason if its elements cannot be read; None for an unknown name."""
    name = name.removeprefix("torch.")
    if name in DTYPES:
        return DTYPES[name], None
    if name in UNREADABLE:
        return UNREADABLE[name], f"torch.{name}, which only PyTorch has"
    return None


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
