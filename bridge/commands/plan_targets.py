"""The part of `twinshard plan` that compiles for targets: it announces what it compiles, and shows progress."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bridge.commands.output import Console, print_line, print_table
from bridge.commands.plan_options import ScenarioOptions, TargetOptions
from bridge.compiling import target_time
from bridge.compiling.machines.targets import Target, targets_named
from bridge.compiling.target_plan import TargetPlan, Task, compile_tasks, in_order, tasks_of
from bridge.compiling.target_report import LEFT, notes, table, unrolled_layers
from bridge.compiling.target_step import BatchArray, StepRequest, load_batch_shapes
from bridge.compiling.target_time import Roofline, parse_efficiency
from bridge.compiling.timing.step_time import Efficiency
from bridge.core.sharding import ShardingPolicy
from bridge.core.sharding.policy.strategy import ENGINES
from bridge.planning.cost.cost import Workload
from bridge.planning.cost.optimizers import ADAMW, Optimizer
from bridge.planning.models.errors import PlanError
from bridge.planning.models.language_models import causal_lm_config, idle_elements, is_decoder
from bridge.planning.models.model import Model
from bridge.planning.models.sizes import parse_counts


@dataclass(frozen=True)
class CompiledSteps:
    """``described``: a step in one line."""

    model: str
    described: str
    plan: TargetPlan
    roofline: Roofline

    def as_dict(self) -> dict[str, Any]:
        """The compiled steps as JSON values, with an estimate of the time of each."""
        return self.plan.as_dict([self.roofline.estimate(row).as_dict() for row in self.plan.rows])


def check_target_options(options: TargetOptions, scenario: ScenarioOptions) -> None:
    """Raises ``PlanError`` for options that would have no effect."""
    if options.target is None and options.engine != ENGINES[0]:
        raise PlanError(
            f"--engine: expected --target NAME,... with --engine, got --engine {options.engine} alone"
        )
    if options.target is not None and scenario.compile_:
        raise PlanError(
            "--compile: expected no --target, which compiles for other machines; run one command for each"
        )
    if scenario.compile_ and scenario.runtime == "torch":
        raise PlanError("--compile: expected --runtime jax or none, since XLA compiles JAX, got torch")


@dataclass(frozen=True)
class TargetRequest:
    """The steps to compile, and the targets."""

    targets: tuple[Target, ...]
    engines: tuple[str, ...]
    loss: str | None
    batch: dict[str, BatchArray]
    price: float | None
    efficiency: Efficiency
    recommended: bool
    tokens: int | None

    @staticmethod
    def of(options: TargetOptions, scenario: ScenarioOptions) -> TargetRequest | None:
        """None without ``--target``. Raises ``PlanError`` for options that contradict each other."""
        recommended = options.xla == "recommended"
        if options.target is None:
            names = ("loss", "batch_shapes", "tokens", "price", "efficiency")
            given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
            if given := given + ["--xla"] * recommended:
                raise PlanError(
                    f"{', '.join(given)}: expected --target NAME,..., which compiles the step that these options "
                    "describe"
                )
            return None
        if scenario.runtime == "torch":
            raise PlanError("--target: expected --runtime jax or none, since XLA compiles JAX, got torch")
        targets = targets_named(options.target)
        counts = {target.devices for target in targets}
        if scenario.devices is not None and set(parse_counts(scenario.devices)) != counts:
            raise PlanError(
                f"--devices: expected none, or those of the targets, {','.join(map(str, sorted(counts)))}, got "
                f"{scenario.devices}"
            )
        return TargetRequest(
            targets,
            ENGINES if options.engine == "both" else (options.engine,),
            options.loss,
            {} if options.batch_shapes is None else load_batch_shapes(options.batch_shapes),
            options.price,
            Efficiency() if options.efficiency is None else parse_efficiency(options.efficiency),
            recommended,
            options.tokens,
        )

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of devices, each once."""
        return tuple(dict.fromkeys(target.devices for target in self.targets))

    def roofline(self, model: Model, step: StepRequest) -> Roofline:
        """The assumptions behind the times of the compiled steps."""
        work = step.workload
        rows = work.batch * work.length if step.is_language_model else self.tokens
        tokens = None if rows is None else work.microbatches * rows
        idle = idle_elements(step.model) if step.is_language_model else 0
        elements = Counter[str]()
        for parameter in model.parameters:
            elements[parameter.dtype] += parameter.numel
        dtype = max(elements, key=lambda dtype: elements[dtype], default="float32")
        return Roofline(model.numel - idle, tokens, self.price, self.efficiency, dtype)

    def step(
        self,
        model: str,
        works: Sequence[Workload],
        stacked: tuple[str, ...],
        optimizer: Optimizer,
        frozen: tuple[str, ...],
    ) -> StepRequest:
        """Raises ``PlanError`` for several workloads."""
        if len(works) > 1:
            raise PlanError(
                f"--target: expected one --length and one --microbatches, got {len(works)} workloads; run the "
                "command once for each workload"
            )
        (work,) = works
        request = StepRequest(model, work, stacked, self.loss, self.batch, optimizer, frozen)
        if request.is_language_model and self.tokens is not None:
            raise PlanError(
                f"--tokens: expected none for {model}, since --batch and --length give its tokens, got {self.tokens}"
            )
        if not request.is_language_model and self.price is not None and self.tokens is None:
            raise PlanError("--price: expected --tokens N, per device and microbatch, with --price, got none")
        # Refuses what cannot be compiled at once, rather than in each of many compilations.
        if self.loss is not None:
            request.loss_function()
        elif not is_decoder(model):
            causal_lm_config(model)
        return request


def compiled_steps(
    request: TargetRequest,
    step: StepRequest,
    model: Model,
    policies: Sequence[ShardingPolicy],
    memory: int | None,
    reserve: float,
) -> CompiledSteps:
    """Compile every policy for every target with every engine. Raises ``PlanError`` where nothing can be compiled."""
    errors = Console(stderr=True)
    tasks, refused = tasks_of(policies, request.targets, request.engines, request.recommended)
    names = ", ".join(policy.source for policy in policies)
    print_line(
        errors,
        f"compiling {len(tasks)} {'step' if len(tasks) == 1 else 'steps'} of {model.name} ({names}) for "
        f"{', '.join(target.name for target in request.targets)}, {' and '.join(request.engines)}",
    )
    if many := unrolled_layers(model):
        print_line(
            errors,
            f"{many[1]} layers of {many[0]} are compiled one by one, which takes long, for TPUs many minutes: scan "
            f"them with --stacked {many[0]}, if the model can scan",
        )
    with _progress(errors, len(tasks)) as begin:
        rows = list(
            compile_tasks(step, tasks, (memory, reserve), begin, lambda text: print_line(errors, text))
        )
    plan = in_order(rows, tasks, refused)
    return CompiledSteps(step.model, _described(model, step), plan, request.roofline(model, step))


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[Task], None]]:
    numbers = itertools.count(1)
    if not console.is_interactive:
        yield lambda task: print_line(console, f"{next(numbers)} of {total}: {task}")
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        shown = bar.add_task("", total=None)
        yield lambda task: bar.reset(shown, description=f"{next(numbers)} of {total}: {task}")


def _described(model: Model, step: StepRequest) -> str:
    work = step.workload
    batch = (
        f"{work.microbatches} x {work.batch} sequences of {work.length} tokens"
        if step.is_language_model
        else f"{work.microbatches} x ({', '.join(f'{name} {list(array.shape)}' for name, array in step.batch.items())})"
    )
    frozen = sum(parameter.numel for parameter in model.parameters if not parameter.trainable)
    parts = [f"{model.numel:,} parameters" + (f", of which {frozen:,} are frozen" if frozen else "")]
    parts += [f"{batch} per device and step"]
    parts += [f"optimizer {step.optimizer}"] if step.optimizer != ADAMW else []
    return "; ".join([*parts, "bytes of one device, as XLA compiled"])


def print_targets(out: Console, steps: CompiledSteps) -> None:
    """Print the tables and the remarks about them."""
    plan, roofline = steps.plan, steps.roofline
    print_line(out, f"{steps.model}: {steps.described}")
    print_line(out)
    print_table(out, *table(plan), left=LEFT)
    for line in notes(plan):
        print_line(out, line)
    estimates = [roofline.estimate(row) for row in plan.rows]
    if any(estimate.time for estimate in estimates):
        print_line(out)
        print_table(out, *target_time.table(estimates, roofline.price is not None), left=target_time.LEFT)
    for line in target_time.notes(roofline, estimates):
        print_line(out, line)
