"""`twinshard families`."""

from __future__ import annotations

from bridge.commands.options import JsonOption
from bridge.commands.output import Console, print_json, print_line, print_table


def families(json: JsonOption = False) -> None:
    """List the shipped mappings.

    For each family the list has its naming conventions, for --from and --into, the axes whose sizes come from a
    config.json beside the checkpoint, or from --axis, and the models it is for, by the model_type in their config.json.

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
        "--into and --from take flax for jax and jax for flax, and hf for torch and torch for hf, where a family has "
        "one of the two.",
    )
