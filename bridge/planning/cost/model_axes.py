"""Which dimension of each parameter a policy cuts over which model axis, as the runtimes do.

What a style means depends on what the dimensions of a parameter are::

    kind                                          colwise         rowwise
    linear       (out, in), of PyTorch            0               1
    kernel       (in, out ...), of JAX            1               0
    convolution  (..., in, out), of JAX           last            last but one
    embedding    (vocabulary, features)           1               0
    bias         and other vectors                0               whole
    other        of PyTorch, without a style      refused         refused

"expert" cuts dimension 0 of every kind.
"""

from __future__ import annotations

from collections.abc import Mapping

from bridge.core.sharding import Cut, ParallelPolicy, PolicyError, ShardingPolicy, check_cuts
from bridge.planning.models.errors import PlanError
from bridge.planning.models.model import Model, Parameter

Cuts = Mapping[str, tuple[Cut, ...]]
"""By the path of a parameter, in the order of the mesh; without those that stay whole."""

_DIMENSIONS: dict[str, tuple[int, int | None]] = {
    "linear": (0, 1),
    "kernel": (1, 0),
    "embedding": (1, 0),
    "bias": (0, None),
}
_BY_NAME = {"weight": "linear", "bias": "bias", "embedding": "embedding"}


def cuts_of(model: Model, policy: ShardingPolicy, sizes: Mapping[str, int], runtime: str) -> Cuts:
    """What ``policy`` cuts over model axes of ``sizes``. Raises ``PlanError`` naming entry or parameter."""
    try:
        policy.check_model_axes()
        entries = policy.parallel_of([*model.modules, *(one.path for one in model.parameters)])
        found: dict[str, list[Cut]] = {}
        for path, matched in entries.items():
            for parameter in model.parameters:
                if parameter.path == path or parameter.path.startswith(f"{path}."):
                    for entry in matched:
                        _add(found, parameter, entry, path, runtime)
        order = policy.model_axes.index
        cuts = {
            path: tuple(sorted(own, key=lambda one: order(one.axis))) for path, own in found.items() if own
        }
        for parameter in model.parameters:
            check_cuts(parameter.path, parameter.shape, cuts.get(parameter.path, ()), sizes)
    except PolicyError as error:
        raise PlanError(f"model {model.name}: {error}") from error
    return cuts


def _add(
    found: dict[str, list[Cut]], parameter: Parameter, entry: ParallelPolicy, path: str, runtime: str
) -> None:
    dimension = _dimension(parameter, entry, path, runtime)
    if dimension is not None:
        # XLA makes of a plain cut what fused tensors need.
        fused = entry.fused if runtime == "torch" else ()
        found.setdefault(parameter.path, []).append(Cut(entry.axis, dimension, fused))


def _dimension(parameter: Parameter, entry: ParallelPolicy, path: str, runtime: str) -> int | None:
    """None for a parameter that stays whole."""
    ndim = len(parameter.shape)
    if entry.dimension is not None:
        # A parameter that is named itself must have the dimension.
        return entry.dimension if entry.dimension < ndim or parameter.path == path else None
    if entry.style == "expert":
        return 0
    kind = parameter.kind or _BY_NAME.get(parameter.path.rpartition(".")[2], "kernel")
    if kind == "other" and runtime == "torch":
        raise PolicyError(
            f"{parameter.path}: expected a parameter of nn.Linear or nn.Embedding for style {entry.style!r}, got one "
            "of another module; say the dimension instead of a style"
        )
    if kind == "convolution":
        return ndim - 1 if entry.style == "colwise" else ndim - 2
    colwise, rowwise = _DIMENSIONS["bias" if ndim < 2 else kind if kind in _DIMENSIONS else "kernel"]
    return colwise if entry.style == "colwise" else rowwise
