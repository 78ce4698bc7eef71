"""Generated text in pages: ``<!-- generated: NAME ARGUMENT -->`` in a page stands for Markdown of a generator.

GitHub shows no comments, so a page reads well there: it says how to get the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_MARK = re.compile(r"^<!-- generated: (\S+) ?(.*?) -->$", flags=re.MULTILINE)


def fill_in(text: str, generators: Mapping[str, Callable[[str], str]]) -> str:
    """``text`` with the generators' Markdown in place of marks. Marks of other generators stay."""
    return _MARK.sub(
        lambda mark: generators[mark[1]](mark[2]) if mark[1] in generators else mark[0],
        text,
    )
