"""The `twinshard plan` command: see ``bridge.planning`` for what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bridge.commands import completion
from bridge.commands.option_groups import grouped_options
from bridge.commands.options import ExampleOption, JsonOption, user_errors
from bridge.commands.output import Console, print_json, print_line, print_table
from bridge.commands.plan_options import (
    PictureOptions,
    ScenarioOptions,
    SearchOptions,
    TargetOptions,
    TrainingOptions,
)
from bridge.core.text import human_bytes

if TYPE_CHECKING:
    from bridge.planning.answers.comparison import Comparison


@grouped_options
def plan(
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="POLICY...",
            help="Policy files, or names of shipped ones (fsdp, zero1, hsdp, ...).",
            autocompletion=completion.policies,
        ),
    ],
    scenario: ScenarioOptions,
    target: TargetOptions,
    training: TrainingOptions,
    search: SearchOptions,
    pictures: PictureOptions,
    json: JsonOption = False,
    example: ExampleOption = None,
) -> None:
    """Predict memory and traffic of a sharded model, without devices.

    The table shows, for every policy and number of devices, the bytes at rest by kind on the fullest device, the peak
    of a step, and the collectives of a step. One policy on one number of devices is shown unit by unit.

    With --memory, the command names the cheapest policy that fits, for each number of devices. A policy fits when its
    peak is within the memory less --reserve. The cheapest policy is the one whose devices send the fewest bytes in a
    step. A policy does not fit if its bytes at rest exceed the memory. If only the peak exceeds it, the answer is
    unknown, because a device may stay below the peak. The exit status is 1 when no policy is known to fit.

    With --search, the command also finds the largest batch, the fewest devices, and for a policy that does not fit the
    fewest changes that make it fit, as a policy file for both runtimes. The search only plans: it compiles nothing.

    With --target, XLA's compiler for those GPUs or TPUs compiles the step, gradients and update, from shapes alone, for
    any JAX model. The table shows what the compiled programs hold and send, whether they fit, and an estimate of the
    time of a step. Answers are kept below ~/.cache/twinshard. `make compilers`
    installs the compilers in a clone; the error of a missing compiler has the commands for pip.

    \b
    Example:
      twinshard plan --example policies
      twinshard plan fsdp_bf16 zero1 --model llama3-8b --devices 8,64,512 \\
        --memory 80GB
      twinshard plan hsdp --model llama3-70b --devices 64 --memory 80GB \\
        --search --save mine.toml
      twinshard plan fsdp --model llama3-8b --optimizer adafactor --devices 8 \\
        --frozen 'embed.*'
      twinshard plan fsdp --model llama/config.json --devices 64 --attention fused
      twinshard plan my_policy.toml --model decoder:default --devices 4 --compile
      twinshard plan fsdp zero2 --model decoder:default --target h100:8,v5e:4x4 \\
        --engine both --length 64
      twinshard plan fsdp --model my.gpt:GPT --loss my.gpt:loss \\
        --batch-shapes batch.toml --target h100:64
    """
    from bridge.checkpoints.inspect.chart import PictureError
    from bridge.commands.plan_answer import answer
    from bridge.commands.plan_pictures import check_paths, write_pictures
    from bridge.commands.plan_search import options_to_repeat, print_search
    from bridge.commands.plan_targets import print_targets
    from bridge.planning.models.errors import PlanError

    out = Console()
    with user_errors(PlanError, PictureError, json=json):
        check_paths(pictures)
        result = answer(policies, scenario, target, training, search)
        write_pictures(pictures, result.comparison, result.steps, result.findings or ())
    if json:
        print_json(out, result.document(scenario.model))
    elif result.steps is not None:
        print_targets(out, result.steps)
    else:
        _print(out, result.comparison)
        if result.findings is not None:
            told = options_to_repeat(scenario, training)
            print_search(out, result.findings, scenario.model, search.save, told)
        for check in result.checks:
            print_line(out)
            print_table(out, *check.table(), left=2)
            print_line(out, check.summary())
    raise typer.Exit(0 if result.good else 1)


def _print(out: Console, comparison: Comparison) -> None:
    from bridge.planning.answers.report import by_axis, by_term, by_unit, notes, overview

    first = comparison.plans[0]
    works = comparison.workloads
    work = first.workload.of(first.model)
    if len(works) > 1:
        batch = f", microbatches of {first.workload.batch}" if first.model.activations else ""
        work = f"{len(works)} workloads as in the table{batch}"
    print_line(out, f"{first.model.name}: {first.model.numel:,} parameters; {work} per device and step")
    if len({(plan.policy, plan.mesh, plan.workload) for plan in comparison.plans}) == 1:
        for plan in comparison.plans:
            print_line(out)
            print_line(
                out,
                f"{plan.policy} on {plan.mesh.devices} devices ({plan.mesh}), {plan.runtime}: device {plan.device} "
                f"holds the most, {human_bytes(plan.at_rest.total)} ({plan.at_rest.total:,} B) at rest; peak "
                f"{human_bytes(plan.peak.total)} in the {plan.peak.moment}, prefetch {plan.prefetch}",
            )
            print_table(out, *by_unit(plan), left=2)
            print_table(out, *by_axis(plan), left=2)
            print_table(out, *by_term(plan))
    print_line(out)
    headings, rows = overview(comparison)
    print_table(out, headings, rows, left=headings.index("devices"))
    for line in notes(comparison):
        print_line(out, line)
