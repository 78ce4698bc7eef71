"""Names of mesh axes that speak of model parallelism; both runtimes shard over data-parallel axes only."""

from __future__ import annotations

from collections.abc import Iterable

MODEL_AXES = (
    *("tp", "tensor", "model", "mp"),
    *("ep", "expert"),
    *("cp", "context", "sp", "seq", "sequence"),
    *("pp", "pipe", "pipeline", "stage"),
)


def why_not_data_parallel(names: Iterable[object]) -> str | None:
    """What is wrong with the first of these axes that is named for model parallelism; None if none of them is."""
    for name in names:
        if str(name).lower() in MODEL_AXES:
            return (
                f"axis {name!r} is named for model parallelism, expected data-parallel axes only; this runtime would "
                "shard weights over the axis as over data ranks. Rename the axis (for example to 'dp') if the axis is "
                "data-parallel"
            )
    return None
