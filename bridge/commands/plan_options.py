"""Options of `twinshard plan` that stand for questions of their own: targets, search, optimizers, runtimes."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bridge.commands import completion


class RuntimeChoice(StrEnum):
    """The runtimes to plan for."""

    both = "both"
    torch = "torch"
    jax = "jax"


class AttentionChoice(StrEnum):
    """The kinds of attention to count."""

    plain = "plain"
    fused = "fused"


class EngineChoice(StrEnum):
    """The engines to compile."""

    both = "both"
    shard_map = "shard_map"
    pjit = "pjit"


class XlaChoice(StrEnum):
    """How XLA's GPU compiler schedules."""

    default = "default"
    recommended = "recommended"


SearchOption = Annotated[
    bool,
    typer.Option(
        "--search",
        help="With --memory: find the largest batch, the fewest devices, and the fewest changes of each policy that "
        "make it fit (recomputation, bfloat16, strategy, inner mesh axis), fewest bytes sent first.",
    ),
]
SaveOption = Annotated[
    Path | None,
    typer.Option(
        "--save", metavar="FILE", help="For --search: write the policy that fits as a file for both runtimes."
    ),
]
OptimizerOption = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        help="adamw, sgd, sgd-momentum, lion, adafactor or muon. A runtime that cannot run it is left out.",
        autocompletion=completion.optimizers,
    ),
]
MomentsOption = Annotated[
    str | None,
    typer.Option(
        "--moments",
        metavar="DTYPE[,DTYPE]",
        help="Dtypes of the first and second moment: float32, bfloat16, float16, float8_e4m3fn or "
        "float8_e5m2.",
    ),
]
OffloadOption = Annotated[
    str | None,
    typer.Option(
        "--offload",
        metavar="SHARE",
        help="Share of the optimizer's state in CPU memory, such as 50%.",
    ),
]
FrozenOption = Annotated[
    list[str] | None,
    typer.Option(
        "--frozen",
        metavar="PATTERN",
        help="Parameters that are not trained, such as 'embed.*' or '*.norm.*'; may be repeated.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME,...",
        help="Compile the whole JAX step by XLA's own compiler for GPUs a100|h100|h200|b200:N or TPUs "
        "v4|v5e|v5p|v6e:AxB[xC], such as h100:64,v5e:4x4; no device is needed.",
    ),
]
EngineOption = Annotated[
    EngineChoice, typer.Option("--engine", help="Engine of the JAX step that --target compiles.")
]
XlaOption = Annotated[
    XlaChoice,
    typer.Option(
        "--xla",
        help="For --target: XLA's own options, or also those by which its GPU scheduler moves transfers during "
        "computation, which are off by default.",
    ),
]
LossOption = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="PATH",
        help="For --target and a model of your own: package.module:function of the model and a batch.",
    ),
]
BatchShapesOption = Annotated[
    Path | None,
    typer.Option(
        "--batch-shapes",
        metavar="FILE",
        help='For --loss: a TOML file with a line such as tokens = { shape = [2, 1025], dtype = "int32" } for each '
        "array of the batch, rows of a device and microbatch first.",
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=1,
        metavar="N",
        help="For --batch-shapes: tokens, or examples, of a device and microbatch, for tokens/s, cost and MFU, "
        "which counts all parameters.",
    ),
]
PriceOption = Annotated[
    float | None,
    typer.Option(
        "--price",
        min=0.0,
        metavar="DOLLARS",
        help="For --target: dollars of a device-hour; adds a cost of tokens.",
    ),
]
EfficiencyOption = Annotated[
    str | None,
    typer.Option(
        "--efficiency",
        metavar="PARTS",
        help="For --target: parts of the peaks that a step reaches; default products=0.75,memory=0.8,links=0.8.",
    ),
]
AttentionOption = Annotated[
    AttentionChoice | None,
    typer.Option(
        "--attention",
        help="Attention to count in models planned by shape; default what runs: fused in PyTorch (Hugging Face's), "
        "plain in JAX (CausalLM's).",
    ),
]
RuntimeOption = Annotated[RuntimeChoice, typer.Option("--runtime", help="Runtime to plan for.")]
