"""Options that several commands share, and how commands report errors."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bridge.commands import completion
from bridge.commands.output import Console, print_failure, print_json, print_text
from bridge.core.text import first_of

if TYPE_CHECKING:
    from bridge.checkpoints.ground.selection import Selection

SHOWN = 20
"""Rows shown of a listing that may be long."""

_SIZE_DIGITS = 18  # Sizes and steps stay below 2^63.

MappingOption = Annotated[
    str | None,
    typer.Option(
        "--mapping",
        metavar="NAME|FILE",
        help="A shipped family (decoder, llama, ...; see twinshard families) or a TOML file.",
        autocompletion=completion.families,
    ),
]
AxisOption = Annotated[
    list[str] | None,
    typer.Option(
        "--axis",
        metavar="NAME=SIZE",
        help="Size of a mapping's axis; repeatable.",
        autocompletion=completion.axes,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def _write_example(context: typer.Context, folder: Path | None) -> None:
    """Write the example of the command, say what to run next, and end. Proposals of the shell write nothing."""
    if folder is None or context.resilient_parsing:
        return
    from bridge.examples.write import write_example

    # Not parsed yet, because --example comes before missing arguments are noticed.
    json = "--json" in sys.argv[1:]
    own = {str(context.info_name), "--json", "--example", str(folder), f"--example={folder}"}
    if others := [word for word in sys.argv[1:] if word not in own]:
        raise typer.BadParameter(f"expected a folder and no other arguments, got {' '.join(others)}")
    with user_errors(json=json):
        text = write_example(str(context.info_name), folder)
    if json:
        print_json(Console(), {"example": {"folder": str(folder), "text": text}})
    else:
        print_text(Console(), text.rstrip())
    raise typer.Exit()


ExampleOption = Annotated[
    Path | None,
    typer.Option(
        "--example",
        metavar="DIR",
        is_eager=True,
        callback=_write_example,
        help="Write a small example that runs into this new folder, say what to run next, and stop.",
    ),
]


@dataclass(frozen=True)
class MappingOptions:
    """How the first checkpoint's names, layouts and numbers are translated."""

    mapping: MappingOption = None
    into: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The mapping's convention to translate to, if several fit.",
            autocompletion=completion.conventions,
        ),
    ] = None
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="The mapping's convention of the first checkpoint, if several fit.",
            autocompletion=completion.conventions,
        ),
    ] = None
    axis: AxisOption = None
    tied: Annotated[
        Literal["once", "both"] | None,
        typer.Option(
            help="Store a weight with two names once, or under both; default: as in the first checkpoint."
        ),
    ] = None
    any_model: Annotated[
        bool,
        typer.Option(
            "--any-model", help="Use the mapping even if its rules are not for the model in config.json."
        ),
    ] = False
    optimizer_order: Annotated[
        str | None,
        typer.Option(
            metavar="model|FILE",
            help="The weights behind torch's parameter numbers in an optimizer state: the model's "
            "order in each group, or the names in a text file, one per line.",
        ),
    ] = None
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize",
            help="Read MXFP4 weights (GPT-OSS) and float8 weights with block scales (DeepSeek-V3) "
            "of the first checkpoint as the bfloat16 numbers that they encode.",
        ),
    ] = False
    merge_adapter: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Merge this LoRA or DoRA adapter, as peft saves it, into the weights of the first checkpoint.",
        ),
    ] = None

    def arguments(self, *, found: bool = False) -> dict[str, Any]:
        """These options as arguments of `bridge.convert` and `bridge.diff`.

        found: a mapping is found for the source if none is named. Raises a usage error for wrong sizes, and for an
        option that needs a mapping if there is no mapping.
        """
        axes = axis_sizes(self.axis, self.mapping, found=found)
        if self.mapping is None and not found:
            self._require_none()
        arguments = {**vars(self), "axes": axes}
        del arguments["axis"]
        return arguments

    def _require_none(self) -> None:
        for option, value in (("--into", self.into), ("--from", self.from_), ("--tied", self.tied)):
            if value is not None:
                raise typer.BadParameter(f"{option} needs --mapping: it takes names from the mapping")
        if self.optimizer_order is not None:
            raise typer.BadParameter(
                "--optimizer-order needs --mapping: without a mapping, optimizer states keep their numbers"
            )
        if self.any_model:
            raise typer.BadParameter("--any-model needs --mapping: only a mapping is limited to some models")


@dataclass(frozen=True)
class SelectionOptions:
    """Which tensors to use. Each command's own help texts say which checkpoint they are selected from."""

    select: list[str] | None
    drop: list[str] | None
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out optimizer and training state.")
    ] = False

    def selection(self) -> Selection:
        from bridge.checkpoints.ground.selection import Selection

        return Selection(tuple(self.select or ()), tuple(self.drop or ()), self.weights_only)


@dataclass(frozen=True)
class ItemOptions:
    """Which of several checkpoints in a directory to use."""

    item: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Items of an Orbax step to read as one tree, if there are several; repeatable, or NAME,NAME.",
        ),
    ] = None
    step: Annotated[
        str | None, typer.Option(metavar="N|latest", help="The step to take from a directory of steps.")
    ] = None

    @property
    def items(self) -> tuple[str, ...]:
        return item_names(self.item)

    def step_number(self) -> int | Literal["latest"] | None:
        """The step that ``--step`` names. Other texts are usage errors."""
        if self.step is None:
            return None
        if self.step == "latest":
            return "latest"
        if not (self.step.isascii() and self.step.isdecimal() and len(self.step) <= _SIZE_DIGITS):
            raise typer.BadParameter(f"expected --step with a number, or latest, got {self.step[:80]!r}")
        return int(self.step)


@contextmanager
def user_errors(*kinds: type[Exception], json: bool = False) -> Iterator[None]:
    """Turn the errors a user can cause into one message and exit status 2; `main` ends with 2 for others, too.

    json: the message is also a document on standard output.
    """
    from bridge.core.formats.tensors.base import CheckpointError

    expected: tuple[type[Exception], ...] = (CheckpointError, OSError, *kinds)
    try:
        yield
    except expected as error:
        print_failure(error, f"error: {explained(error)}", 2, json=json)
        raise typer.Exit(2) from None


def explained(error: Exception) -> str:
    """The error's message; for an error of the operating system, the file and the reason."""
    if isinstance(error, OSError) and error.strerror and str(error).startswith("[Errno"):
        names = " and ".join(
            repr(str(name)) for name in (error.filename, error.filename2) if name is not None
        )
        if not names and error.errno == errno.ENOENT:
            return "the working directory no longer exists: change to another one"
        return f"{names or 'a file'}: {error.strerror}"
    return str(error)


def some(names: Sequence[str], most: int = SHOWN) -> str:
    """`first_of`, with the number of names that a command shows."""
    return first_of(names, most)


def item_names(options: list[str] | None) -> tuple[str, ...]:
    """The names in options that may each hold several, separated by commas."""
    return tuple(name for option in options or [] for name in option.split(",") if name)


def axis_sizes(options: list[str] | None, mapping: str | None, *, found: bool = False) -> dict[str, int]:
    """The sizes by name from `NAME=SIZE` texts. Other texts, and texts without a mapping, are usage errors."""
    if options and mapping is None and not found:
        raise typer.BadParameter("--axis needs --mapping: the axes belong to a mapping")
    axes = {}
    for option in options or []:
        name, equals, size = option.partition("=")
        if not (name and equals and size.isdecimal() and len(size) <= _SIZE_DIGITS):
            raise typer.BadParameter(f"expected --axis NAME=SIZE such as d=64, got {option[:80]!r}")
        axes[name] = int(size)
    return axes
