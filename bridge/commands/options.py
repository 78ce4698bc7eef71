"""Options that several commands share, and how commands report errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal

import typer

from bridge.commands import completion
from bridge.commands.output import Console, print_failure
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.text import first_of

SHOWN = 20
"""Rows shown of a listing that may be long."""

_SIZE_DIGITS = 18

MappingOption = Annotated[
    str | None,
    typer.Option(
        "--mapping",
        metavar="NAME|FILE",
        help="A shipped family (decoder, llama, ...; see twinshard families) or a TOML file.",
        autocompletion=completion.families,
    ),
]
IntoOption = Annotated[
    str | None,
    typer.Option(
        "--into",
        metavar="NAME",
        help="The mapping's convention to translate to, if several fit.",
        autocompletion=completion.conventions,
    ),
]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="NAME",
        help="The mapping's convention of the first checkpoint, if several fit.",
        autocompletion=completion.conventions,
    ),
]
TiedOption = Annotated[
    Literal["once", "both"] | None,
    typer.Option(
        "--tied", help="Keep a weight of two names once, or under both; default: as in the first checkpoint."
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
AnyModelOption = Annotated[
    bool,
    typer.Option(
        "--any-model", help="Use the mapping also for a model that its rules are not for by its config.json."
    ),
]
DequantizeOption = Annotated[
    bool,
    typer.Option(
        "--dequantize",
        help="Take MXFP4 weights (GPT-OSS) and float8 weights with scales of blocks (DeepSeek-V3) of the first "
        "checkpoint as the bfloat16 numbers that they stand for.",
    ),
]
OptimizerOrderOption = Annotated[
    str | None,
    typer.Option(
        "--optimizer-order",
        metavar="model|FILE",
        help="What torch's numbers of weights in an optimizer's state stand for: the model's order in each group, or "
        "the names in a text file, one a line.",
    ),
]
ItemOption = Annotated[
    list[str] | None,
    typer.Option(
        "--item",
        metavar="NAME",
        help="Of an Orbax step with several items, those to read as one tree; repeatable, or NAME,NAME.",
    ),
]
StepOption = Annotated[
    str | None,
    typer.Option("--step", metavar="N|latest", help="The step to take from a directory of steps."),
]
WeightsOnlyOption = Annotated[
    bool, typer.Option("--weights-only", help="Leave out optimizer and training state.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


@contextmanager
def user_errors(*kinds: type[Exception], json: bool = False) -> Iterator[None]:
    """Turn the errors a user can cause into one message and exit status 2; `main` ends with 2 for others, too.

    json: the message is also a document on standard output.
    """
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
    """`first_of`, as many as a command shows."""
    return first_of(names, most)


def progress_console() -> Console:
    """Where progress goes."""
    return Console(stderr=True)


def require_mapping(
    mapping: str | None,
    into: str | None,
    from_: str | None,
    tied: str | None,
    any_model: bool = False,
    optimizer_order: str | None = None,
) -> None:
    """Raise a usage error for options that need a mapping and have none."""
    for option, value in (("--into", into), ("--from", from_), ("--tied", tied)):
        if value is not None and mapping is None:
            raise typer.BadParameter(f"{option} needs --mapping: the names that it takes are a mapping's")
    if optimizer_order is not None and mapping is None:
        raise typer.BadParameter("--optimizer-order needs --mapping: without one, states keep their numbers")
    if any_model and mapping is None:
        raise typer.BadParameter("--any-model needs --mapping: only a mapping is for some models")


def item_names(options: list[str] | None) -> tuple[str, ...]:
    """The names in options that may have several each, separated by commas."""
    return tuple(name for option in options or [] for name in option.split(",") if name)


def step_number(option: str | None) -> int | Literal["latest"] | None:
    """The step that an option names. Other texts are usage errors."""
    if option is None:
        return None
    if option == "latest":
        return "latest"
    if not (option.isascii() and option.isdecimal() and len(option) <= _SIZE_DIGITS):
        raise typer.BadParameter(f"expected --step with a number, or latest, got {option[:80]!r}")
    return int(option)


def axis_sizes(options: list[str] | None, mapping: str | None) -> dict[str, int]:
    """The sizes by name from `NAME=SIZE` texts. Other texts, and texts without a mapping, are usage errors."""
    if options and mapping is None:
        raise typer.BadParameter("--axis needs --mapping: the axes are those of a mapping")
    axes = {}
    for option in options or []:
        name, equals, size = option.partition("=")
        if not (name and equals and size.isdecimal() and len(size) <= _SIZE_DIGITS):
            raise typer.BadParameter(f"expected --axis NAME=SIZE such as d=64, got {option[:80]!r}")
        axes[name] = int(size)
    return axes
