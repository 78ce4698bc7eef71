"""Options of `twinshard plan` that stand for questions of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    ),
]
MomentsOption = Annotated[
    str | None,
    typer.Option(
        "--moments",
        metavar="DTYPE[,DTYPE]",
        help="Dtypes of the first and second moment: float32, bfloat16, float16 or float8_e4m3fn.",
    ),
]
OffloadOption = Annotated[
    str | None,
    typer.Option(
        "--offload",
        metavar="SHARE",
        help="Share of the optimizer's state in CPU memory, such as 50%; with JAX 100% or none.",
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
