"""The `twinshard relay` command: see ``bridge.relay.relay`` for what runs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bridge.commands import completion
from bridge.commands.options import ExampleOption, JsonOption, user_errors
from bridge.commands.output import Console, print_json, print_line, print_table, print_text


def relay(
    config: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            help="A built-in relay (default, bfloat16, float8, quick) or a TOML file.",
            autocompletion=completion.relays,
        ),
    ] = "default",
    out: Annotated[
        Path | None, typer.Option(help="Run folder to create; default: runs/relay-<time>.")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Repeat the fp32 reference this often with other rounding: the losses must stay in its band."
        ),
    ] = None,
    json: JsonOption = False,
    example: ExampleOption = None,
) -> None:
    """Train one model in PyTorch and JAX in turns.

    The checkpoint is converted between the legs. Every step is compared with a run that never changes frameworks.

    \b
    Example:
      twinshard relay --example hop
      twinshard relay --out runs/first
    """
    from bridge.core.extras import why_no_pictures
    from bridge.relay.config import ConfigError, RelayConfig
    from bridge.relay.relay import RelayError, run

    folder = out or Path("runs") / time.strftime("relay-%Y%m%d-%H%M%S")
    with user_errors(ConfigError, RelayError, json=json):
        loaded = RelayConfig.load(config)
        loaded = loaded if repeats is None else replace(loaded, repeats=repeats)
        report = run(loaded, folder, Console(stderr=True))
    console = Console()
    if json:
        print_json(console, report.as_dict())
    else:
        heading, *rows = report.table()
        print_table(console, heading, rows)
        print_text(console, report.summary(), wrap=True)
        picture = why_no_pictures() or f"picture {folder / 'relay.png'}"
        print_line(console, f"report {folder / 'report.json'}; {picture}")
    for failure in report.failures():
        print_line(Console(stderr=True), f"failed: {failure}")
    if not report.failures() and not json:
        print_line(console, "Every promise of the relay held.")
    raise typer.Exit(1 if report.failures() else 0)
