"""`twinshard families`."""

from __future__ import annotations

from bridge.commands.options import JsonOption
from bridge.commands.output import Console, print_json, print_line, print_table


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
