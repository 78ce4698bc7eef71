"""The index of a Hugging Face model in several files: which file holds which tensor.

{"metadata": {"total_size": 123}, "weight_map": {"model.embed.weight": "model-00001-of-00002.safetensors", ...}}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from bridge.core.formats.reading.regular_files import is_plain_name, once_each, small_file
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.formats.tensors.wrapping import one_part
from bridge.core.text import first_of
from bridge.core.text_files import parse_json

INDEX_END: Final = ".index.json"
_MAX_INDEX: Final = 64 << 20


def read_weight_map(index: Path) -> Mapping[str, str]:
    """The file of each tensor. CheckpointError if the index is malformed or names anything but files next to it."""
    data = small_file(index.parent, index.name, "the index", most=_MAX_INDEX)
    content = parse_json(data, str(index), CheckpointError, "JSON", once_each)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f'{index}: expected a "weight_map" from names of tensors to names of files')
    for tensor, name in weight_map.items():
        if not is_plain_name(name):
            raise CheckpointError(
                f"{index}: tensor {tensor!r:.200}: expected the name of a file next to the index, got {name!r:.200}"
            )
    return weight_map


def check_index(
    directory: Path,
    weight_map: Mapping[str, str],
    stored: Iterable[tuple[str, str]],
    damaged: Collection[str] = (),
) -> None:
    """CheckpointError, naming some, unless the files contain exactly the tensors that the index gives for them.

    stored: (tensor, file) for all tensors in the files. damaged: files that could not be opened; so are their tensors.
    """
    for name, file in weight_map.items():
        if file in damaged:
            with one_part(name):
                raise CheckpointError(f"in {file}, which cannot be opened")
    there, problems = set(stored), []
    listed = {(name, file) for name, file in weight_map.items() if file not in damaged}
    for wrong, where in ((listed - there, "not in that file"), (there - listed, "not in the index")):
        if wrong:
            shown = first_of([f"{name!r:.200} of {file}" for name, file in sorted(wrong)])
            problems.append(f"{len(wrong)} {'is' if len(wrong) == 1 else 'are'} {where}: {shown}")
    if problems:
        raise CheckpointError(
            f"{directory}: expected index and files to name the same tensors, but {'; '.join(problems)}"
        )
