"""Execute the notebooks from a clean kernel; ``python -m tests.support.notebooks`` stores the outputs in place."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs; raises ``CellExecutionError`` where a cell does."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    return client.execute()


if __name__ == "__main__":
    for found in sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(execute(found), found)
        print(f"executed {found.name}")
