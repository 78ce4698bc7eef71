"""The text of a program that libtpu compiled, even if jaxlib is too old to read the program.

jaxlib makes ``as_text()`` from libtpu's serialized program and fails at operations that it does not know. libtpu writes
the same text itself, one file for each program, into a folder that is set when libtpu starts.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import Any

from bridge.planning.models.runtimes import framework

_VARIABLE = "TWINSHARD_TPU_TEXTS"
_FLAGS = {
    "xla_jf_dump_to": "",
    "xla_jf_dump_hlo_text": "true",
    # Otherwise the folder gets every pass of the code generator, which is gigabytes.
    "xla_jf_dump_llo_text": "false",
    "xla_jf_dump_llo_pass_label_regex": "none_of_them",
}
_FILES = "*-TLP-hlo.txt"


def settings(folder: str, libraries: list[Path]) -> dict[str, str]:
    """The environment of a process whose libtpu, the first below ``libraries``, writes texts into ``folder``.

    Empty if this libtpu does not know these flags: it refuses to start with an unknown flag.
    """
    files = (file for place in libraries for file in Path(place, "libtpu").glob("libtpu*.so"))
    library = next(files, None)
    if library is None or not _knows_flags(library):
        return {}
    flags = " ".join(f"--{name}={value or folder}" for name, value in _FLAGS.items())
    arguments = os.environ.get("LIBTPU_INIT_ARGS", "")
    return {_VARIABLE: folder, "LIBTPU_INIT_ARGS": f"{arguments} {flags}".strip()}


def clear() -> None:
    """Forget the texts of earlier programs of this process."""
    for path in _texts():
        path.unlink()


def text_of(compiled: Any, lowered: str) -> str:
    """The text of a ``jax.stages.Compiled``. ``lowered``: text of the ``jax.stages.Lowered``, with the program's name.

    Raises ``JaxRuntimeError`` if nothing can read the program, or if several have its name since ``clear``.
    """
    try:
        return str(compiled.as_text())
    except framework("jax.errors").JaxRuntimeError:
        name = re.search(r"module @([\w.]+)", lowered)
        written = (path.read_text(encoding="utf-8") for path in _texts())
        texts = [text for text in written if name and text.startswith(f"HloModule {name[1]},")]
        if len(texts) != 1:
            raise
        return texts[0]


def _texts() -> list[Path]:
    """The texts in the order in which they were written."""
    folder = os.environ.get(_VARIABLE)
    return sorted(Path(folder).glob(_FILES)) if folder else []


def _knows_flags(library: Path) -> bool:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return all(content.find(f"FLAGS_{name}".encode()) >= 0 for name in _FLAGS)
