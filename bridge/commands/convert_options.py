"""Options of `twinshard convert`: what is converted and copied, and how the conversion runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from bridge.commands import completion
from bridge.commands.options import ExampleOption, ItemOptions, SelectionOptions


@dataclass(frozen=True)
class ContentOptions(SelectionOptions):
    """Which tensors and files of the source go into the destination, and in which dtypes."""

    select: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Only these names of SRC, such as 'model.*'; repeatable."),
    ] = None
    drop: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Leave out these names of SRC; repeatable.")
    ] = None
    cast: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=DTYPE",
            help="Round tensors with these names, such as '*=bf16', but no step counts; repeatable.",
            autocompletion=completion.casts,
        ),
    ] = None
    verify: Annotated[
        bool,
        typer.Option(
            "--verify/--no-verify",
            help="Check SRC against its manifest and its format's checksums while reading; otherwise "
            "damage in SRC is copied into DST, and DST's new checksums confirm it.",
        ),
    ] = True
    salvage: Annotated[
        bool,
        typer.Option(
            "--salvage",
            help="Leave out what is damaged in SRC, and name it; the exit status is 1 if anything is.",
        ),
    ] = False
    companions: Annotated[
        bool,
        typer.Option(
            "--companions/--no-companions",
            help="Copy config.json, tokenizer files and similar files next to SRC into DST.",
        ),
    ] = True
    like: Annotated[
        str | None,
        typer.Option(
            "--like",
            metavar="TEMPLATE",
            help="A new checkpoint of the program that will restore DST: DST gets exactly its tree.",
        ),
    ] = None


@dataclass(frozen=True)
class RunOptions(ItemOptions):
    """Which items are read and written, and how the conversion runs."""

    write_item: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Write the values below this key as a separate Orbax item; repeatable, or NAME,NAME.",
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written, and stop.")] = False
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="Restore the result by its stock library, take one step by stock optimizers from source and result, "
            "and compare; the exit status is 1 if the steps differ or cannot be taken.",
        ),
    ] = False
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the checkpoint at DST once the new one is complete.")
    ] = False
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the same conversion after it was killed; keep the finished work if interrupted.",
        ),
    ] = False
    parents: Annotated[
        bool,
        typer.Option(
            "--parents", help="Create missing directories above DST without asking, as mkdir -p does."
        ),
    ] = False
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Threads; each takes 64 MiB of memory; default: one per core, at most 4."),
    ] = None
    example: ExampleOption = None
