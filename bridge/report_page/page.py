"""Pages from templates, and charts of matplotlib inside a page, in the page's colours."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

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


if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG = "{http://www.w3.org/2000/svg}"
# A figure's black, white and grey become the page's ink, paper and rules, which differ in the dark.
_VARIABLES = {
    "#000000": "ink", "#ffffff": "paper", "#eeeeee": "card", "#b0b0b0": "rule", "#c9d3de": "band",
    "#e6ebf0": "wide", "#9aa7b4": "line", "#5b7690": "bar", "#9c4a7b": "beyond", "#b84a00": "begin",
}  # fmt: skip


def inline_svg(figure: Figure, caption: str, tips: Mapping[str, Sequence[str]] | None = None) -> Markup:
    """``figure`` as an element of a page; ``caption`` is the text for people who cannot see it.

    tips: the tooltips of the markers of each line, by the line's ``gid``.
    """
    root = ElementTree.fromstring(_drawn(figure, caption))
    for group in root.iter(f"{SVG}g"):
        marks = zip(group.iter(f"{SVG}use"), (tips or {}).get(group.get("id", ""), ()), strict=False)
        for mark, tip in marks:
            ElementTree.SubElement(mark, f"{SVG}title").text = tip
    for element in list(root):
        if element.tag != f"{SVG}g" and element.tag != f"{SVG}defs":
            root.remove(element)  # Metadata.
    for definitions in root.iter(f"{SVG}defs"):
        for style in definitions.findall(f"{SVG}style"):
            definitions.remove(style)  # It would be a rule of the whole page.
    for element in root.iter():
        _make_inline(element)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": caption}
    return Markup(_with_own_ids(ElementTree.tostring(root, encoding="unicode"), caption))


def _drawn(figure: Figure, caption: str) -> str:
    import matplotlib as mpl

    written = io.StringIO()
    # Letters as shapes: a browser's own font would be wider than the room that a figure leaves for a
    # label. With a fixed salt, equal figures make equal pages.
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": caption}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return written.getvalue()


def _make_inline(element: ElementTree.Element) -> None:
    """Remove namespaces, which HTML does not have, and turn ``style`` into attributes.

    The page's policy ignores ``style``.
    """
    element.tag = element.tag.removeprefix(SVG)
    attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    for declaration in filter(None, attributes.pop("style", "").split(";")):
        name, _, value = declaration.partition(":")
        attributes[name.strip()] = value.strip()
    for name, value in attributes.items():
        if value in _VARIABLES:
            attributes[name] = f"var(--{_VARIABLES[value]})"
    # Letters drawn as shapes have no colour attribute, which means black.
    if element.tag == "g" and attributes.get("id", "").startswith("text_"):
        attributes.setdefault("fill", "var(--ink)")
    element.attrib.clear()
    element.attrib.update(attributes)


def _with_own_ids(svg: str, caption: str) -> str:
    """The SVG with only the ids that it refers to, each with a prefix that no other chart of the page has."""
    own = hashlib.sha256(caption.encode()).hexdigest()[:8]
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{own}-{m[1]}"' if m[1] in used else "", svg)
    return re.sub(r'(href="|url\()#', rf"\1#{own}-", svg)
