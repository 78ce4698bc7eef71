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
    if json:
        print_json(
            console,
            {
                "families": [
                    {
                        "family": table.name,
                        "conventions": list(table.conventions),
                        "axes": list(table.config),
                        "models": list(table.models),
                    }
                    for table in tables
                ]
            },
        )
        return
    rows = [
        (table.name, *(", ".join(names) for names in (table.conventions, table.config, table.models)))
        for table in tables
    ]
    print_table(console, ("family", "conventions", "axes", "models"), rows, left=4)
    print_line(
        console,
        "Where a family has only one of flax and jax, --into and --from accept both names for it; the same holds for "
        "hf and torch.",
    )
