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
