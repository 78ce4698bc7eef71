"""Checkpoint formats behind one reader and one writer protocol, with neither PyTorch nor JAX.

with open_checkpoint("runs/leg_0") as source:                       # format detected
    row = source.read("model.embed.weight", Box((5, 0), (1, 331)))

with create_checkpoint("copy", "orbax") as target:                  # appears on a clean exit, whole
    name = target.add_tensor(("params", "scale"), (331,), np.dtype("float32")).name
    for box in target.chunks(name):
        target.write(name, box, array[box.slices()])
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from bridge.core.formats.dcp.metadata import metadata_files
from bridge.core.formats.files.atomic import is_unfinished
from bridge.core.formats.files.journal import Attempt
from bridge.core.formats.orbax.item import StepMetadata
from bridge.core.formats.safetensors.files import SAFETENSORS_FILES
from bridge.core.formats.stores.listing import StorePath
from bridge.core.formats.stores.store import hub_hint, is_url
from bridge.core.formats.tensors.base import (
    Box,
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    TreePath,
)
from bridge.core.formats.whole.composite import JoinedReader, has_parts, parts_of, pipeline_parts
from bridge.core.formats.whole.read_only import (
    TREE_OF_PLACEHOLDERS,
    directory_format,
    foreign,
    single_file_format,
)
from bridge.core.formats.whole.step_paths import Step, at_step, has_steps
from bridge.core.long_calls import collection_paused
from bridge.core.text import first_of

__all__ = [
    "FORMATS", "READ_ONLY_FORMATS", "Attempt", "Box", "CheckpointError", "CheckpointReader",
    "CheckpointWriter", "Format", "TreePath", "create_checkpoint", "detect_format", "format_named",
    "items_of_each", "open_checkpoint",
]  # fmt: skip

Format: TypeAlias = Literal["dcp", "orbax", "safetensors"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
"""Formats that can be written."""
READ_ONLY_FORMATS = ("torch", "npz", "msgpack")
"""Formats that can be read but not written: torch.save, NumPy's archives, flax's serialization."""

_ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "orbax.checkpoint")


def format_named(name: str) -> Format:
    """One of FORMATS. ValueError for any other name."""
    for format in FORMATS:
        if name == format:
            return format
    raise ValueError(f"expected a checkpoint format out of {', '.join(FORMATS)}, got {name!r}")


def detect_format(path: str | os.PathLike[str]) -> str:
    """One of FORMATS or READ_ONLY_FORMATS, from the names of the files in the directory, or of the file itself.

    Raises FileNotFoundError (no such path), NotADirectoryError (other file), CheckpointError (half-written, unknown).
    """
    where = path if isinstance(path, StorePath) else Path(path)
    if not where.exists():
        raise FileNotFoundError(f"{where} does not exist: expected a checkpoint there{hub_hint(path)}")
    if is_unfinished(where if isinstance(where, StorePath) else Path(os.path.abspath(where))):
        raise CheckpointError(
            f"{where} is a checkpoint that was never finished (its writer stopped half-way): remove it, and use an "
            "earlier checkpoint"
        )
    if not where.is_dir():
        if SAFETENSORS_FILES.is_one(where):
            return "safetensors"
        format, said = single_file_format(where), foreign([where.name])
        # HDF5 begins with a byte of msgpack.
        if format is not None and not (said and format == "msgpack"):
            return format
        raise NotADirectoryError(
            f"{where} is a file of another kind{f' ({said})' if said else ''}: expected a checkpoint directory, a "
            ".safetensors file, or one of torch.save, NumPy (.npz) or flax (.msgpack)"
        )
    if metadata_files(where):
        return "dcp"
    # A directory of steps contains items, and items contain the files: <root>/<step>/<item>/_METADATA.
    for pattern in ("", "*/", "*/*/"):
        if any(next(where.glob(pattern + name), None) for name in _ORBAX_FILES):
            return "orbax"
    if parts := pipeline_parts(where):
        formats = {detect_format(part) for part in parts.values()}
        return formats.pop() if len(formats) == 1 else "safetensors"
    if SAFETENSORS_FILES.is_one(where):
        return "safetensors"
    if (format := directory_format(where)) is not None:
        return format
    if single_file_format(where / TREE_OF_PLACEHOLDERS) == "msgpack":
        return "msgpack"
    names = sorted(p.name for p in where.iterdir())
    if any(n.endswith(".distcp") for n in names):
        raise CheckpointError(f"{where} is a DCP checkpoint whose save did not finish: it has no .metadata")
    steps = "; if the directory contains several steps, choose one (--step latest, or --step NUMBER)"
    said = foreign(names)
    raise CheckpointError(
        "expected a DCP checkpoint (.metadata), an Orbax one (_METADATA) or *.safetensors, *.bin, *.pt, *.npz or "
        f"*.msgpack files in {where}, found {first_of(names) or 'an empty directory'}"
        f"{f'; {said}' if said else steps if has_steps(names) else ''}"
    )


def open_checkpoint(
    path: str | os.PathLike[str], *, verify: bool = True, items: Sequence[str] = (), step: Step | None = None
) -> CheckpointReader:
    """Open the checkpoint at a local path or a URL, whatever its format.

    verify: compare chunks with the format's own checksums (DCP, Orbax, zip files) when they are read. items: the items
    of an Orbax step to read, or the folders of a diffusers pipeline; several are read as one tree, each below its name.
    Without items, a pipeline is read whole. A step's only item is read, or all items if their names say that they form
    one train state, such as params and opt_state. step: a number, or "latest", if `path` is a directory of steps.

    Errors as in `detect_format`, or CheckpointError; OSError when the store at the URL fails.
    """
    if step is not None:
        path = at_step(path, step)
    if is_url(path):
        if hint := hub_hint(path):
            raise CheckpointError(
                f"{path} is a web page's address: expected the address of a checkpoint's files{hint}"
            )
        from bridge.core.formats.stores.listing import StoredReader

        return StoredReader(str(path), lambda where: _open(where, verify, items))
    return _open(path if isinstance(path, StorePath) else Path(path), verify, items)


def items_of_each(paths: Sequence[str | os.PathLike[str]], items: Sequence[str]) -> list[Sequence[str]]:
    """`items` for each path that has items, none for others; for all if none has any, so that opening refuses them."""
    there = [bool(items) and (is_url(path) or has_parts(Path(path))) for path in paths]
    return [items if has or not any(there) else () for has in there]


@collection_paused()
def _open(path: Path, verify: bool, items: Sequence[str]) -> CheckpointReader:
    # Imported here: reading one format must not need the dependencies of another (tensorstore).
    format = detect_format(path)
    if items and not has_parts(path):
        raise CheckpointError(
            f"{path}: expected a checkpoint of several items (--item), found one of {format}"
        )
    # DCP's metadata describes its whole directory.
    if format == "dcp" and not items:
        from bridge.core.formats.dcp.reader import DcpReader

        return DcpReader(path, verify)
    parts = parts_of(path, items)
    if len(parts) > 1:
        with ExitStack() as opened:
            readers = {name: opened.enter_context(_open(part, verify, ())) for name, part in parts.items()}
            joined = JoinedReader(path, format, readers)
            opened.pop_all()
        return joined
    if parts:
        return _open(next(iter(parts.values())), verify, ())
    if format == "torch":
        from bridge.core.formats.torch_save.ranks import open_torch_save

        return open_torch_save(path, verify)
    if format == "npz":
        from bridge.core.formats.npz.reader import NpzReader

        return NpzReader(path, verify)
    if format == "msgpack":
        from bridge.core.formats.whole.placeholders import open_msgpack

        return open_msgpack(path, verify)
    if format == "safetensors":
        from bridge.core.formats.safetensors.reader import SafetensorsReader

        return SafetensorsReader(path)
    from bridge.core.formats.orbax.reader import OrbaxReader

    return OrbaxReader(path, verify=verify)


def create_checkpoint(
    path: str | os.PathLike[str],
    format: Format,
    *,
    attempt: Attempt | None = None,
    items: Sequence[str] = (),
    like: StepMetadata | None = None,
) -> CheckpointWriter:
    """Start a new checkpoint at `path`, which must not exist unless `attempt` replaces it.

    `format` is one of FORMATS, else ValueError. items: keys of the tree that each become an item, in Orbax only. like:
    the step that has these items in the program that will restore them. If it has one item, the item contains the tree.
    """
    if items and format != "orbax":
        raise CheckpointError(f"{path}: expected orbax, which has items (--write-item), got {format}")
    several = bool(items) and (like is None or len(items) > 1)
    if several and is_url(path):
        raise CheckpointError(
            f"{path} is in an object store: expected one item there, got {', '.join(items)}; convert to a local "
            "path to write several"
        )
    if format == "dcp":
        from bridge.core.formats.dcp.writer import DcpWriter

        return DcpWriter(path, attempt)
    if several:
        from bridge.core.formats.orbax.items_writer import OrbaxItemsWriter

        return OrbaxItemsWriter(path, items, attempt, like)
    if format == "orbax":
        from bridge.core.formats.orbax.writer import OrbaxWriter

        return OrbaxWriter(path, item=next(iter(items), None), attempt=attempt, like=like)
    format_named(format)
    from bridge.core.formats.safetensors.writer import SafetensorsWriter

    return SafetensorsWriter(path, attempt)
