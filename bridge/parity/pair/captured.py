"""The two sides of a comparison at two times: each is captured where it runs, and the traces are compared anywhere.

capture_torch(model, tokens, "torch.trace", loss="next_token")      # on the machine with PyTorch
capture_jax(model, tokens, "jax.trace", loss="next_token")          # on the one with JAX
compare_traces("torch.trace", "jax.trace", mapping="llama")         # where neither is installed
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from bridge.mapping import MappingTable
from bridge.mapping.rules import mapping_table
from bridge.parity.pair.compare import Progress, compare_sides
from bridge.parity.pair.report import ParityReport
from bridge.parity.pair.trace import TraceError, TraceSide, write_trace
from bridge.parity.pair.weight_map import WeightMap

Path = str | os.PathLike[str]


def capture_torch(
    model: Any,
    batch: Any,
    path: Path,
    *,
    loss: Any = None,
    dtype: str = "float32",
    steps: int = 3,
    optimizer: Any = None,
) -> None:
    """Write the trace of a torch model to the new directory ``path``. Arguments as in ``parity``.

    Without a loss the model's outputs are multiplied by numbers that depend on their order and shapes, so outputs that
    are ordered or laid out differently on the JAX side need a loss of one's own.
    """
    from bridge.parity.pair.torch_side import TorchSide

    write_trace(TorchSide(model, loss, optimizer=optimizer), batch, path, dtype=dtype, steps=steps)


def capture_jax(
    model: Any,
    batch: Any,
    path: Path,
    *,
    loss: Any = None,
    dtype: str = "float32",
    steps: int = 3,
    optimizer: Any = None,
) -> None:
    """Write the trace of a JAX model to the new directory ``path``; see ``capture_torch``."""
    from bridge.parity.pair.jax_side import JaxSide

    write_trace(JaxSide(model, loss, optimizer=optimizer), batch, path, dtype=dtype, steps=steps)


def compare_traces(
    first: Path,
    second: Path,
    *,
    mapping: str | os.PathLike[str] | MappingTable,
    axes: Mapping[str, int] | None = None,
    pairs: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Compare a trace of a torch model and one of a JAX model, in any order. Neither framework is needed.

    Modules cannot run again, so a difference is "introduced" by a module whose inputs are still the same, and
    "inherited" by all that get other inputs: after the first fault a second one is not seen. Raises ``TraceError`` for
    what is no trace, or was damaged, and for traces that do not belong together.
    """
    sides = {side.framework: side for side in (TraceSide.read(first), TraceSide.read(second))}
    if set(sides) != {"torch", "jax"}:
        raise TraceError(
            f"{first}, {second}: expected a torch and a jax trace, got two of {', '.join(sides)}"
        )
    torch, jax = sides["torch"], sides["jax"]
    if torch.dtype != jax.dtype or torch.steps != jax.steps:
        raise TraceError(
            f"{torch.path}, {jax.path}: expected traces of one compute dtype and as many steps, got {torch.dtype} and "
            f"{jax.dtype}, {torch.steps} and {jax.steps}"
        )
    _check_batches(torch, jax)
    table = mapping_table(mapping, axes)
    assert table is not None
    relation = WeightMap.of(table, torch.weights(), jax.weights())
    return compare_sides(
        torch, jax, None, relation, dtype=torch.dtype, given=pairs, steps=torch.steps, progress=progress
    )


def _check_batches(torch: TraceSide, jax: TraceSide) -> None:
    """Raise ``TraceError`` where arrays of one name, or the only ones, have other shapes or values."""
    ours, theirs = torch.batch(), jax.batch()
    if len(ours) == len(theirs) == 1:
        theirs = dict(zip(ours, theirs.values(), strict=True))
    for name in ours.keys() & theirs.keys():
        one, two = ours[name], theirs[name]
        if one.shape != two.shape or not np.array_equal(
            one.astype(np.float64), two.astype(np.float64), equal_nan=True
        ):
            what = f"shapes {one.shape} and {two.shape}" if one.shape != two.shape else "other values"
            raise TraceError(
                f"{torch.path}, {jax.path}: expected traces of one batch, got {what} in {name or 'its array'}; capture "
                "both with the same arrays"
            )
