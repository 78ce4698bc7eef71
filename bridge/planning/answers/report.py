"""A comparison as rows of text: an overview, or one plan unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bridge.core.sharding.policy.recompute import Recompute
from bridge.core.text import human_bytes
from bridge.planning.answers.comparison import ANSWERS, Comparison
from bridge.planning.cost.at_rest import AtRest
from bridge.planning.cost.cost import CostPlan
from bridge.planning.cost.optimizers import ADAMW
from bridge.planning.cost.traffic import KINDS, Traffic

Row = tuple[str, ...]

_HELD = ("at rest", "weights", "moments", "gradients", "compute", "padding")
_SENT = ("sent", "gathers", "scatters", "reduces")


def overview(comparison: Comparison) -> tuple[Row, list[Row]]:
    """Headings, and a row for each plan, the answer first; with several workloads, columns that name them."""
    several = len(comparison.workloads) > 1
    asked = comparison.memory is not None
    offloading = any(plan.at_rest.host for plan in comparison.plans)
    rows: list[Row] = []
    for plan in comparison.plans:
        row: Row = (ANSWERS[comparison.fits(plan)],) if asked else ()
        row += (plan.policy, plan.runtime, str(plan.mesh.devices))
        if several:
            row += (str(plan.workload.microbatches), str(plan.workload.length))
        total, *kinds = _held(plan.at_rest)
        sent, *calls = _sent(plan.traffic)
        host = (human_bytes(plan.at_rest.host),) if offloading else ()
        rows.append((*row, plan.peak_in_words, total, *host, sent, *kinds, *calls))
    first = ("fits",) if asked else ()
    work = ("microbatches", "length") if several else ()
    host = ("in CPU memory",) if offloading else ()
    held, sums = ("peak", _HELD[0], *host, _SENT[0]), (*_HELD[1:], *_SENT[1:])
    return (*first, "policy", "runtime", "devices", *work, *held, *sums), rows


def by_unit(plan: CostPlan) -> tuple[Row, list[Row]]:
    """Headings, and a row for each kind of unit, for all its units together; the last row is the total."""
    rows = [
        _unit_row(
            (unit.title, unit.kind.strategy.name + _recomputed(unit.kind.recompute)),
            (unit.numel * unit.count, unit.overhead),
            unit.at_rest.times(unit.count),
            Traffic({call: calls * unit.count for call, calls in unit.calls.items()}),
        )
        for unit in plan.units
    ]
    rows.append(_unit_row(("total", ""), (plan.numel, plan.overhead), plan.at_rest, plan.traffic))
    return ("unit", "strategy", "parameters", _HELD[0], _SENT[0], *_HELD[1:], "padded by", *_SENT[1:]), rows


def _unit_row(names: Row, size: tuple[int, float], rest: AtRest, traffic: Traffic) -> Row:
    """size: parameters, and the share of padding."""
    (total, *kinds), (sent, *calls) = _held(rest), _sent(traffic)
    return (*names, f"{size[0]:,}", total, sent, *kinds, f"{100 * size[1]:.2f} %", *calls)


def _recomputed(recompute: Recompute) -> str:
    return (
        f", recomputed but {recompute}" if isinstance(recompute, str) else ", recomputed" if recompute else ""
    )


def by_axis(plan: CostPlan) -> tuple[Row, list[Row]]:
    """Headings, and a row for each kind of collective and mesh axis."""
    rows: list[Row] = [
        (
            kind.replace("_", "-"),
            axis,
            str(size),
            str(plan.traffic.count(kind, axis)),
            human_bytes(plan.traffic.nbytes(kind, axis)),
            human_bytes(plan.traffic.wire_bytes(kind, axis)),
        )
        for axis, size in plan.mesh.all_axes.items()
        for kind in KINDS
        if plan.traffic.count(kind, axis)
    ]
    return ("collective", "axis", "ranks", "per step", "of buffers", "sent"), rows


def by_term(plan: CostPlan) -> tuple[Row, list[Row]]:
    """Headings, and a row for each term of the peak."""
    rows: list[Row] = [
        (name.replace("_", " "), human_bytes(value), f"{value:,}")
        for name, value in plan.peak.terms.items()
        if value
    ]
    total = plan.peak.total
    return ("at the peak", "", "bytes"), [*rows, ("total", human_bytes(total), f"{total:,}")]


def _held(rest: AtRest) -> Row:
    return tuple(human_bytes(value) for value in (rest.total, *rest.by_kind().values()))


def _sent(traffic: Traffic) -> Row:
    return human_bytes(traffic.wire_bytes()), *(str(traffic.count(kind)) for kind in KINDS)


def notes(comparison: Comparison) -> Sequence[str]:
    """Lines under the tables: unknown numbers, wasteful units, the cheapest policies."""
    warned = dict.fromkeys(
        f"warning: {plan.policy}: {text}" for plan in comparison.plans for text in plan.warnings()
    )
    return [*comparison.refused, *_what_is_counted(comparison), *warned, *_what_fits(comparison)]


def _what_is_counted(comparison: Comparison) -> Iterator[str]:
    """How to read the numbers: what they leave out, and which ones are upper bounds."""
    plans, first = comparison.plans, comparison.plans[0]
    if first.optimizer != ADAMW:
        yield f"optimizer: {first.optimizer}"
    if any(plan.runtime == "jax" and plan.optimizer.by_parameter for plan in plans):
        yield (
            f"jax: {first.optimizer.name} looks at shapes, so an update brings whole weights and gradients together: "
            "they are counted, but not what XLA holds and sends in addition; > marks the bytes at rest, "
            "which are always needed: compile the step with --target"
        )
    in_jax = [plan for plan in plans if plan.runtime == "jax"]
    if any(group.has_remainders for plan in in_jax for unit in plan.units for group in unit.groups):
        yield "jax: store_param_remainders has no effect, because compute weights exist only inside a step"
    if any(isinstance(unit.kind.recompute, str) for plan in plans for unit in plan.units):
        yield (
            "recompute: results of products that a unit keeps are not counted; > marks the bytes at rest, which are "
            "always needed"
        )
    if frozen := sum(parameter.numel for parameter in first.model.parameters if not parameter.trainable):
        yield (
            f"frozen: {frozen:,} parameters, without gradients and moments; activations are counted as if these were "
            "trained, which is an upper bound"
        )
    if any(not plan.model.activations for plan in plans):
        yield (
            "peak: activations are known only for built-in models, so --batch and --length have no effect here; "
            "> marks the bytes at rest, which are always needed"
        )
    for runtime in dict.fromkeys(plan.runtime for plan in plans if plan.exchanges is None):
        yield f"{runtime}: traffic over model axes (activations and their gradients) is not counted"
    if any(plan.peak_is_upper_bound and plan.mesh.model_ranks > 1 for plan in plans):
        yield "peak: counts whole activations although model axes cut some, so it is an upper bound"
    if counted := {plan.runtime: plan.model.attention for plan in plans if plan.model.attention}:
        yield (
            f"attention: {', '.join(f'{attention} in {runtime}' for runtime, attention in counted.items())}; fused "
            "keeps no scores, plain keeps them; --attention fused|plain selects one"
        )


def _what_fits(comparison: Comparison) -> Iterator[str]:
    if comparison.memory is not None and comparison.usable is not None:
        yield (
            f"fits: the peak is within {human_bytes(comparison.usable)}, that is {human_bytes(comparison.memory)} less "
            f"{float(100 * comparison.reserve):g} % of reserve (--reserve)"
        )
    for choice in comparison.choices:
        where = comparison.where(choice)
        if choice.policy is not None:
            known = all(plan.exchanges is not None for plan in comparison.plans)
            yield f"{where}: {choice.policy} is the cheapest that fits{'' if known else ', by what is counted'}"
        elif not choice.unknown:
            yield f"{where}: no policy fits{comparison.in_runtimes}"
        if choice.unknown:
            yield f"{where}: {choice.doubt}: run one step of each and measure, or compile them for JAX with --target"
