"""The pictures of `twinshard plan`: ``--chart``, and ``--html``, the page that holds pictures and tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bridge.checkpoints.inspect.chart import check_picture_path, save_picture
from bridge.commands.plan_options import PictureOptions
from bridge.commands.plan_targets import CompiledSteps
from bridge.core.extras import why_no_pictures
from bridge.planning.answers.comparison import Comparison
from bridge.planning.answers.search import Finding
from bridge.planning.models.errors import PlanError


def check_paths(pictures: PictureOptions) -> None:
    """Raises ``PictureError`` or ``PlanError``, before any computation, for a file that cannot be written."""
    chart, page = pictures.chart, pictures.page
    if chart is not None:
        check_picture_path(chart)
    if page is None:
        return
    if (reason := why_no_pictures()) is not None:
        raise PlanError(f"--html: {reason}")
    if page.suffix.lower() not in (".html", ".htm"):
        raise PlanError(f"--html: expected a file name that ends with .html, got {str(page)!r}")
    if page.is_dir() or not page.absolute().parent.is_dir():
        raise PlanError(f"--html: expected a file in a folder that exists, got {str(page)!r}")


def write_pictures(
    pictures: PictureOptions,
    comparison: Comparison,
    compiled: CompiledSteps | None,
    findings: Sequence[Finding],
) -> None:
    """Draw the compiled steps, if there are any; otherwise the comparison and the findings of a search."""
    chart, page = pictures.chart, pictures.page
    # Drawing libraries take longer to import than many plans to compute.
    if chart is not None:
        from bridge.compiling.target_chart import memory_figure
        from bridge.planning.answers.chart import chart as compared

        save_picture(memory_figure(compiled.plan) if compiled else compared(comparison), chart)
    if page is not None:
        from bridge.compiling.page import comparison_page, targets_page

        text = (
            targets_page(compiled.model, compiled.described, compiled.plan, compiled.roofline)
            if compiled
            else comparison_page(comparison, findings)
        )
        write_whole(text, page)


def write_whole(text: str, path: Path) -> None:
    """Write the whole file or nothing. Raises ``PlanError`` if the file cannot be written."""
    working = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device must not be replaced
            path.write_text(text, encoding="utf-8")
            return
        working.write_text(text, encoding="utf-8")
        working.replace(path)
    except OSError as error:
        working.unlink(missing_ok=True)
        raise PlanError(f"{path}: expected a file that can be written, got: {error.strerror}") from None
