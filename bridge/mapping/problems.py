"""What does not fit, collected: each kind is one sentence, with a count and the first names, however many there are."""

from __future__ import annotations

from bridge.mapping.errors import MappingError
from bridge.mapping.open_axes import OpenAxes, together

NAMES = "\0"
"""Where the names go in the sentence of `Problems.add`; rules are full of braces."""
_NAMED = 3


class Problems:
    """Problems of a plan, in the order in which their kinds were found."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, None]] = {}
        self._open: list[OpenAxes] = []

    def __bool__(self) -> bool:
        return bool(self._kinds or self._open)

    def append(self, text: str) -> None:
        """A problem by itself."""
        self._kinds.setdefault(text, {})

    def add(self, text: str, name: str) -> None:
        """One of a kind: all with an equal ``text`` become one sentence, with their names at `NAMES`."""
        self._kinds.setdefault(text, {})[name] = None

    def raised(self, error: MappingError) -> None:
        """A problem that an error tells."""
        if isinstance(error, OpenAxes):
            self._open.append(error)
        else:
            self.append(str(error))

    def texts(self, mapping: str) -> list[str]:
        """A text for each kind; ``mapping`` is the name of the mapping."""
        found = [text.replace(NAMES, some([*names])) for text, names in self._kinds.items()]
        return [*found, *([together(mapping, self._open)] if self._open else [])]


def some(names: list[str]) -> str:
    """The first names, and how many there are."""
    more = len(names) - _NAMED
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {more} more ({len(names)} in all)" if more > 0 else shown
