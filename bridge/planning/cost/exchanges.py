"""Traffic of modules that are cut over a model axis in a step of ``torch_impl``: activations and their gradients.

With B T tokens of a microbatch, for ``nn.Linear`` (out, in) and ``nn.Embedding`` (vocabulary, d)::

    module                            forward                      backward
    rowwise linear                    all-reduce B T out           of whole inputs: all-gather B T in
    colwise linear, rowwise after it                               all-reduce B T in, once for modules of one input
    any other colwise linear          all-gather B T out           all-reduce B T in
    rowwise embedding                 all-reduce B T d
    colwise embedding                 all-gather B T d

A unit that recomputes repeats its forward, except the sum after the last rowwise module, which backward does not need.
Modules of one parent with equally many input features are assumed to have one input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.core.dtype_names import BYTES
from bridge.core.sharding import ShardingPolicy
from bridge.planning.cost.traffic import Calls, Collective
from bridge.planning.cost.units import outward
from bridge.planning.models.model import Model


@dataclass(frozen=True)
class _Styled:
    """A module that a style cuts; ``shape`` and ``dtype`` of its weight, as given."""

    path: str
    axis: str
    style: str
    embeds: bool
    shape: tuple[int, ...]
    dtype: str

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]


def exchanges(
    model: Model, policy: ShardingPolicy, sizes: Mapping[str, int], tokens: int, microbatches: int
) -> Calls:
    """Collectives of one step over model axes of ``sizes``. ``tokens``: of one microbatch of a data rank."""
    styled = _styled(model, policy)
    units = policy.units_of(model.modules)
    calls: Calls = Calls()
    entered: set[tuple[str, str, int]] = set()
    for number, module in enumerate(styled):
        around = [path for path in outward(module.path) if path in units]
        runs = 1 + sum(bool(units[path].recompute) for path in around)
        siblings = [other for other in styled if (other.parent, other.axis) == (module.parent, module.axis)]
        siblings = [other for other in siblings if not other.embeds]
        after = styled[number + 1 :]
        needed: list[tuple[str, int, int]] = []
        if module.embeds:
            kind = "all_gather" if module.style == "colwise" else "all_reduce"
            needed.append((kind, module.shape[1], runs))
        elif module.style == "rowwise":
            own = f"{around[0]}.".lstrip(".")
            last = not any(other.style == "rowwise" and other.path.startswith(own) for other in after)
            needed.append(("all_reduce", module.shape[0], runs - (last and bool(units[around[0]].recompute))))
            if not any(other.style == "colwise" and other not in after for other in siblings):
                needed.append(("all_gather", module.shape[1], 1))
        elif any(other.style == "rowwise" and other in after for other in siblings):
            key = module.parent, module.axis, module.shape[1]
            needed += [] if key in entered else [("all_reduce", module.shape[1], 1)]
            entered.add(key)
        else:
            needed += [("all_gather", module.shape[0], runs), ("all_reduce", module.shape[1], 1)]
        for kind, features, times in needed:
            size, dtype = sizes[module.axis], policy.precision.compute_dtype or module.dtype
            if size > 1:
                collective = Collective(kind, module.axis, size, dtype, tokens * features * BYTES[dtype])
                calls[collective] += times * microbatches
    return calls


def _styled(model: Model, policy: ShardingPolicy) -> list[_Styled]:
    """The modules in the order of definition, which is assumed to be the order of forward."""
    entries = policy.parallel_of([*model.modules, *(parameter.path for parameter in model.parameters)])
    weights = {
        parameter.module: parameter for parameter in model.parameters if parameter.path.endswith(".weight")
    }
    styled = []
    for path, matched in entries.items():
        if len(matched) == 1 and matched[0].style in ("colwise", "rowwise") and path in weights:
            weight, entry = weights[path], matched[0]
            assert entry.style is not None
            embeds = weight.kind == "embedding"
            styled.append(_Styled(path, entry.axis, entry.style, embeds, weight.shape, weight.dtype))
    return styled
