"""`twinshard map`, which proposes a mapping, and `twinshard families`, which lists the shipped ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bridge.commands.option_groups import grouped_options
from bridge.commands.options import ItemOptions, JsonOption, some, user_errors
from bridge.commands.output import Console, print_json, print_line, print_table, print_text
from bridge.commands.parents import missing_parent


@grouped_options
def map_(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint of a model.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Checkpoint of the same model from other code.")],
    *,
    values: Annotated[
        bool,
        typer.Option(
            "--values", help="Compare some elements, to resolve doubts if both have the same weights."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the mapping there; default: print it.")
    ] = None,
    which: ItemOptions,
    json: JsonOption = False,
) -> None:
    """Propose a mapping between two checkpoints, from names and shapes.

    If another rule would also fit, a rule is marked "# uncertain", with the reason. The command lists weights that no
    rule names. The exit status is 1 if a rule is uncertain or a weight is listed: review the file first.

    \b
    Example:
      twinshard map runs/torch/step_40 runs/jax/step_40 --values --out mine.toml
      twinshard convert runs/torch/step_40 new --mapping mine.toml
    """
    from bridge.core.formats.stores.store import store_hint
    from bridge.propose.propose import propose

    if out is not None and os.path.lexists(out):
        raise typer.BadParameter(
            f"{out} exists already: expected a new file for --out; remove the old one, or choose another name"
        )
    missing = None if out is None else missing_parent(str(out))
    if missing is not None:
        paths = "; --out takes paths of this machine only" if store_hint(str(out)) else ""
        raise typer.BadParameter(f"{missing} does not exist: expected the directory for {out}{paths}")
    step = which.step_number()
    with user_errors(json=json):
        proposal = propose(a, b, values=values, items=which.items, step=step)
        if out is not None:
            with open(out, "x", encoding="utf-8") as file:
                file.write(proposal.text)
    console = Console()
    if json:
        rules = [{"a": rule.a, "b": rule.b, "doubts": rule.doubts} for rule in proposal.rules]
        document = {"a": proposal.a, "b": proposal.b, "certain": proposal.certain, "rules": rules}
        left = {"left_a": proposal.left_a, "left_b": proposal.left_b, "text": proposal.text}
        print_json(console, {**document, **left})
    elif out is None:
        print_text(console, proposal.text.rstrip("\n"))
    notes = Console(stderr=True)
    uncertain = [rule.a[0].partition(" : ")[0] for rule in proposal.rules if rule.doubts]
    if uncertain:
        count = f"{len(uncertain)} of {len(proposal.rules)} rules"
        hint = "" if values else "; --values resolves them if both hold the same weights"
        print_line(notes, f"uncertain, {count}: {some(uncertain)}{hint}")
    sides = (("A", proposal.left_a, proposal.places[0]), ("B", proposal.left_b, proposal.places[1]))
    for name, left_over, source in sides:
        if source.doubt:
            print_line(notes, f"uncertain, where {name} keeps its tensors: {source.doubt}")
        if left_over:
            print_line(notes, f"only in {name}: {some(left_over)}")
    raise typer.Exit(0 if proposal.certain else 1)


def families(json: JsonOption = False) -> None:
    """List the shipped mappings.

    For each family the list shows the naming conventions (for --from and --into), the axes (with sizes from --axis, or
    from a config.json next to the checkpoint), and the supported models, by the model_type in their config.json.

    \b
    Example:
      twinshard families --json
    """
    from bridge.core.mapping.language.rules import family_names, load_mapping

    console = Console()
    tables = [load_mapping(name) for name in family_names()]
    columns = ("family", "conventions", "axes", "models")
    cells = [
        (table.name, list(table.conventions), list(table.config), list(table.models)) for table in tables
    ]
    if json:
        print_json(console, {"families": [dict(zip(columns, row, strict=True)) for row in cells]})
        return
    rows = [(name, *map(", ".join, several)) for name, *several in cells]
    print_table(console, columns, rows, left=4)
    print_line(
        console,
        "Where a family has only one of flax and jax, --into and --from accept both names for it; the same holds for "
        "hf and torch.",
    )
