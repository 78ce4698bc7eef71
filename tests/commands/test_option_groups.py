"""A group of options is a dataclass, and a command line shows and takes its fields one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from bridge.commands.option_groups import grouped_options

calls: list[tuple[object, ...]] = []


@dataclass(frozen=True)
class Inner:
    first: Annotated[int, typer.Option("--first", help="Needed.")]
    parts: Annotated[list[str] | None, typer.Option("--part", help="Has the name of the group.")] = None


@dataclass(frozen=True)
class Outer(Inner):
    first: Annotated[int, typer.Option("--first", help="Has a default here.")] = 7
    last: Annotated[bool, typer.Option("--last")] = False


@grouped_options
def command(
    path: Annotated[str, typer.Argument(metavar="PATH")],
    *,
    before: Annotated[int, typer.Option("--before")] = 1,
    parts: Inner,
    after: Annotated[int, typer.Option("--after")] = 2,
) -> None:
    """Says this."""
    calls.append((path, before, parts, after))


@grouped_options
def with_defaults(options: Outer) -> None:
    calls.append((options,))


def run(function: object, *arguments: str) -> tuple[int, str]:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(function)  # type: ignore[arg-type]
    calls.clear()
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
    return result.exit_code, result.output


def test_a_command_gets_its_groups() -> None:
    code, _ = run(command, "x", "--after", "5", "--part", "a", "--first", "3", "--part", "b")
    assert (code, calls) == (0, [("x", 1, Inner(3, ["a", "b"]), 5)])


def test_a_field_without_a_default_is_required() -> None:
    code, said = run(command, "x")
    assert code == 2
    assert "--first" in said
    assert calls == []


def test_an_inherited_field_keeps_its_position_and_gets_the_default_of_its_heir() -> None:
    assert run(with_defaults)[0] == 0
    assert calls == [(Outer(7, None, False),)]
    _, said = run(with_defaults, "--help")
    assert said.index("--first") < said.index("--part") < said.index("--last")
    assert "Has a default here." in said


def test_help_lists_options_in_the_order_of_parameters_and_fields() -> None:
    code, said = run(command, "--help")
    assert code == 0
    assert "Says this." in said
    positions = [said.index(option) for option in ("--before", "--first", "--part", "--after")]
    assert positions == sorted(positions)
