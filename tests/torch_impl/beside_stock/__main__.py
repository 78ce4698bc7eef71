"""``python -m tests.torch_impl.beside_stock [ITEM or ASPECT ...]``: see the package."""

from __future__ import annotations

import argparse
import sys

from tests.support.ranks import RankGroup
from tests.support.torch_impl.comparison import FAILED, show
from tests.torch_impl.beside_stock.table import ITEMS, PROGRAMS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch_impl.beside_stock",
        description="FSDP2 and torch_impl beside each other, program by program.",
    )
    parser.add_argument("wanted", nargs="*", help="numbers of items, or aspects; all items without any")
    wanted = parser.parse_args().wanted
    known = {str(program.item) for program in ITEMS} | {program.aspect for program in PROGRAMS}
    if unknown := set(wanted) - known:
        parser.error(f"expected one of {', '.join(sorted(known))}, got {min(unknown)}")
    chosen = [row for row in PROGRAMS if {str(row.item), row.aspect} & set(wanted)] if wanted else ITEMS
    ranks, statuses = RankGroup(), []
    try:
        for program in chosen:
            shown = show(ranks, program)
            statuses.append(shown.status)
            print(shown, end="\n\n", flush=True)
    finally:
        ranks.close()
    print(", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)))
    return int(FAILED in statuses)


if __name__ == "__main__":
    sys.exit(main())
