"""Views of results: one line at a prompt, and a summary with foldable parts in a notebook.

Every value is escaped. The pages of ``bridge.report_page`` use the same ``environment``.
"""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.text import printable

if TYPE_CHECKING:
    from jinja2 import BaseLoader, Environment, Template

_LINE = 160
_FEW, _MOST = 12, 100
"""Rows or lines that a view shows unfolded, and the most rows of a table. The result itself has all rows."""


class Viewed(ABC):
    """A dataclass with ``repr=False`` whose ``repr`` is the first line of its ``summary``.

    A notebook shows the summary, and below it the foldable ``table``, ``drawings`` and the class's own ``str``, if any.
    """

    @abstractmethod
    def summary(self) -> str:
        """The result in one line or a few lines."""

    def table(self) -> Sequence[Sequence[object]]:
        """A heading and rows."""
        return ()

    def drawings(self) -> Sequence[object]:
        """Bars to scale: see ``bridge.core.sharding.layout.holdings``."""
        return ()

    def __repr__(self) -> str:
        line = textwrap.shorten(printable(self.summary().partition("\n")[0]), _LINE, placeholder=" ...")
        return f"<{type(self).__name__}: {line}>"

    def _repr_html_(self) -> str:
        heading, *rows = self.table() or ((),)
        drawings, own = self.drawings(), type(self).__str__ is not object.__str__
        shown = {"heading": heading, "rows": rows, "drawings": drawings, "few": _FEW, "most": _MOST}
        shown |= {"kind": type(self).__name__, "summary": self.summary()}
        return _template().render(shown, text=str(self) if own and not (rows or drawings) else "")


def environment(loader: BaseLoader | None = None) -> Environment:
    """Templates whose every value is escaped but ``Markup``; a name that has no value raises ``UndefinedError``."""
    # Here, not at the top: the runtimes are imported without it.
    from jinja2 import Environment, StrictUndefined

    return Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_as_text,
    )


@cache
def _template() -> Template:
    return environment().from_string(Path(__file__).with_name("view.html").read_text(encoding="utf-8"))


def _as_text(value: Any) -> Any:
    """Names come from models and files: control characters in them would reach a terminal."""
    return value if hasattr(value, "__html__") else printable(str(value), lines=True)
