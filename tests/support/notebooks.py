"""Execute the notebooks in a clean kernel. ``python -m tests.support.notebooks [NAME...]`` stores their outputs.

The README shows the picture of the relay, ``notebooks/relay.png``. Notebook 01 draws this picture: its execution writes
the file.
"""

from __future__ import annotations

import base64
import os
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
        notebook,
        timeout=1800,
        kernel_name="python3",
        coalesce_streams=True,  # otherwise a slow machine stores each line by itself
        resources={"metadata": {"path": str(FOLDER)}},
    )
    # A progress bar would leave its last state in the stored outputs.
    with patch.dict(os.environ, TWINSHARD_RELAY=relay, TQDM_DISABLE="1"):
        return client.execute()


def relay_picture(notebook: nbformat.NotebookNode) -> bytes:
    """The picture of the relay that notebook 01 draws, as a PNG."""
    return next(
        base64.b64decode(cell.outputs[0]["data"]["image/png"])
        for cell in notebook.cells
        if "relay_figure(report)" in cell.source
    )


def main(names: list[str]) -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = execute(path)
        nbformat.write(notebook, path)
        if path == RELAY:
            PICTURE.write_bytes(relay_picture(notebook))
        print(f"executed {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
