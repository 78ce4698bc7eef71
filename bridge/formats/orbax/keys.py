"""Which arrays of an Orbax item are typed PRNG keys: their dtype, ``key<rbg>``, is beside the data, not in it.

    array_metadatas/process_0    {"array_metadatas": [{"array_metadata": {"param_name": "rngs.dropout",
                                                        "ext_metadata": {"random_key_impl": "rbg"}}}, ...]}

The stored values are the uint32 of ``jax.random.key_data``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.callers import warn_caller
from bridge.formats.base import CheckpointError, CheckpointReader
from bridge.formats.files.mapped import Fetch, regular_file, small_file

_FOLDER = "array_metadatas"
_DEFAULT = "threefry2x32"


def key_types(item: Path, fetch: Fetch | None = None) -> Mapping[str, str]:
    """The implementation of every typed key, by the name of its array in the store.

    CheckpointError for a file of array metadata that is no JSON.
    """
    found: dict[str, str] = {}
    folder = item / _FOLDER
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        what = "array metadata"
        if fetch is not None:
            fetch(file, 0, regular_file(folder, file.name, what)[1])
        try:
            content = json.loads(small_file(folder, file.name, what))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: expected JSON, got something else: {error}") from error
        found.update(_keys(content))
    return found


def check_keys(reader: CheckpointReader, used: Iterable[str]) -> None:
    """Refuse typed keys among the tensors ``used``, which become raw data, unless JAX takes the data for the same key.

    CheckpointError for all but JAX's default implementation, which warns.
    """
    typed: Mapping[str, str] = getattr(reader, "key_types", {})
    found = {name: typed[name] for name in used if name in typed}
    for name, kind in found.items():
        if kind != _DEFAULT:
            raise CheckpointError(
                f"{reader.path}: tensor {name!r}: expected no typed PRNG key but {_DEFAULT}, whose raw data JAX takes "
                f"for the same key, got key<{kind}>: leave the tensor out (--drop {name!r}) and make the key anew, or "
                f"save jax.random.key_data(key) and restore it with wrap_key_data(data, impl={kind!r})"
            )
    if found:
        first = next(iter(found))
        warn_caller(
            f"{reader.path}: typed PRNG keys (key<{_DEFAULT}>) become their raw uint32: {len(found)}, such as "
            f"{first!r}. Give them to jax.random.wrap_key_data after restoring, or leave them out (--drop {first!r})",
        )


def _keys(content: Any) -> Iterator[tuple[str, str]]:
    """What is made otherwise than Orbax makes it speaks of no key: nothing else of these files is needed."""
    listed = content.get(_FOLDER) if isinstance(content, dict) else None
    for entry in listed if isinstance(listed, list) else ():
        array = entry.get("array_metadata") if isinstance(entry, dict) else None
        if not isinstance(array, dict):
            continue
        name, further = array.get("param_name"), array.get("ext_metadata")
        kind = further.get("random_key_impl") if isinstance(further, dict) else None
        if isinstance(name, str) and isinstance(kind, str):
            yield name, kind
