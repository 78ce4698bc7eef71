"""The answer of `twinshard plan`: a comparison, with a search and compiled steps on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.commands.plan_options import ScenarioOptions, SearchOptions, TargetOptions, TrainingOptions
from bridge.commands.plan_search import check_options, searched
from bridge.commands.plan_targets import CompiledSteps, TargetRequest, check_target_options, compiled_steps
from bridge.planning.answers.comparison import Comparison, compare
from bridge.planning.answers.document import document
from bridge.planning.answers.search import Finding
from bridge.planning.answers.search_report import as_json
from bridge.planning.cost.adapt import with_frozen, with_node, with_units
from bridge.planning.cost.cost import Workload, load_policy
from bridge.planning.cost.optimizers import parse_optimizer
from bridge.planning.models.errors import PlanError
from bridge.planning.models.formulas import Attention
from bridge.planning.models.models import resolve_models
from bridge.planning.models.runtimes import RUNTIMES
from bridge.planning.models.sizes import parse_bytes, parse_counts, parse_share

if TYPE_CHECKING:
    from bridge.compiling.compiled import CompiledCheck


@dataclass(frozen=True)
class PlanAnswer:
    """The plans, and the results of other requests.

    findings: of a search; None without a search. checks: of steps compiled for simulated devices. steps: compiled
    for absent machines.
    """

    comparison: Comparison
    findings: Sequence[Finding] | None
    checks: Sequence[CompiledCheck]
    steps: CompiledSteps | None

    @property
    def good(self) -> bool:
        """Whether something fits, and the steps compiled for simulated devices agree."""
        if self.steps is not None:
            return self.steps.plan.good
        fits = self.comparison.anything_fits or any(finding.ways for finding in self.findings or ())
        return fits and all(check.agrees for check in self.checks)

    def document(self, model: str) -> dict[str, Any]:
        """The answer for machines. ``model``: its name in policy files that a search makes."""
        return {
            **document(self.comparison),
            "compiled": self.checks,
            "search": None if self.findings is None else as_json(self.findings, model),
            "targets": None if self.steps is None else self.steps.as_dict(),
        }


def answer(
    policies: Sequence[str],
    scenario: ScenarioOptions,
    target: TargetOptions,
    training: TrainingOptions,
    search: SearchOptions,
) -> PlanAnswer:
    """Plan, search and compile, as asked. Raises ``PlanError`` for options that have no answer, OSError for files."""
    check_options(search, scenario.memory, target.target)
    check_target_options(target, scenario)
    memory = None if scenario.memory is None else parse_bytes(scenario.memory)
    reserve = parse_share(scenario.reserve)
    attention = None if scenario.attention is None else Attention(scenario.attention)
    works = [
        Workload(scenario.batch, length, microbatches)
        for microbatches in parse_counts(scenario.microbatches, "microbatches")
        for length in parse_counts(scenario.length, "length")
    ]
    request = TargetRequest.of(target, scenario)
    counts = request.counts if request else parse_counts(scenario.devices or "8")
    optimizer = parse_optimizer(training.optimizer, training.moments, training.offload)
    stacked, frozen = tuple(training.stacked or ()), tuple(training.frozen or ())
    step = request.step(scenario.model, works, stacked, optimizer, frozen) if request else None
    runtimes = RUNTIMES if scenario.runtime == "both" else (scenario.runtime,)
    whole = resolve_models(scenario.model, ("jax",) if request else runtimes, stacked, attention)
    models = {runtime: with_frozen(model, frozen) for runtime, model in whole.items()}
    named = [load_policy(policy) for policy in dict.fromkeys(policies)]
    loaded = with_node([with_units(policy, scenario.units or ()) for policy in named], scenario.node, counts)
    comparison = compare(models, loaded, counts, works, memory, reserve, optimizer)
    findings = searched(comparison, loaded, optimizer, scenario.node, search.save) if search.search else None
    checks = []
    if scenario.compile_:
        if frozen:
            raise PlanError(
                "--compile: expected no --frozen: for simulated devices XLA keeps the gathered weights of frozen "
                "units from forward to backward, but not on accelerators; use --target"
            )
        from bridge.compiling.compiled import check_compiled

        checks = [
            check_compiled(scenario.model, policy, count, work, stacked, optimizer, attention)
            for policy in loaded
            for count in counts
            for work in works
        ]
    steps = None
    if request and step:
        steps = compiled_steps(request, step, models["jax"], loaded, memory, float(reserve))
    return PlanAnswer(comparison, findings, checks, steps)
