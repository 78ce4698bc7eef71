"""What `twinshard plan` writes and says besides its tables."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.commands.plan_pictures import write_whole
from bridge.commands.plan_targets import _described
from bridge.planning.cost.optimizers import ADAMW
from bridge.planning.models.errors import PlanError

MODEL: Any = SimpleNamespace(
    numel=8,
    parameters=[SimpleNamespace(numel=6, trainable=True), SimpleNamespace(numel=2, trainable=False)],
)


def step(**fields: Any) -> Any:
    work = SimpleNamespace(microbatches=2, batch=3, length=5)
    return SimpleNamespace(workload=work, optimizer=ADAMW, batch={"x": np.zeros((3, 4))}, **fields)


def test_a_step_is_described_by_its_sequences_or_by_its_arrays() -> None:
    assert _described(MODEL, step(is_language_model=True)) == (
        "8 parameters, of which 2 are frozen; 2 x 3 sequences of 5 tokens per device and step; "
        "bytes of one device, as XLA compiled"
    )
    assert "; 2 x (x [3, 4]) per device and step; " in _described(MODEL, step(is_language_model=False))


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.html", tmp_path / "folder"
    folder.mkdir()
    for text in ("first", "second"):
        write_whole(text, page)
        assert page.read_text() == text
    for unwritable in (folder, tmp_path / "missing" / "page.html"):
        with pytest.raises(PlanError, match=f"^{unwritable}: expected a file that can be written, got: "):
            write_whole("third", unwritable)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "page.html"]
    assert page.read_text() == "second"
