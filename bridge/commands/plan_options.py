"""Options of `twinshard plan`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from bridge.commands import completion


@dataclass(frozen=True)
class ScenarioOptions:
    """The model, the devices, the work of a step, and which numbers are wanted."""

    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="llama3-8b, llama3-70b, llama3-405b, mixtral-8x7b, deepseek-v3; a config.json of "
            "Hugging Face, or its folder; decoder:CONFIG, a TOML file with a [model] table or a "
            "relay's name; or package.module:Factory, a torch.nn or flax.nnx module.",
            autocompletion=completion.models,
        ),
    ]
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="N,...", help="Numbers of devices to plan for; default 8, or those of the targets."
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of one device, such as 80GB or 80GiB; shows which policies fit."
        ),
    ] = None
    reserve: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="Share of --memory that a policy must leave free, such as 10%, or 0."
        ),
    ] = "10%"
    batch: Annotated[int, typer.Option(min=1, help="Sequences per device and microbatch.")] = 1
    length: Annotated[str, typer.Option(metavar="N,...", help="Numbers of tokens per sequence.")] = "4096"
    microbatches: Annotated[
        str,
        typer.Option("--microbatches", "--micro", metavar="N,...", help="Numbers of microbatches per step."),
    ] = "1"
    units: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Names of the model's layers, such as 'blocks.*', for 'layers.*' in policies; may be repeated.",
        ),
    ] = None
    node: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Devices of one node: the size of the inner axis of hsdp and hfsdp, by default 2.",
        ),
    ] = None
    runtime: Annotated[Literal["both", "torch", "jax"], typer.Option(help="Runtime to plan for.")] = "both"
    attention: Annotated[
        Literal["plain", "fused"] | None,
        typer.Option(
            help="Attention to count in models planned by shape; default: fused in PyTorch (as in "
            "Hugging Face's models), plain in JAX (as in CausalLM)."
        ),
    ] = None
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Check the JAX numbers of a language model against what XLA compiles for "
            "simulated devices, without prefetch.",
        ),
    ] = False


@dataclass(frozen=True)
class TargetOptions:
    """The machines to compile for, and the step that is compiled."""

    target: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Compile the whole JAX step with XLA's own compiler for GPUs a100|h100|h200|b200:N "
            "or TPUs v4|v5e|v5p|v6e:AxB[xC], such as h100:64,v5e:4x4; no device is needed.",
        ),
    ] = None
    engine: Annotated[
        Literal["both", "shard_map", "pjit"],
        typer.Option(help="Engine of the JAX step that --target compiles."),
    ] = "shard_map"
    xla: Annotated[
        Literal["default", "recommended"],
        typer.Option(
            help="For --target: XLA's default options, or also the options that let its GPU scheduler "
            "overlap transfers with computation."
        ),
    ] = "default"
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="For --target and your own model: package.module:function, called with the model and a batch.",
        ),
    ] = None
    batch_shapes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="For --loss: a TOML file with a line such as tokens = { shape = [2, 1025], dtype "
            '= "int32" } for each array of the batch; the first dimension holds the rows of a device and microbatch.',
        ),
    ] = None
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="For --batch-shapes: tokens, or examples, per device and microbatch, for "
            "tokens/s, cost and MFU, which counts all parameters.",
        ),
    ] = None
    price: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="DOLLARS", help="For --target: dollars per device-hour; adds the cost of tokens."
        ),
    ] = None
    efficiency: Annotated[
        str | None,
        typer.Option(
            metavar="PARTS",
            help="For --target: fractions of the hardware peaks that a step reaches; default "
            "products=0.75,memory=0.8,links=0.8.",
        ),
    ] = None


@dataclass(frozen=True)
class TrainingOptions:
    """The trained parameters, and the optimizer."""

    stacked: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Modules of the JAX model whose layers are scanned, such as layers; may be repeated.",
        ),
    ] = None
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="adamw, sgd, sgd-momentum, lion, adafactor or muon. A runtime that cannot run it "
            "is left out.",
            autocompletion=completion.optimizers,
        ),
    ] = "adamw"
    moments: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE[,DTYPE]",
            help="Dtypes of the first and second moment: float32, bfloat16, float16, float8_e4m3fn "
            "or float8_e5m2.",
        ),
    ] = None
    offload: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Share of the optimizer state in CPU memory, such as 50%."),
    ] = None
    frozen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Parameters that are not trained, such as 'embed.*' or '*.norm.*'; may be repeated.",
        ),
    ] = None


@dataclass(frozen=True)
class SearchOptions:
    """The search for what fits."""

    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="With --memory: find the largest batch, the fewest devices, and the fewest "
            "changes of each policy that make it fit (recomputation, bfloat16, strategy, inner "
            "mesh axis), fewest bytes sent first.",
        ),
    ] = False
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="For --search: write the policy that fits as a file for both runtimes."
        ),
    ] = None


@dataclass(frozen=True)
class PictureOptions:
    """Files to draw into."""

    chart: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw memory and traffic: .png, .svg or .pdf.")
    ] = None
    page: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write answer, pictures and tables as one self-contained page."
        ),
    ] = None
