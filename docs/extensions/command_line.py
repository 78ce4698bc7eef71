"""The reference of the command line, from the typer application itself: ``<!-- generated: command-line -->``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from sphinx.application import Sphinx

from bridge.commands.main import app
from extensions.docstrings import as_code, escaped
from extensions.generated_text import fill_in

PROGRAM = "twinshard"


def setup(sphinx: Sphinx) -> dict[str, bool]:
    sphinx.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(_: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = fill_in(source[0], {"command-line": lambda _: "\n".join(_reference())})


def _reference() -> Iterator[str]:
    group: Any = typer.main.get_command(app)
    context = group.context_class(group, info_name=PROGRAM)
    commands = {name: group.get_command(context, name) for name in group.list_commands(context)}
    yield "| command | what it does |\n|---|---|"
    for name, command in commands.items():
        summary = command.get_short_help_str(500)
        yield f"| [`{name}`](#{PROGRAM}-{name}) | {_prose(summary)} |"
    yield ""
    yield f"## `{PROGRAM}`\n"
    yield from _page_of(group, context, PROGRAM)
    for name, command in commands.items():
        yield f"## `{PROGRAM} {name}`\n"
        inner = command.context_class(command, info_name=name, parent=context)
        yield from _page_of(command, inner, f"{PROGRAM} {name}")


def _page_of(command: Any, context: Any, path: str) -> Iterator[str]:
    """Usage, help text, arguments and options, each with the text that ``--help`` prints."""
    yield as_code(command.get_usage(context).removeprefix("Usage: "), "text")
    yield from _help(command.help or "")
    records = [(param, param.get_help_record(context)) for param in command.get_params(context)]
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        chosen = [(param, record) for param, record in records if record and param.param_type_name == kind]
        if chosen:
            yield f"**{title}**\n"
        if kind == "option":
            yield f"```{{program}} {path}\n```\n"
        for _, (names, text) in chosen:
            if kind == "option":
                yield f"`````{{option}} {_option_names(names)}\n{_prose(_help_text(text))}\n`````\n"
            else:
                yield f"- `{names.split(' ')[0]}`: {_prose(_help_text(text))}\n"


def _help(text: str) -> Iterator[str]:
    """Paragraphs. One that begins with a backspace keeps its lines, for which examples use it."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if not paragraph.startswith("\b"):
            yield _prose(" ".join(paragraph.split())) + "\n"
            continue
        title, *lines = paragraph.removeprefix("\b").strip("\n").splitlines()
        yield _prose(title) + "\n"
        if lines:
            yield as_code("\n".join(line.removeprefix("  ") for line in lines), "console")


def _option_names(names: str) -> str:
    """``--verify / --no-verify`` and ``-o, --out PATH`` as Sphinx separates options: by commas."""
    return re.sub(r"\s+/\s+", ", ", names)


def _prose(text: str) -> str:
    """The text as Markdown, with options as code."""
    return escaped(re.sub(r"(?<![\w`-])--?[a-z][\w-]*", r"`\g<0>`", text))


def _help_text(text: str) -> str:
    return re.sub(r"\s*\[(default: .*|required|x.=.*)\]$", lambda found: f" ({found[1]})", text.strip())
