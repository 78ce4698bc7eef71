"""Which arrays of an Orbax item are typed PRNG keys: their dtype, ``key<rbg>``, is beside the data, not in it.

    array_metadatas/process_0    {"array_metadatas": [{"array_metadata": {"param_name": "rngs.dropout",
                                                        "ext_metadata": {"random_key_impl": "rbg"}}}, ...]}

The stored values are the uint32 of ``jax.random.key_data``. Stock Orbax makes keys only of leaves that it restores as
jax.Array, for which it looks up a sharding where the caller gives none:

    _sharding                    {base64 of "rngs.dropout": a sharding as JSON text}
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.core.formats.orbax.zarr.arrays import ArrayLayout
from bridge.core.formats.reading.regular_files import small_file
from bridge.core.formats.tensors.base import CheckpointError

_FOLDER = "array_metadatas"
# On every device, of which there may be any number: NumPy takes -1 for as many as there are.
_EVERYWHERE = {
    "sharding_type": "NamedSharding",
    "shape": [-1],
    "axis_names": ["devices"],
    "partition_spec": [],
}


def read_keys(item: Path) -> Mapping[str, str]:
    """The implementation of every typed key, by the name of its array in the store.

    CheckpointError for a file of array metadata that is no JSON.
    """
    found: dict[str, str] = {}
    folder = item / _FOLDER
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        what = "array metadata"
        try:
            content = json.loads(small_file(folder, file.name, what))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: expected JSON, got something else: {error}") from error
        found.update(_keys(content))
    return found


def write_keys(item: Path, keys: Mapping[str, str], arrays: Mapping[str, ArrayLayout]) -> None:
    """Write what makes stock Orbax restore typed keys.

    keys: implementations, by the names of the arrays in the store; nothing is written where there are none.
    """
    if not keys:
        return
    described = [
        {
            "array_metadata": {
                "param_name": name,
                "write_shape": arrays[name].stored_chunk,
                "chunk_shape": arrays[name].chunk,
                "ext_metadata": {"random_key_impl": implementation},
            }
        }
        for name, implementation in keys.items()
    ]
    (item / _FOLDER).mkdir(exist_ok=True)
    (item / _FOLDER / "process_0").write_text(json.dumps({_FOLDER: described}))
    # Of all arrays: where the file is there, Orbax expects any in it that is to be a jax.Array.
    shardings = {base64.urlsafe_b64encode(name.encode()).decode(): json.dumps(_EVERYWHERE) for name in arrays}
    (item / "_sharding").write_text(json.dumps(shardings))


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
