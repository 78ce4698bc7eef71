"""The two sides of a comparison at two times: capture each where it runs, and compare the traces anywhere.

capture_torch(model, tokens, "torch.trace", loss="next_token")      # on the machine with PyTorch
capture_jax(model, tokens, "jax.trace", loss="next_token")          # on the machine with JAX
compare_traces("torch.trace", "jax.trace", mapping="llama")         # on any machine, without either
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from bridge.core.long_calls import Follow, followed
from bridge.core.mapping.language.rules import MappingLike, mapping_table
from bridge.parity.partners.weight_map import WeightMap
from bridge.parity.recorded.trace import TraceError, TraceSide, write_trace
from bridge.parity.report_page.report import ParityReport
from bridge.parity.stages.compare import compare_sides

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
    samples: Mapping[int, int] | None = None,
    reference: Any = None,
) -> None:
    """Write the trace of a torch model to the new directory ``path``. Arguments as in ``parity``.

    Without a loss, the model's outputs are multiplied by numbers that depend on their order and shapes. If the JAX side
    orders or lays out its outputs differently, pass your own loss.

    Args:
        samples: keep only some rows and tokens of activations and their gradients: the number to keep, by the size of
            the axis, such as ``{8: 2, 512: 16}``. Pass the same to both captures. Default: everything is kept.
        reference: for a sharded model, the same model in float64, sharded in the same way.

    A sharded model (parameters that are DTensors: FSDP2, ``torch_impl``, tensor parallelism) runs unchanged on all
    ranks of the process group: call this function on all ranks, with each rank's own batch. See ``capture_sharded``.
    """
    from bridge.parity.torch.run_in_dtype import has_shards

    options: dict[str, Any] = {"dtype": dtype, "steps": steps, "samples": samples}
    if has_shards(model):
        from bridge.parity.torch.sharded import capture_sharded

        capture_sharded(model, batch, path, loss=loss, optimizer=optimizer, reference=reference, **options)
        return
    if reference is not None:
        raise ValueError(
            "reference: expected none for a model that is not sharded, since a float64 copy of it is made"
        )
    from bridge.parity.torch.side import TorchSide

    write_trace(TorchSide(model, loss, optimizer=optimizer), batch, path, **options)


def capture_jax(
    model: Any,
    batch: Any,
    path: Path,
    *,
    loss: Any = None,
    dtype: str = "float32",
    steps: int = 3,
    optimizer: Any = None,
    samples: Mapping[int, int] | None = None,
) -> None:
    """Write the trace of a JAX model to the new directory ``path``; see ``capture_torch``.

    Arrays may be sharded over the devices of this process.
    """
    from bridge.parity.jax.side import JaxSide

    side = JaxSide(model, loss, optimizer=optimizer)
    write_trace(side, batch, path, dtype=dtype, steps=steps, samples=samples)


def compare_traces(
    first: Path,
    second: Path,
    *,
    mapping: MappingLike | None = None,
    axes: Mapping[str, int] | None = None,
    pairs: Mapping[str, str] | None = None,
    progress: Follow = None,
) -> ParityReport:
    """Compare a trace of a torch model and one of a JAX model, in any order. Neither framework is needed.

    Modules cannot run again. So a module whose inputs are still the same "introduces" its difference, and modules that
    get different inputs "inherit" theirs: after the first fault, a second one is not visible. Raises ``TraceError`` for
    a path that is no trace, for a damaged trace, and for traces that do not belong together.
    """
    sides = {side.framework: side for side in (TraceSide.read(first), TraceSide.read(second))}
    if set(sides) != {"torch", "jax"}:
        raise TraceError(
            f"{first}, {second}: expected a trace of a torch model and one of a JAX model, got two of "
            f"{', '.join(sides)}: compare checkpoints with `twinshard diff`, trainings with `twinshard curves`"
        )
    if mapping is None:
        raise ValueError("two traces: expected --mapping, which relates their parameters, got none")
    torch, jax = sides["torch"], sides["jax"]
    if torch.dtype != jax.dtype or torch.steps != jax.steps:
        raise TraceError(
            f"{torch.path}, {jax.path}: expected traces with the same compute dtype and number of steps, got "
            f"{torch.dtype} and {jax.dtype}, {torch.steps} and {jax.steps}"
        )
    if torch.samples != jax.samples:
        raise TraceError(
            f"{torch.path}, {jax.path}: expected traces with the same samples, got {_sizes(torch)} and {_sizes(jax)}; "
            "capture both with the same `samples`"
        )
    if not jax.has_float64:
        raise TraceError(f"{jax.path}: expected a run in float64, got none")
    _check_batches(torch, jax)
    table = mapping_table(mapping, axes)
    assert table is not None
    relation = WeightMap.of_sides(table, torch, jax)
    options: dict[str, Any] = {"dtype": torch.dtype, "module_pairs": pairs, "steps": torch.steps}
    with followed("parity", progress) as say:
        report = compare_sides(torch, jax, None, relation, progress=say, **options)
    return replace(report, notes=tuple(_notes(torch, jax)))


def _sizes(side: TraceSide) -> str:
    return ", ".join(f"{len(kept)} of {size}" for size, kept in side.samples.items()) or "none"


def _notes(torch: TraceSide, jax: TraceSide) -> Iterator[str]:
    if torch.samples:
        yield (
            f"compared from samples of activations ({_sizes(torch)} positions of an axis): a difference at other "
            "positions shows only in the loss and in the gradients of parameters, which are whole"
        )
    if not torch.has_float64:
        yield (
            f"torch ran in {torch.dtype} only: differences below its rounding do not show, and the floor comes from "
            "the JAX side alone"
        )
    yield from (*torch.notes, *jax.notes)


def _check_batches(torch: TraceSide, jax: TraceSide) -> None:
    """Raise ``TraceError`` if arrays of one name, or the only arrays, differ in shape or values."""
    ours, theirs = torch.batch(), jax.batch()
    if len(ours) == len(theirs) == 1:
        theirs = dict(zip(ours, theirs.values(), strict=True))
    for name in ours.keys() & theirs.keys():
        torch_array, jax_array = ours[name], theirs[name]
        if not np.array_equal(torch_array.astype(np.float64), jax_array.astype(np.float64), equal_nan=True):
            shapes = f"shapes {torch_array.shape} and {jax_array.shape}"
            what = "different values" if torch_array.shape == jax_array.shape else shapes
            raise TraceError(
                f"{torch.path}, {jax.path}: expected traces of one batch, got {what} in {name or 'its array'}; capture "
                "both sides with the same arrays"
            )
