"""Which dimension of each parameter a policy cuts over which model axis, by the rules of the runtimes."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.core.sharding import Cut, ParallelPolicy, PolicyError, ShardingPolicy, check_cuts
from bridge.core.sharding.policy.parallel import FEATURE_STYLES, styled_dimension
from bridge.planning.models.errors import PlanError
from bridge.planning.models.model import Model, Parameter

Cuts = Mapping[str, tuple[Cut, ...]]
"""By the path of a parameter, in the order of the mesh; without whole parameters."""

_BY_NAME = {"weight": "linear", "bias": "bias", "embedding": "embedding"}


def cuts_of(model: Model, policy: ShardingPolicy, sizes: Mapping[str, int], runtime: str) -> Cuts:
    """The cuts of ``policy`` over model axes of ``sizes``. Raises ``PlanError`` that names the entry or parameter."""
    try:
        policy.check_model_axes()
        entries = policy.parallel_of([*model.modules, *(parameter.path for parameter in model.parameters)])
        by_path: dict[str, list[Cut]] = {}
        for path, matched in entries.items():
            for parameter in model.parameters:
                if parameter.path == path or parameter.path.startswith(f"{path}."):
                    for entry in matched:
                        _add(by_path, parameter, entry, path, runtime)
        order = policy.model_axes.index
        cuts = {
            path: tuple(sorted(own, key=lambda cut: order(cut.axis))) for path, own in by_path.items() if own
        }
        for parameter in model.parameters:
            check_cuts(parameter.path, parameter.shape, cuts.get(parameter.path, ()), sizes)
    except PolicyError as error:
        raise PlanError(f"model {model.name}: {error}") from error
    return cuts


def _add(
    by_path: dict[str, list[Cut]], parameter: Parameter, entry: ParallelPolicy, path: str, runtime: str
) -> None:
    dimension = _dimension(parameter, entry, path, runtime)
    if dimension is not None:
        # From a plain cut, XLA derives what fused tensors need.
        fused = entry.fused if runtime == "torch" else ()
        by_path.setdefault(parameter.path, []).append(Cut(entry.axis, dimension, fused))


def _dimension(parameter: Parameter, entry: ParallelPolicy, path: str, runtime: str) -> int | None:
    """None for a parameter that stays whole."""
    ndim = len(parameter.shape)
    if entry.dimension is not None:
        # A parameter that the entry names itself must have the dimension.
        return entry.dimension if entry.dimension < ndim or parameter.path == path else None
    assert entry.style is not None
    kind = parameter.kind or _BY_NAME.get(parameter.path.rpartition(".")[2], "kernel")
    if kind == "other" and runtime == "torch" and entry.style in FEATURE_STYLES:
        raise PolicyError(
            f"{parameter.path}: expected a parameter of nn.Linear or nn.Embedding for style {entry.style!r}, got a "
            "parameter of another module; give a dimension instead of a style"
        )
    return styled_dimension(entry.style, "kernel" if kind == "other" else kind, ndim)
