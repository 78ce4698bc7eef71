"""Runs a run file: builds both models, reads weights, compares, and writes the report."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.extras import why_no_pictures
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import Box
from bridge.core.long_calls import Follow
from bridge.core.mapping import MappingError, MappingTable
from bridge.core.mapping.language.rules import mapping_table
from bridge.core.mapping.one_rule.sizes import with_config
from bridge.core.mapping.plan.translation import make_plan
from bridge.core.mapping.states.source_tree import find
from bridge.core.text import first_of
from bridge.parity.compare.parity import parity, sides_of
from bridge.parity.compare.run_file import RunFile, RunFileError
from bridge.parity.partners.weight_map import found_in_model
from bridge.parity.recorded.recording import Side
from bridge.parity.report_page.html import write_html
from bridge.parity.report_page.picture import write_picture
from bridge.parity.report_page.report import ParityReport


def compare_run_file(run: RunFile, progress: Follow = None) -> ParityReport:
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
                    notes.append(f"{source.checkpoint}: buffers without values, unchanged: {first_of(kept)}")
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
    """``report.json``, ``report.html`` and, with matplotlib, ``parity.png`` in ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    report.write(folder / "report.json")
    write_html(report, folder / "report.html")
    if why_no_pictures() is None:
        write_picture(report, folder / "parity.png")


def stored_weights(
    path: str | os.PathLike[str], mapping: MappingTable, side: Side
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The weights and buffers of a model, read from a checkpoint of any format in any convention of the mapping.

    Also returns the names of buffers that the checkpoint lacks. Raises ``CheckpointError`` (``MappingError``) if the
    checkpoint lacks parameters.
    """
    parameters, buffers = side.weights(), side.buffers()
    model, separator, where = {**parameters, **buffers}, side.separator, f"the {side.framework} model"
    own, names = found_in_model(mapping, parameters, buffers, separator, where)
    with open_checkpoint(path) as reader:
        table = with_config(mapping, reader)
        stored = find(reader.tensors.values(), table, None, str(path))
        same = stored.convention.name == own.convention.name
        if same:
            values = {weight: reader.read(info.name) for weight, info in stored.weights.items()}
        else:
            target = own.convention.at("{w}", own.convention.states)
            plan = make_plan(reader, "orbax" if separator == "/" else "dcp", table, into=target)
            values = {
                name: tensor.read(reader, Box.whole(tensor.shape)) for name, tensor in plan.tensors.items()
            }
        loaded = {names[info.name]: values[w] for w, info in own.weights.items() if w in values}
        for name in buffers.keys() - loaded.keys() if same else ():
            # Buffers that the mapping does not know, or that are next to the root of the weights, as batch_stats are.
            ends = [
                info.name
                for other, info in stored.others.items()
                if f"{separator}{other}".endswith(separator + name) and info.shape == buffers[name].shape
            ]
            if len(ends) == 1:
                loaded[name] = reader.read(ends[0])
    missing = sorted(parameters.keys() - loaded.keys())
    if missing:
        raise MappingError(f"{path}: expected the weights of {where}, found none for {first_of(missing)}")
    cast = {name: value.astype(model[name].dtype) for name, value in loaded.items()}
    return cast, tuple(sorted(buffers.keys() - loaded.keys()))
