"""Execute the notebooks in a clean kernel. ``python -m tests.support.notebooks [NAME...]`` stores their outputs.

The README shows the relay of notebook 01: its table, and its picture as ``notebooks/relay.png``. Executing that
notebook writes both.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from pathlib import Path
from unittest.mock import patch

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
RELAY = FOLDER / "01_relay.ipynb"
PICTURE = FOLDER / "relay.png"


def execute(path: Path, relay: str = "default") -> nbformat.NotebookNode:
    """The notebook with fresh outputs. Notebook 01 runs the built-in relay named ``relay``.

    Raises ``CellExecutionError`` if a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    # A stored notebook has no use for a bar that came and went.
    with patch.dict(os.environ, TWINSHARD_RELAY=relay, TQDM_DISABLE="1"):
        return client.execute()


def relay_shown(notebook: nbformat.NotebookNode) -> tuple[str, bytes]:
    """The table and summary that notebook 01 prints, and its picture of the relay as a PNG."""
    printed, picture = "", b""
    for cell in notebook.cells:
        if "report.summary()" in cell.source:
            printed = "".join(output.get("text", "") for output in cell.outputs)
        if "relay_figure(report)" in cell.source:
            picture = base64.b64decode(cell.outputs[0]["data"]["image/png"])
    return "\n".join(line.rstrip() for line in printed.strip().splitlines() if line.strip()), picture


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = execute(path)
        nbformat.write(notebook, path)
        if path == RELAY:
            printed, picture = relay_shown(notebook)
            PICTURE.write_bytes(picture)
            readme = ROOT / "README.md"
            text = readme.read_text(encoding="utf-8")
            readme.write_text(
                re.sub(r"```\nleg\b.*?\n```", f"```\n{printed}\n```", text, flags=re.S), encoding="utf-8"
            )
        print(f"executed {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
