"""Traces: one side's runs as files, so that the two sides can run on two machines, in two environments, at two times.

    my.trace/
      model.safetensors     the batch, weights, inputs, outputs and gradients, in float64 and in the compute dtype,
                            and which call each belongs to
      trace.json            the same without the arrays, with their statistics, for a reader

A trace is a ``Side``, too: it gives its recorded runs. It cannot run a module again, so a comparison of traces shows
where differences lie and where they begin, but not whether a module after the first one is innocent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bridge.checkpoints.verify import verify
from bridge.formats import CheckpointError, create_checkpoint, open_checkpoint
from bridge.parity.pair.recording import (
    Call,
    Leaves,
    Recording,
    Replacements,
    Rerun,
    Side,
    Training,
    check_choices,
)
from bridge.text import plain_json

_FORMAT = "twinshard trace 1"
_HEADER, _READABLE = "twinshard.trace", "trace.json"
_GROUPS = ("inputs", "outputs", "gradients")


class TraceError(Exception):
    """A trace that cannot be written or read: the message names the file."""


class NotRecorded(Exception):
    """A trace was asked for something that it does not hold, such as a module on other inputs."""


def write_trace(
    side: Side, batch: Any, path: str | os.PathLike[str], *, dtype: str = "float32", steps: int = 3
) -> None:
    """Run a side on ``batch`` and write everything that a comparison needs to the new directory ``path``.

    ``steps``: of training, 0 for none. Raises ``TraceError`` where ``path`` exists, ``ValueError`` for a dtype that is
    none of those that can be tested.
    """
    check_choices(dtype, steps)
    folder = Path(path)
    if folder.exists():
        raise TraceError(f"{folder}: expected no file or directory, found one")
    arrays: dict[str, np.ndarray] = {f"weights:{name}": array for name, array in side.weights().items()}
    given = dict(_batch_leaves(batch))
    arrays.update({f"batch:{name}": array for name, array in given.items()})
    runs = {}
    for one in ("float64", dtype):
        runs[one] = _kept(side.record(batch, one), f"{one}:", arrays)
    trained = {}
    for one in ("float64", dtype) if steps else ():
        found = side.train([batch] * steps, one)
        trained[one] = list(found.losses)
        for when, weights in (("first", found.first), ("last", found.last)):
            arrays.update({f"{one}:{when}:{name}": array for name, array in weights.items()})
    header: dict[str, Any] = {
        "format": _FORMAT,
        "framework": side.framework,
        "separator": side.separator,
        "dtype": dtype,
        "steps": steps,
        "weights": list(side.weights()),
        "batch": list(given),
        "runs": runs,
        "trained": trained,
    }
    with create_checkpoint(folder, "safetensors") as writer:
        for name, array in arrays.items():
            info = writer.add_tensor(name, array.shape, array.dtype)
            assert info.name == name
        writer.add_object(_HEADER, header)
        for name, array in arrays.items():
            for box in writer.chunks(name):
                writer.write(name, box, np.ascontiguousarray(array[box.slices()]))
    header["statistics"] = {name: _statistics(array) for name, array in arrays.items()}
    text = json.dumps(plain_json(header), indent=1, allow_nan=False) + "\n"
    (folder / _READABLE).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class TraceSide:
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
        """Raises ``TraceError`` for what is no trace."""
        folder = Path(path)
        try:
            problems = verify(folder).problems
            if problems:
                raise TraceError(
                    f"{folder}: expected a trace as it was written: {problems[0].where}: {problems[0].text}; capture "
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
            folder,
            header["framework"],
            header["separator"],
            header["dtype"],
            header["steps"],
            header,
            arrays,
        )

    def batch(self) -> dict[str, np.ndarray]:
        """The arrays of the batch, by their places in it."""
        return {name: self.arrays[f"batch:{name}"] for name in self.header["batch"]}

    def weights(self) -> dict[str, np.ndarray]:
        return {name: self.arrays[f"weights:{name}"] for name in self.header["weights"]}

    def load(self, weights: Leaves) -> None:
        raise NotRecorded(f"{self.path}: the weights of a trace cannot be changed")

    def record(self, batch: Any, dtype: str = "float32", *, backward: bool = True) -> Recording:
        """The recorded run; the batch is that of the trace."""
        if dtype not in self.header["runs"]:
            raise NotRecorded(
                f"{self.path}: expected a run in {dtype}, got {', '.join(self.header['runs'])}; compare traces of one "
                "compute dtype"
            )
        run, prefix = self.header["runs"][dtype], f"{dtype}:"
        calls = []
        for index, call in enumerate(run["calls"]):
            inputs, outputs, by_output = (
                {leaf: self.arrays[f"{prefix}{index}:{group}:{leaf}"] for leaf in call[group]}
                for group in _GROUPS
            )
            calls.append(
                Call(call["path"], call["number"], call["kind"], inputs, outputs, by_output, call["parent"])
            )
        gradients = {name: self.arrays[f"{prefix}gradient:{name}"] for name in run["gradients"]}
        loss = run["loss"]
        return Recording(dtype, calls, None if loss is None else float(loss), gradients)

    def in_order(self, batch: Any, rows: Sequence[int], dtype: str = "float32") -> Recording:
        raise NotRecorded("a trace has its batch in one order")

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
        raise NotRecorded("a trace cannot run a module")

    def forget(self) -> None:
        """Nothing is kept for reruns."""

    def train(self, batches: Sequence[Any], dtype: str = "float32") -> Training:
        """The recorded training."""
        if dtype not in self.header["trained"]:
            raise NotRecorded(f"{self.path}: expected a training in {dtype}, the trace has none")
        first, last = (
            {name: self.arrays[f"{dtype}:{when}:{name}"] for name in self.header["weights"]}
            for when in ("first", "last")
        )
        return Training(tuple(map(float, self.header["trained"][dtype])), first, last)


def _kept(run: Recording, prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    calls = []
    for index, call in enumerate(run.calls):
        entry: dict[str, Any] = {
            "path": call.path,
            "number": call.number,
            "kind": call.kind,
            "parent": call.parent,
        }
        for group in _GROUPS:
            leaves: Leaves = getattr(call, group)
            entry[group] = list(leaves)
            arrays.update({f"{prefix}{index}:{group}:{leaf}": array for leaf, array in leaves.items()})
        calls.append(entry)
    arrays.update({f"{prefix}gradient:{name}": array for name, array in run.gradients.items()})
    return {"loss": run.loss, "calls": calls, "gradients": list(run.gradients)}


def _batch_leaves(batch: Any, place: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Arrays and numbers of a batch; what is neither is left out."""
    if isinstance(batch, Mapping | list | tuple):
        items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        for key, value in items:
            yield from _batch_leaves(value, f"{place}.{key}" if place else str(key))
    elif batch is not None and not isinstance(batch, str):
        yield place, np.asarray(batch)


def _statistics(array: np.ndarray) -> dict[str, Any]:
    """For a reader without the arrays: shape, mean, root mean square, least and largest value."""
    found: dict[str, Any] = {"shape": list(array.shape), "dtype": array.dtype.name}
    if array.size:
        with np.errstate(all="ignore"):
            values = array.astype(np.float64)
            found["mean"] = float(values.mean())
            found["rms"] = float(np.sqrt(np.mean(values * values)))
            found["least"], found["largest"] = float(values.min()), float(values.max())
    return found


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a directory looks like a trace."""
    return (Path(path) / _READABLE).exists()
