"""What a run file asks for, done: both models built, weights read, compared, the report written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from bridge.core.mapping.language.rules import mapping_table
from bridge.core.text import first_of
from bridge.parity.compare.parity import parity, sides_of
from bridge.parity.compare.run_file import RunFile, RunFileError
from bridge.parity.compare.stored_weights import stored_weights
from bridge.parity.report_page.html import write_html
from bridge.parity.report_page.picture import write_picture
from bridge.parity.report_page.report import ParityReport
from bridge.parity.stages.compare import Progress


def compare_run_file(run: RunFile, progress: Progress | None = None) -> ParityReport:
    """Build both models of a run file and compare them. Raises ``RunFileError``, and what ``parity`` raises."""
    with run.importing():
        torch_model, jax_model = run.build("torch"), run.build("jax")
        try:
            sides = sides_of(torch_model, jax_model, run.losses())
        except TypeError as error:
            raise RunFileError(f"[torch] model, [jax] model: {error}") from error
        table = mapping_table(run.mapping, run.axes)
        assert table is not None
        notes: list[str] = []
        for side, source in zip(sides, (run.torch, run.jax), strict=True):
            if source.checkpoint is not None:
                weights, kept = stored_weights(source.checkpoint, table, side)
                side.load(weights)
                if kept:
                    notes.append(f"{source.checkpoint}: no values for buffers, which stay: {first_of(kept)}")
        options: dict[str, Any] = {"weights": run.weights, "dtype": run.dtype, "steps": run.steps}
        report = parity(
            *sides,
            run.arrays(),
            mapping=table,
            config=getattr(torch_model, "config", None),
            pairs=run.pairs,
            scale=run.scale,
            self_test=run.self_test,
            progress=progress,
            **options,
        )
        return replace(report, notes=(*report.notes, *notes))


def write_report(report: ParityReport, folder: Path) -> None:
    """``report.json``, ``report.html`` and ``parity.png`` in ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder / "report.json")
    write_html(report, folder / "report.html")
    write_picture(report, folder / "parity.png")
