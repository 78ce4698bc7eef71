"""The `twinshard plan` command: see ``bridge.planning`` for what it computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.commands import completion
from bridge.commands.output import Console, print_failure, print_json, print_line, print_table, print_text
from bridge.commands.plan_options import (
    AttentionOption,
    BatchShapesOption,
    EfficiencyOption,
    EngineChoice,
    EngineOption,
    FrozenOption,
    LossOption,
    MomentsOption,
    OffloadOption,
    OptimizerOption,
    PriceOption,
    RuntimeChoice,
    RuntimeOption,
    SaveOption,
    SearchOption,
    TargetOption,
    TokensOption,
    XlaChoice,
    XlaOption,
)
from bridge.core.text import human_bytes

if TYPE_CHECKING:
    from bridge.planning.answers.comparison import Comparison


def plan(
    policies: Annotated[
        list[str],
        typer.Argument(
            metavar="POLICY...",
            help="Policy files, or names of shipped ones (fsdp, zero1, hsdp, ...).",
            autocompletion=completion.policies,
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="llama3-8b, llama3-70b, llama3-405b, mixtral-8x7b, deepseek-v3; a config.json of Hugging Face, or its "
            "folder; decoder:CONFIG, a TOML file with a [model] table or a relay's name; or package.module:Factory, a "
            "torch.nn or flax.nnx module.",
            autocompletion=completion.models,
        ),
    ],
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="N,...",
            help="Numbers of devices to plan for; default 8, or those of the targets.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory of one device, such as 80GB or 80GiB; asks which policies fit.",
        ),
    ] = None,
    reserve: Annotated[
        str,
        typer.Option(
            "--reserve",
            metavar="SHARE",
            help="Share of --memory that a policy must leave free, such as 10%, or 0.",
        ),
    ] = "10%",
    batch: Annotated[int, typer.Option(min=1, help="Sequences per device and microbatch.")] = 1,
    length: Annotated[
        str, typer.Option("--length", metavar="N,...", help="Numbers of tokens per sequence.")
    ] = "4096",
    microbatches: Annotated[
        str,
        typer.Option("--microbatches", "--micro", metavar="N,...", help="Numbers of microbatches per step."),
    ] = "1",
    units: Annotated[
        list[str] | None,
        typer.Option(
            "--units",
            metavar="PATTERN",
            help="The model's layers where the policies say 'layers.*', such as 'blocks.*'; may be repeated.",
        ),
    ] = None,
    node: Annotated[
        int | None,
        typer.Option(
            "--node",
            min=1,
            metavar="N",
            help="Devices of one node: the inner axis of hsdp and hfsdp, which is 2 there.",
        ),
    ] = None,
    runtime: RuntimeOption = RuntimeChoice.both,
    attention: AttentionOption = None,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Check the JAX numbers of a language model against what XLA compiles for simulated devices, without "
            "prefetch.",
        ),
    ] = False,
    target: TargetOption = None,
    engine: EngineOption = EngineChoice.shard_map,
    xla: XlaOption = XlaChoice.default,
    loss: LossOption = None,
    batch_shapes: BatchShapesOption = None,
    tokens: TokensOption = None,
    price: PriceOption = None,
    efficiency: EfficiencyOption = None,
    stacked: Annotated[
        list[str] | None,
        typer.Option(
            "--stacked",
            metavar="PATH",
            help="Modules of the JAX model whose layers are scanned, such as layers; may be repeated.",
        ),
    ] = None,
    optimizer: OptimizerOption = "adamw",
    moments: MomentsOption = None,
    offload: OffloadOption = None,
    frozen: FrozenOption = None,
    search: SearchOption = False,
    save: SaveOption = None,
    chart: Annotated[
        Path | None,
        typer.Option("--chart", metavar="FILE", help="Draw memory and traffic: .png, .svg or .pdf."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write answer, pictures and tables as one self-contained page."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Predict memory and traffic of a sharded model, without devices.

    The table shows, for every policy and number of devices, the bytes at rest by kind on the fullest device, the peak
    of a step, and the collectives of a step. One policy on one number of devices is shown unit by unit.

    With --memory, the command names the cheapest policy that fits, for each number of devices. A policy fits when its
    peak is within the memory less --reserve. The cheapest policy is the one whose devices send the fewest bytes in a
    step. A policy does not fit where the bytes at rest are above the memory. Between these and the peak, which a device
    may stay below, the answer is unknown. The exit status is 1 when no policy is known to fit.

    With --search, the command also finds the largest batch, the fewest devices, and for a policy that does not fit the
    fewest changes that make it fit, as a policy file for both runtimes. The search is by planning: nothing is compiled.

    With --target, XLA's compiler for those GPUs or TPUs compiles the step, gradients and update, from shapes alone, for
    any JAX model. The table shows what the compiled programs hold and send, whether they fit, and an estimate of the
    time of a step. Answers are kept below ~/.cache/twinshard. The compilers come with
    pip install "twinshard[gpu-compiler]" or "twinshard[tpu-compiler]".

    \b
    Example:
      twinshard plan fsdp_bf16 zero1 --model llama3-8b --devices 8,64,512 --memory 80GB
      twinshard plan hsdp --model llama3-70b --devices 64 --memory 80GB --search --save mine.toml
      twinshard plan fsdp --model llama3-8b --optimizer adafactor --frozen 'embed.*' --devices 8
      twinshard plan fsdp --model my_llama/config.json --devices 64 --attention fused
      twinshard plan my_policy.toml --model decoder:default --devices 4 --compile
      twinshard plan fsdp zero2 --model decoder:default --target h100:8,v5e:4x4 --engine both --length 64
      twinshard plan fsdp --model my.gpt:GPT --loss my.gpt:loss --batch-shapes batch.toml --target h100:64
    """
    from bridge.checkpoints.inspect.picture import PictureError
    from bridge.commands.options import explained
    from bridge.commands.plan_pictures import check_paths, write_pictures
    from bridge.commands.plan_search import check_options, print_search, searched
    from bridge.commands.plan_targets import (
        CompiledSteps,
        TargetOptions,
        check_target_options,
        compile_targets,
        describe_step,
        print_targets,
    )
    from bridge.planning.answers.comparison import compare
    from bridge.planning.answers.document import document
    from bridge.planning.answers.search_report import as_json
    from bridge.planning.cost.adapt import with_frozen, with_node, with_units
    from bridge.planning.cost.cost import Workload, load_policy
    from bridge.planning.cost.optimizers import parse_optimizer
    from bridge.planning.models.errors import PlanError
    from bridge.planning.models.formulas import Attention
    from bridge.planning.models.models import resolve_models
    from bridge.planning.models.runtimes import RUNTIMES
    from bridge.planning.models.sizes import parse_bytes, parse_counts, parse_share

    out = Console()
    try:
        check_options(search, save, memory, target)
        check_target_options(target, engine.value, compile_, runtime.value)
        limit = None if memory is None else parse_bytes(memory)
        stacks = tuple(stacked or ())
        share = parse_share(reserve)
        kind = None if attention is None else Attention(attention.value)
        works = [
            Workload(batch, of_row, micro)
            for micro in parse_counts(microbatches, "microbatches")
            for of_row in parse_counts(length, "length")
        ]
        wanted = TargetOptions.of(
            target,
            engine.value,
            loss,
            batch_shapes,
            devices,
            runtime.value,
            price,
            efficiency,
            xla is XlaChoice.recommended,
            tokens,
        )
        counts = wanted.counts if wanted else parse_counts(devices or "8")
        check_paths(chart, page)
        runtimes = ("jax",) if wanted else RUNTIMES if runtime is RuntimeChoice.both else (runtime.value,)
        trainer = parse_optimizer(optimizer, moments, offload)
        step = wanted and wanted.step(model, works, stacks, trainer, tuple(frozen or ()))
        models = {
            one: with_frozen(found, frozen or ())
            for one, found in resolve_models(model, runtimes, stacks, kind).items()
        }
        loaded = [with_units(load_policy(one), units or ()) for one in dict.fromkeys(policies)]
        loaded = with_node(loaded, node, counts)
        comparison = compare(models, loaded, counts, works, limit, share, trainer)
        findings = searched(comparison, loaded, trainer, node, save) if search else None
        checks = []
        if compile_:
            if frozen:
                raise PlanError(
                    "--compile: expected no --frozen: for simulated devices XLA keeps the gathered weights of frozen "
                    "units from forward to backward, which it does not on accelerators; use --target"
                )
            from bridge.compiling.compiled import check_compiled

            checks = [
                check_compiled(model, policy, count, work, stacks, trainer, kind)
                for policy in loaded
                for count in counts
                for work in works
            ]
        compiled = (
            wanted and step and compile_targets(wanted, step, models["jax"], loaded, limit, float(share))
        )
        steps = None
        if wanted and step and compiled:
            steps = CompiledSteps(
                model,
                describe_step(models["jax"], step),
                compiled,
                wanted.roofline(models["jax"], step),
            )
        write_pictures(chart, page, comparison, steps, findings or ())
    except (PlanError, PictureError, OSError) as error:
        print_failure(error, f"error: {explained(error)}", 2, json=json)
        raise typer.Exit(2) from None
    if json:
        found = {**document(comparison), "compiled": [check.as_dict() for check in checks]}
        found["search"] = None if findings is None else as_json(findings, model)
        if steps:
            times = [steps.roofline.estimate(row).as_dict() for row in steps.plan.rows]
            found["targets"] = steps.plan.as_dict(times)
        else:
            found["targets"] = None
        print_json(out, found)
    elif steps:
        print_targets(out, steps)
    else:
        _print(out, comparison)
        if findings is not None:
            told = [("optimizer", optimizer if optimizer != "adamw" else None), ("moments", moments)]
            told += [("memory", memory), ("reserve", reserve if reserve != "10%" else None)]
            told += [("frozen", one) for one in frozen or ()] + [("stacked", one) for one in stacked or ()]
            print_search(out, findings, model, save, [(name, one) for name, one in told if one is not None])
        for check in checks:
            print_line(out)
            print_table(out, *check.table(), left=1)
            print_text(out, check.summary())
    if compiled:
        raise typer.Exit(0 if compiled.good else 1)
    agreed = all(check.agrees for check in checks)
    fits = comparison.anything_fits or any(one.ways for one in findings or ())
    raise typer.Exit(0 if fits and agreed else 1)


def _print(out: Console, comparison: Comparison) -> None:
    from bridge.planning.answers.report import by_axis, by_term, by_unit, notes, overview

    first = comparison.plans[0]
    works = comparison.workloads
    work = (
        str(first.workload)
        if len(works) == 1
        else f"{len(works)} workloads as in the table, microbatches of {first.workload.batch}"
    )
    print_line(out, f"{first.model.name}: {first.model.numel:,} parameters; {work} a device and step")
    if len({(plan.policy, plan.mesh, plan.workload) for plan in comparison.plans}) == 1:
        for plan in comparison.plans:
            print_line(out)
            print_line(
                out,
                f"{plan.policy} on {plan.mesh.devices} devices ({plan.mesh}), {plan.runtime}: device {plan.device} "
                f"holds most, {human_bytes(plan.at_rest.total)} ({plan.at_rest.total:,} B) at rest; peak "
                f"{human_bytes(plan.peak.total)} in the {plan.peak.moment}, prefetch {plan.prefetch}",
            )
            print_table(out, *by_unit(plan), left=2)
            print_table(out, *by_axis(plan), left=2)
            print_table(out, *by_term(plan))
    print_line(out)
    headings, rows = overview(comparison)
    print_table(out, headings, rows)
    for line in notes(comparison):
        print_line(out, line)
