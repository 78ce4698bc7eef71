"""``python -m tests.torch_impl.beside_stock [ITEM ...]``: see the package."""

from __future__ import annotations

import argparse
import sys

from tests.support.ranks import RankGroup
from tests.torch_impl.beside_stock import items
from tests.torch_impl.beside_stock.shown import FAILED, show


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.torch_impl.beside_stock",
        description="FSDP2 and torch_impl beside each other, item by item.",
    )
    parser.add_argument("item", nargs="*", type=int, help="numbers of items; all without any")
    wanted = parser.parse_args().item
    known = {item.number for item in items.ITEMS}
    if unknown := set(wanted) - known:
        parser.error(f"expected items of {min(known)} to {max(known)}, got {min(unknown)}")
    ranks, statuses = RankGroup(), []
    try:
        for item in (one for one in items.ITEMS if not wanted or one.number in wanted):
            shown = show(ranks, item)
            statuses.append(shown.status)
            print(shown, end="\n\n", flush=True)
    finally:
        ranks.close()
    print(", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses)))
    return int(FAILED in statuses)


if __name__ == "__main__":
    sys.exit(main())
