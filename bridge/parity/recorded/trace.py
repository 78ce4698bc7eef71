"""Traces: one side's runs as files, so that the two sides can run on two machines, in two environments, at two times.

    my.trace/
      model.safetensors     the batch, weights, inputs, outputs and gradients, in float64 and in the compute dtype,
                            and which call each belongs to
      trace.json            the same without the arrays, with their statistics, for a reader

A trace is also a ``Side``: it returns its recorded runs. It cannot run a module again, so a comparison of traces shows
where differences are and where they begin, but not whether a module after the first fault is correct.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError, create_checkpoint, open_checkpoint
from bridge.core.text import plain_json
from bridge.parity.recorded.distance import epsilon
from bridge.parity.recorded.recording import (
    Call,
    Leaves,
    Recording,
    Replacements,
    Rerun,
    Side,
    Training,
    checked_dtype,
)
from bridge.parity.recorded.samples import Sampling, statistics

_FORMAT = "twinshard trace 2"
_HEADER, _READABLE = "twinshard.trace", "trace.json"
_GROUPS = ("inputs", "outputs", "gradients")
_ROUNDINGS = 2.0
"""Two runs in the compute dtype each contain one rounding."""


class TraceError(Exception):
    """A trace that cannot be written or read: the message names the file."""


class NotRecorded(Exception):
    """The caller asked a trace for something that it does not contain, such as a module on other inputs."""


def write_trace(
    side: Side,
    batch: Any,
    path: str | os.PathLike[str],
    *,
    dtype: str = "float32",
    steps: int = 3,
    samples: Mapping[int, int] | None = None,
) -> None:
    """Run a side on ``batch`` and write everything that a comparison needs to the new directory ``path``.

    ``steps``: of training, 0 for none. ``samples``: see ``Sampling``. Raises ``TraceError`` if ``path`` exists,
    ``ValueError`` for a dtype that cannot be tested, and the errors of ``Sampling.of``.
    """
    dtype = checked_dtype(dtype, steps)
    check_new(path)
    taken = Capture.of(side, batch, ("float64", dtype), steps, samples)
    taken.write(path, dict(batch_leaves(batch)))


def check_new(path: str | os.PathLike[str]) -> None:
    """Raise ``TraceError`` for a path that exists."""
    if Path(path).exists():
        raise TraceError(f"{path}: expected no file or directory, found one")


@dataclass(frozen=True)
class Capture:
    """The content of a future trace. ``statistics``: of the arrays before sampling."""

    header: Mapping[str, Any]
    arrays: Leaves
    statistics: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(
        cls,
        side: Side,
        batch: Any,
        dtypes: Sequence[str],
        steps: int = 3,
        samples: Mapping[int, int] | None = None,
    ) -> Capture:
        """Run a side in ``dtypes``; the last one is the compute dtype."""
        weights = side.weights()
        sampling = Sampling.of(samples, weights)
        arrays: dict[str, np.ndarray] = {f"weights:{name}": array for name, array in weights.items()}
        buffers = side.buffers()
        arrays.update((f"buffers:{name}", array) for name, array in buffers.items())
        numbers: dict[str, Mapping[str, Any]] = {}
        runs, trained = {}, {}
        for run_dtype in dtypes:
            whole: dict[str, np.ndarray] = {}
            runs[run_dtype] = _keep_run(side.record(batch, run_dtype), f"{run_dtype}:", whole)
            numbers.update((name, statistics(array)) for name, array in whole.items())
            uncut = (f"{run_dtype}:gradient:", f"{run_dtype}:buffer:")
            for name, array in whole.items():
                arrays[name] = array if name.startswith(uncut) else sampling.cut(array)
        for run_dtype in dtypes if steps else ():
            training = side.train([batch] * steps, run_dtype)
            trained[run_dtype] = list(training.losses)
            between = ((f"step {step}", leaves) for step, leaves in enumerate(training.between, 2))
            for when, leaves in (("first", training.first), *between, ("last", training.last)):
                arrays.update({f"{run_dtype}:{when}:{name}": array for name, array in leaves.items()})
        numbers.update((name, statistics(array)) for name, array in arrays.items() if name not in numbers)
        header: dict[str, Any] = {
            "format": _FORMAT,
            "framework": side.framework,
            "separator": side.separator,
            "dtype": dtypes[-1],
            "steps": steps,
            "weights": list(weights),
            "buffers": list(buffers),
            "left_out": list(side.left_out),
            "runs": runs,
            "trained": trained,
            "samples": {str(size): list(kept) for size, kept in sampling.kept.items()},
        }
        return cls(header, arrays, numbers)

    def write(self, path: str | os.PathLike[str], batch: Leaves, notes: Sequence[str] = ()) -> None:
        """Write the trace with the arrays of its batch, and with notes for its report.

        ``ValueError`` for a sample size that no array has.
        """
        shapes = {size for numbers in self.statistics.values() for size in numbers["shape"]}
        for size in map(int, list(self.header["samples"])[:2]):
            if size not in shapes:
                raise ValueError(
                    f"samples: expected the size of an axis that a module's array has, got {size}; of tokens [B, T "
                    "+ 1] the model may get T"
                )
        header = {**self.header, "batch": list(batch), "notes": list(notes)}
        arrays = {**self.arrays, **{f"batch:{name}": array for name, array in batch.items()}}
        folder = Path(path)
        with create_checkpoint(folder, "safetensors") as writer:
            for name, array in arrays.items():
                info = writer.add_tensor(name, array.shape, array.dtype)
                assert info.name == name
            writer.add_object(_HEADER, header)
            for name, array in arrays.items():
                for box in writer.chunks(name):
                    writer.write(name, box, np.asarray(array[box.slices()], order="C"))
        numbers = {**self.statistics, **{f"batch:{name}": statistics(array) for name, array in batch.items()}}
        text = json.dumps(plain_json({**header, "statistics": numbers}), indent=1, allow_nan=False) + "\n"
        (folder / _READABLE).write_text(text, encoding="utf-8")


class OneRecording:
    """The refusals of a ``Side`` whose model cannot run again. ``runs_once``: the reason."""

    runs_once = "a trace cannot run a module"

    def load(self, weights: Leaves) -> None:
        raise NotRecorded(f"its weights cannot be changed: {self.runs_once}")

    def in_order(self, batch: Any, rows: Sequence[int], dtype: str = "float32") -> Recording:
        raise NotRecorded(f"its batch has one order: {self.runs_once}")

    def rerun(
        self,
        dtype: str,
        path: str,
        number: int,
        inputs: Leaves,
        *,
        cotangents: Leaves | None = None,
        replaced: Replacements | None = None,
    ) -> Rerun:
        raise NotRecorded(self.runs_once)

    def forget(self) -> None:
        """Nothing is kept for reruns."""


@dataclass(frozen=True)
class TraceSide(OneRecording):
    """A trace, read. ``path``: of its directory."""

    path: Path
    framework: str
    separator: str
    dtype: str
    steps: int
    header: Mapping[str, Any]
    arrays: Leaves

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> TraceSide:
        """Raises ``TraceError`` for a directory that is no trace."""
        folder = Path(path)
        try:
            # A trace travels between machines; without this check, half an upload would be compared as zeros.
            problems = verify(folder).problems
            if problems:
                raise TraceError(
                    f"{folder}: expected an unchanged trace: {problems[0].where}: {problems[0].text}; capture "
                    "it again"
                )
            with open_checkpoint(folder) as reader:
                header: Any = dict(reader.objects).get(_HEADER)
                arrays = {name: reader.read(name) for name in reader.tensors}
        except (OSError, CheckpointError) as error:
            raise TraceError(f"{folder}: expected a trace: {error}") from error
        if not isinstance(header, dict) or header.get("format") != _FORMAT:
            raise TraceError(f"{folder}: expected a trace of format {_FORMAT!r}, got {header!r:.80}")
        return cls(
            folder, header["framework"], header["separator"], header["dtype"], header["steps"], header, arrays
        )

    @property
    def has_float64(self) -> bool:
        """Whether there is a run in float64.

        If not, the run in the compute dtype replaces it, and its own rounding is unknown: then the floor is the other
        side's, or ``_ROUNDINGS`` of the compute dtype's epsilon. The values that are returned for the compute dtype are
        off by this amount.
        """
        return "float64" in self.header["runs"]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes that a report of this trace must show."""
        return tuple(self.header["notes"])

    @property
    def samples(self) -> Mapping[str, Sequence[int]]:
        """The positions kept on axes, by the size of the axis; see ``Sampling``."""
        samples: Mapping[str, Sequence[int]] = self.header["samples"]
        return samples

    def batch(self) -> dict[str, np.ndarray]:
        """The arrays of the batch, by their place in the batch."""
        return {name: self.arrays[f"batch:{name}"] for name in self.header["batch"]}

    def weights(self) -> dict[str, np.ndarray]:
        return {name: self.arrays[f"weights:{name}"] for name in self.header["weights"]}

    def buffers(self) -> dict[str, np.ndarray]:
        return {name: self.arrays[f"buffers:{name}"] for name in self.header.get("buffers", ())}

    @property
    def left_out(self) -> tuple[str, ...]:
        """See ``Side``. Traces of older versions hold no buffers."""
        missing = (
            () if "buffers" in self.header else (f"{self.framework}'s buffers, which {self.path} lacks",)
        )
        return (*self.header.get("left_out", ()), *missing)

    def record(self, batch: Any, dtype: str = "float32", *, backward: bool = True) -> Recording:
        """The recorded run; the batch is always the trace's. See ``has_float64``."""
        recorded = self._recorded(dtype, "runs")
        run, prefix = self.header["runs"][recorded], f"{recorded}:"
        calls = []
        for index, call in enumerate(run["calls"]):
            inputs, outputs, by_output = (
                self._leaves({leaf: f"{prefix}{index}:{group}:{leaf}" for leaf in call[group]}, dtype)
                for group in _GROUPS
            )
            numbers, sizes = call.get("heads", ((), ()))
            heads = tuple(numbers), tuple(sizes)
            own = call["path"], call["number"], call["kind"]
            calls.append(Call(*own, inputs, outputs, by_output, call["parent"], heads))
        gradients = self._leaves({name: f"{prefix}gradient:{name}" for name in run["gradients"]}, dtype)
        buffers = self._leaves({name: f"{prefix}buffer:{name}" for name in run.get("buffers", ())}, dtype)
        loss = run["loss"]
        return Recording(dtype, calls, None if loss is None else float(loss), gradients, buffers)

    def train(self, batches: Sequence[Any], dtype: str = "float32") -> Training:
        """The recorded training. See ``has_float64``."""
        recorded = self._recorded(dtype, "trained")
        buffers = self.header.get("buffers", ())
        names = (*self.header["weights"], *buffers)
        first, last = (
            self._leaves({name: f"{recorded}:{when}:{name}" for name in names}, dtype)
            for when in ("first", "last")
        )
        losses = tuple(map(float, self.header["trained"][recorded]))
        between = (
            {name: f"{recorded}:step {step}:{name}" for name in buffers} for step in range(2, len(losses))
        )
        # Traces of older versions have no buffers of intermediate steps.
        kept = [{name: key for name, key in keys.items() if key in self.arrays} for keys in between]
        return Training(losses, first, last, tuple(self._leaves(keys, dtype) for keys in kept))

    def _recorded(self, dtype: str, what: str) -> str:
        """The dtype of the recorded run that has ``dtype``, or replaces it."""
        if dtype in self.header[what] or (dtype == "float64" and not self.has_float64):
            return dtype if dtype in self.header[what] else self.dtype
        recorded = ", ".join(self.header[what]) or "none"
        raise NotRecorded(
            f"{self.path}: expected a run in {dtype}, got {recorded}; compare traces of one compute dtype"
        )

    def _leaves(self, keys: Mapping[str, str], dtype: str) -> dict[str, np.ndarray]:
        leaves = {leaf: self.arrays[key] for leaf, key in keys.items()}
        if self.has_float64 or dtype == "float64":
            return leaves
        # Returning the values themselves would make a floor of zero, and any difference a fault.
        factor = 1 + _ROUNDINGS * epsilon(self.dtype)
        return {
            leaf: array if array.dtype.kind in "iub" else array.astype(np.float64) * factor
            for leaf, array in leaves.items()
        }


def _keep_run(run: Recording, prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    calls = []
    for index, call in enumerate(run.calls):
        entry: dict[str, Any] = {
            "path": call.path,
            "number": call.number,
            "kind": call.kind,
            "parent": call.parent,
            "heads": call.heads,
        }
        for group in _GROUPS:
            leaves: Leaves = getattr(call, group)
            entry[group] = list(leaves)
            arrays.update({f"{prefix}{index}:{group}:{leaf}": array for leaf, array in leaves.items()})
        calls.append(entry)
    arrays.update({f"{prefix}gradient:{name}": array for name, array in run.gradients.items()})
    arrays.update({f"{prefix}buffer:{name}": array for name, array in run.buffers.items()})
    return {"loss": run.loss, "calls": calls, "gradients": list(run.gradients), "buffers": list(run.buffers)}


def batch_leaves(batch: Any, where: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Arrays and numbers of a batch; other values are left out."""
    if isinstance(batch, Mapping | list | tuple):
        items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        for key, value in items:
            yield from batch_leaves(value, f"{where}.{key}" if where else str(key))
    elif batch is not None and not isinstance(batch, str):
        yield where, np.asarray(batch)


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a directory looks like a trace."""
    return (Path(path) / _READABLE).exists()
