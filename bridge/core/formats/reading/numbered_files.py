"""Files that belong together by the numbers in their names.

model-00001-of-00002.safetensors    part 1 of 2, whose tensors are in no other part; counted from 1, or from a part 0 on
model_world_size_2_rank_0.pt        rank 0 of 2, which has a piece of each tensor
mp_rank_00_model_states.pt          rank 0 of any number
consolidated.00.pth                 the same
lora_rank_8.pt, fold-1-of-5.pt      no number of a file: ranks are counted from 0, and each fold has a whole model
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from bridge.core.text import first_of

_PART: Final = re.compile(r"(?<!\d)(\d{1,9})[-_.]of[-_.](\d{1,9})(?!\d)")
_RUN: Final = re.compile(r"(?:epoch|step|iter|fold|split|run|seed|trial|round|stage)[-_. ]?\Z", re.IGNORECASE)
"""Before a number that counts trainings or their steps, each of which has a model of its own."""
_RANK: Final = re.compile(r"(?:\Aconsolidated\.|(?<![a-z])rank[_-]?)(\d{1,6})(?:_(\d{3}))?(?!\d)")
_WORLD: Final = re.compile(r"world_size_(\d{1,6})_rank_(\d{1,6})(?!\d)")
_RANKS_OF_A_PROGRAM: Final = re.compile(rf"\Aconsolidated\.|[a-z]p_rank_|{_WORLD.pattern}")
_SHOWN: Final = 5


@dataclass(frozen=True)
class NumberedFiles:
    """The names that differ in their numbers alone, in the order of these.

    of_ranks: whether each has a piece of the same tensors. wrong: names whose number another one has, too, or is
    larger than the count in the name. num_missing: how many the numbers call for that are not among the names;
    missing: the first of these.
    """

    names: tuple[str, ...]
    of_ranks: bool
    wrong: tuple[str, ...]
    num_missing: int
    missing: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether every number is there, once."""
        return not (self.num_missing or self.wrong)

    @property
    def problem(self) -> str:
        """What is wrong with the numbers; empty where they are complete."""
        if self.wrong:
            return f"{self.wrong[0]} has a number that is there twice, or above the count"
        verb = "is" if self.num_missing == 1 else "are"
        return f"{first_of(self.missing, total=self.num_missing)} {verb} missing" if self.num_missing else ""


def is_numbered(name: str) -> bool:
    """Whether a name has the number of a part or of a rank."""
    return bool(_numbers(name)[0])


def numbered_sets(names: Iterable[str]) -> list[NumberedFiles]:
    """The sets that these names are of; names without such a number are in none."""
    members: dict[str, dict[str, tuple[int, ...]]] = {}
    counts: dict[str, int | None] = {}
    for name in names:
        spans, count = _numbers(name)
        if spans:
            template = _with(name, spans, ["{}"] * len(spans))
            members.setdefault(template, {})[name] = tuple(int(name[start:stop]) for start, stop in spans)
            counts[template] = count
    sets = [
        _set(numbers, counts[template], of_ranks=_PART.search(template.replace("{}", "0")) is None)
        for template, numbers in members.items()
    ]
    return [found for found in sets if found is not None]


def _numbers(name: str) -> tuple[list[tuple[int, int]], int | None]:
    """Where the numbers of a name are, and how many files there are by it."""
    if (part := _PART.search(name)) and not _RUN.search(name, 0, part.start()):
        return [part.span(1)], int(part[2])
    if world := _WORLD.search(name):
        return [world.span(2)], int(world[1])
    spans = [rank.span(group) for rank in _RANK.finditer(name) for group in (1, 2) if rank[group] is not None]
    return spans, None


def _set(members: dict[str, tuple[int, ...]], count: int | None, *, of_ranks: bool) -> NumberedFiles | None:
    ordered = sorted(members, key=members.__getitem__)
    numbers = set(members.values())
    zeros = (0,) * len(members[ordered[0]])
    if of_ranks and zeros not in numbers and _RANKS_OF_A_PROGRAM.search(ordered[0]) is None:
        return None
    first = 0 if of_ranks or zeros in numbers else 1
    sizes = [max(axis) + 1 for axis in zip(*numbers, strict=True)] if count is None else [count]

    def wanted() -> Iterator[tuple[int, ...]]:
        # `itertools.product` would list each range, which a name can make as long as it likes.
        for rank in range(math.prod(sizes)):
            digits = []
            for size in reversed(sizes):
                rank, digit = divmod(rank, size)
                digits.append(first + digit)
            yield tuple(reversed(digits))

    spans, _ = _numbers(ordered[0])
    widths = [stop - start for start, stop in spans]
    missing = itertools.islice((number for number in wanted() if number not in numbers), _SHOWN)
    texts = ([str(n).zfill(width) for n, width in zip(number, widths, strict=True)] for number in missing)
    stops = [first + size for size in sizes]
    inside = {
        number for number in numbers if all(first <= n < stop for n, stop in zip(number, stops, strict=True))
    }
    twice = {a for a, b in itertools.pairwise(ordered) if members[a] == members[b]}
    return NumberedFiles(
        tuple(ordered),
        of_ranks,
        tuple(name for name in ordered if name in twice or members[name] not in inside),
        math.prod(sizes) - len(inside),
        tuple(_with(ordered[0], spans, text) for text in texts),
    )


def _with(name: str, spans: list[tuple[int, int]], texts: list[str]) -> str:
    """A name with other texts where its numbers are."""
    for (start, stop), text in zip(reversed(spans), reversed(texts), strict=True):
        name = name[:start] + text + name[stop:]
    return name
