"""Results that show themselves: one line at a prompt, and in a notebook a small part of a page, which folds.

    class DiffReport(Viewed):          repr(report)            <DiffReport: same, 131 tensors, 0 ULP>
        def _line(self): ...           report in a notebook    the line, and below it ``_folds``, closed
        def _folds(self): ...

Every value is escaped, as on the pages of ``bridge.report_page``, which has its templates from ``environment``, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from bridge.core.text import printable

if TYPE_CHECKING:
    from jinja2 import BaseLoader, Environment, Template

_MOST_ROWS = 100
"""Rows of a table in a notebook: whoever wants all has them as data."""
_TEMPLATE = """
{% macro part(fold) %}
<details{% if fold.open %} open{% endif %}><summary>{{ fold.title }}</summary>
<div style="margin-left:1em;overflow-x:auto">
{% if fold.rows %}
<table><thead><tr>{% for cell in fold.heading %}<th>{{ cell }}</th>{% endfor %}</tr></thead><tbody>
{% for row in fold.rows[:most] %}
<tr>{% for cell in row %}
<td style="text-align:{{ 'left' if loop.index <= fold.left else 'right' }}">{{ cell }}</td>
{% endfor %}</tr>
{% endfor %}
</tbody></table>
{% if fold.rows | length > most %}<div>... and {{ fold.rows | length - most }} more rows</div>{% endif %}
{% endif %}
{% if fold.text %}<pre style="overflow-x:auto">{{ fold.text }}</pre>{% endif %}
{% for bar in fold.bars %}
<div style="display:flex;width:100%;min-width:24em;margin:2px 0" role="img" aria-label="{{ bar.words }}">
{% for size, colour, label, tip in bar.segments %}
<div title="{{ tip }}" style="flex:{{ size }};min-width:2px;overflow:hidden;white-space:nowrap;text-align:center;
color:#000;border:1px solid #777;background:{{ colour }}">{{ label }}</div>
{% endfor %}</div>
{% endfor %}
{% for inner in fold.below %}{{ part(inner) }}{% endfor %}
</div></details>
{% endmacro %}
<div><b>{{ kind }}</b>: <span style="white-space:pre-line">{{ line }}</span>
{% for fold in folds %}{{ part(fold) }}{% endfor %}</div>
"""


@dataclass(frozen=True)
class Bar:
    """A bar to scale. ``segments``: of each the size, a colour, a label, and text under the mouse; ``words``: for
    those who cannot see the bar.
    """

    segments: tuple[tuple[int, str, str, str], ...]
    words: str


@dataclass(frozen=True)
class Fold:
    """What a reader may unfold: a table with words in its first ``left`` columns, text in lines, bars, more folds."""

    title: str
    heading: Sequence[str] = ()
    rows: Sequence[Sequence[object]] = ()
    left: int = 1
    text: str = ""
    bars: Sequence[Bar] = ()
    below: Sequence[Fold] = ()
    open: bool = False


class Viewed:
    """A dataclass with ``repr=False`` that has ``_line``, and ``_folds`` where a notebook shows more."""

    def _line(self) -> str:
        raise NotImplementedError

    def _folds(self) -> Iterable[Fold]:
        return ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {printable(self._line())}>"

    def _repr_html_(self) -> str:
        values = {"kind": type(self).__name__, "line": self._line(), "most": _MOST_ROWS}
        return _template().render(values, folds=tuple(self._folds())).strip()


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
    return environment().from_string(_TEMPLATE)


def _as_text(value: Any) -> Any:
    """Names come from models and files: control characters in them would reach a terminal."""
    return value if hasattr(value, "__html__") else printable(str(value), lines=True)
