"""Pages from templates."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from bridge.core.text import printable
from bridge.core.views import environment

_TEMPLATES = Path(__file__).parent / "templates"
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def render(template: str, **values: Any) -> str:
    """The whole page that the ``template`` in folder ``templates`` makes from ``values``.

    Every value except ``Markup`` is escaped. A name that a template uses and ``values`` lacks raises
    ``jinja2.UndefinedError``.
    """
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    templates = environment(FileSystemLoader(_TEMPLATES))
    templates.filters["sentence"] = _sentence
    # Were a name not escaped, the policy would still keep a browser from running or loading it.
    for name, file in (("style", "style.css"), ("script", "script.js")):
        text = (_TEMPLATES / file).read_text(encoding="utf-8")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        templates.globals[name] = {"text": Markup(text), "source": Markup(f"'sha256-{digest}'")}
    return templates


def _sentence(text: str) -> Markup:
    """``text``, escaped. Its options, such as ``--target``, are code: a browser breaks plain words at hyphens."""
    return Markup(_OPTION.sub(r'<code class="option">\g<0></code>', str(escape(printable(text, lines=True)))))
