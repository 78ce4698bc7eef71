"""The meaning of a mesh axis's name: data parallelism, supported model parallelism, or unsupported parallelism.

Every other name means a data-parallel axis. Case does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable

TENSOR_AXES = ("tp", "tensor", "model", "mp")
EXPERT_AXES = ("ep", "expert")
MODEL_AXES = (*TENSOR_AXES, *EXPERT_AXES)
"""Axes over which ``[[parallel]]`` entries of a policy, or the model itself, cut parameters."""
REFUSED_AXES = (*("cp", "context", "sp", "seq", "sequence"), *("pp", "pipe", "pipeline", "stage"))
"""Axes of context and pipeline parallelism, which neither runtime supports."""


def is_model_axis(name: str) -> bool:
    """Whether parameters may be cut over an axis of this name."""
    return name.lower() in MODEL_AXES


def why_refused(names: Iterable[str]) -> str | None:
    """What is wrong with the first of these axes with an unsupported parallelism; None if there is none."""
    for name in names:
        if name.lower() in REFUSED_AXES:
            return (
                f"axis {name!r} is named for context or pipeline parallelism, which is not supported; expected "
                f"data-parallel axes, then model axes ({', '.join(MODEL_AXES)}). Rename the axis (for example to "
                "'dp') if the axis is data-parallel"
            )
    return None


def why_not_data_parallel(names: Iterable[object]) -> str | None:
    """What is wrong with the first of these axes that is named for model parallelism; None if there is none."""
    for name in names:
        if str(name).lower() in (*MODEL_AXES, *REFUSED_AXES):
            return (
                f"axis {name!r} is named for model parallelism, expected data-parallel axes only; this runtime would "
                "shard weights over the axis as over data ranks. Rename the axis (for example to 'dp') if the axis is "
                "data-parallel"
            )
    return None
