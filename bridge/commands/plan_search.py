"""The part of `twinshard plan` that searches: what fits, and the policy file for it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from bridge.commands.output import Console, print_line, print_table, print_text
from bridge.commands.plan_options import ScenarioOptions, SearchOptions, TrainingOptions
from bridge.commands.plan_pictures import write_whole
from bridge.core.sharding import ShardingPolicy
from bridge.planning.answers.comparison import Comparison
from bridge.planning.answers.search import Finding, search
from bridge.planning.answers.search_report import answers, only_file, policy_file
from bridge.planning.cost.cost import CostPlan, Workload, make_plan
from bridge.planning.cost.optimizers import Optimizer
from bridge.planning.models.errors import PlanError
from bridge.planning.models.shipped_models import SHIPPED


def check_options(options: SearchOptions, memory: str | None, target: str | None) -> None:
    """Raises ``PlanError`` for options that contradict each other."""
    searching, save = options.search, options.save
    if save is not None and not searching:
        raise PlanError("--save: expected --search, which finds the policy to save")
    if save is not None and (save.is_dir() or not save.absolute().parent.is_dir()):
        raise PlanError(f"--save: expected a file in a folder that exists, got {str(save)!r}")
    if searching and memory is None:
        raise PlanError("--search: expected --memory SIZE, the memory of one device, got none")
    if searching and target is not None:
        raise PlanError(
            "--search: expected no --target, since a search only plans; search first, and compile the policy that was "
            "found (--save FILE) with a second command"
        )


def searched(
    comparison: Comparison,
    policies: Sequence[ShardingPolicy],
    optimizer: Optimizer,
    node: int | None,
    save: Path | None,
) -> tuple[Finding, ...]:
    """Search for each policy, and ``save`` the one that fits.

    Raises ``PlanError`` if there is no policy to save, or if the options ask for several searches.
    """
    models = {plan.runtime: plan.model for plan in comparison.plans}

    def planned(runtime: str, policy: ShardingPolicy, devices: int, work: Workload) -> CostPlan:
        return make_plan(models[runtime], policy, devices, runtime, work, optimizer=optimizer)

    findings = search(comparison, policies, planned, node)
    if save is not None:
        write_whole(only_file(findings, comparison.plans[0].model.name), save)
    return findings


def options_to_repeat(scenario: ScenarioOptions, training: TrainingOptions) -> list[tuple[str, str]]:
    """The options, by name, that a command for the same answer has in addition to model, work and machine."""
    several = {"frozen": training.frozen, "stacked": training.stacked}
    changed = {
        "optimizer": training.optimizer if training.optimizer != "adamw" else None,
        "moments": training.moments,
        "offload": training.offload,
        "memory": scenario.memory,
        "reserve": scenario.reserve if scenario.reserve != "10%" else None,
    }
    return [
        *((name, value) for name, value in changed.items() if value is not None),
        *((name, value) for name, values in several.items() for value in values or ()),
    ]


def print_search(
    out: Console, findings: Sequence[Finding], model: str, saved: Path | None, told: Sequence[tuple[str, str]]
) -> None:
    """Print the answers, the changes for each policy that does not fit, and the policy file unless it was ``saved``.

    told: see `options_to_repeat`; the command that compiles has them, too.
    """
    print_line(out)
    print_table(out, *answers(findings), left=1)
    for finding in findings:
        print_line(out)
        print_line(out, finding.summary())
        if finding.ways:
            headings, *rows = finding.table()
            print_table(out, headings, rows, left=1)
            if saved is None:
                print_line(out)
                print_text(out, (policy_file(finding, model) or "").rstrip())
    print_line(out)
    if saved is not None:
        print_line(out, f"saved {saved}")
    if any(finding.fits or finding.ways for finding in findings):
        # A command to copy has no line breaks.
        print_text(out, _how_to_check(findings[0], model, saved, told))


def _how_to_check(finding: Finding, model: str, saved: Path | None, told: Sequence[tuple[str, str]]) -> str:
    if model in SHIPPED and SHIPPED[model]().causal_lm() is None:
        return f"the search only plans; {model} cannot be compiled: run one step and measure"
    work = finding.workload
    options = "".join(f"--{name} {shlex.quote(option)} " for name, option in told)
    policy = "FILE" if saved is None else shlex.quote(str(saved))
    return (
        f"the search only plans; to compile the JAX step: twinshard plan {policy} --model {shlex.quote(model)} "
        f"--batch {work.batch} --length {work.length} --microbatches {work.microbatches} {options}--target "
        f"h100:{finding.devices} (or another machine)"
    )
