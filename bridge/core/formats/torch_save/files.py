"""Which files torch.save wrote, and of which kind they are."""

from __future__ import annotations

import re
from typing import Final

from bridge.core.formats.reading.model_files import FileKind
from bridge.core.formats.reading.source_files import SourceFiles
from bridge.core.formats.reading.zip_directory import STORED, ZIP_MAGIC, Member, read_directory
from bridge.core.formats.tensors.base import COPY_AGAIN, CheckpointError
from bridge.core.text import first_of

TRAINING_STATE: Final = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|openvino_|(optim|extra_state)_world_size_).*"
)
"""Names of other files with the same suffixes that trainers and exporters write next to weights."""
TORCH_FILES: Final = FileKind(
    (".bin", ".pt", ".pth", ".ckpt"),
    (
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "diffusion_pytorch_model.bin.index.json"),
        *("diffusion_pytorch_model.bin", "adapter_model.bin", "model.pt"),
    ),
    TRAINING_STATE,
    joins_ranks=True,
)
_KIND: Final = "a zip file of torch.save"
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_PICKLE: Final = b"\x80"
_SAVE_AGAIN: Final = "if you trust the file, load it with PyTorch, and save it again with torch.save"


def members_of(files: SourceFiles, name: str) -> dict[str, Member]:
    """The members of the file, by name without their folder.

    CheckpointError if this is not a zip file of torch.save; the message says what it is, if known.
    """
    path = files.directory / name
    size = path.stat().st_size
    if not size:
        raise CheckpointError(f"{path}: expected {_KIND}, but the file is empty: {COPY_AGAIN}")
    head = files.read(name, 0, min(size, 64))
    if head.startswith(_LEGACY):
        raise CheckpointError(
            f"{path}: expected {_KIND}, found the format before PyTorch 1.6, which has no parts: {_SAVE_AGAIN}"
        )
    if not head.startswith(ZIP_MAGIC):
        description = "a pickle" if head.startswith(_PICKLE) else "a file of another kind"
        raise CheckpointError(f"{path}: expected {_KIND}, found {description}: {_SAVE_AGAIN}")
    members: dict[str, Member] = {}
    for full, member in read_directory(files, name, _KIND).items():
        short = full.partition("/")[2]
        if short in members:
            raise CheckpointError(f"{path}: expected one folder in {_KIND}, found {short!r:.200} in two")
        members[short] = member
    if "constants.pkl" in members or any(short.startswith("code/") for short in members):
        raise CheckpointError(
            f"{path}: expected {_KIND}, found a TorchScript program: save the state_dict() of the module instead"
        )
    if "data.pkl" not in members:
        raise CheckpointError(
            f"{path}: expected {_KIND}, but it has no data.pkl: found {first_of(members)!r:.200}"
        )
    for member in members.values():
        if member.method != STORED:
            raise CheckpointError(
                f"{path}: expected {_KIND}, but its member {member.name!r:.200} is compressed: store it uncompressed, "
                "as PyTorch does"
            )
    return members
