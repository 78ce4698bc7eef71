"""Links to files and folders of the repository, which pages have as GitHub resolves them, lead to pages of the site.

A file of text gets a page with its lines, a folder a page with the names in it. Sphinx by itself would copy each file
for download, and would have no answer for folders.
"""

from __future__ import annotations

import html
import os
import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

FOLDER = "source"
"""Of the pages of source files."""


class SourceLinks(SphinxTransform):
    """Point links to files that are no pages of the site to the pages that ``source_pages`` makes of the files."""

    default_priority = 50

    def apply(self, **kwargs: Any) -> None:
        docname = self.env.docname
        links = [*self.document.findall(addnodes.download_reference)]
        links += [node for node in self.document.findall(addnodes.pending_xref) if node["reftype"] == "myst"]
        for node in links:
            path = self._path_of(node)
            if path is not None:
                _linked(self.env).setdefault(docname, set()).add(path)
                uri = self.app.builder.get_relative_uri(docname, f"{FOLDER}/{path}")
                node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))

    def _path_of(self, node: nodes.Element) -> str | None:
        """The path below the root of the repository, where the link's target exists and is no page."""
        target = node["reftarget"].partition("#")[0]
        if node.get("refdomain") == "doc":
            if target in self.env.found_docs:
                return None
            target = posixpath.relpath(f"{target}.md", posixpath.dirname(self.env.docname) or ".")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(self.env.docname), target))
        exists = bool(target) and not path.startswith("..") and (Path(self.env.srcdir) / path).exists()
        return path if exists else None


def source_pages(sphinx: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Name, context and template of each page that a link leads to."""
    paths: set[str] = set().union(*_linked(sphinx.env).values())
    for path in sorted(paths):
        file = Path(sphinx.srcdir) / path
        make = _folder if file.is_dir() else _file
        # A long path breaks behind a slash.
        heading = f'<h1 class="source-path">{html.escape(path).replace("/", "/<wbr>")}</h1>'
        context = {"title": path, "body": f"{heading}\n{make(sphinx, path, paths)}"}
        yield f"{FOLDER}/{path}", context, "page.html"


def _file(sphinx: Sphinx, path: str, _: set[str]) -> str:
    text = (Path(sphinx.srcdir) / path).read_text(encoding="utf-8")
    try:
        language = get_lexer_for_filename(path).aliases[0]
    except ClassNotFound:
        language = "text"
    return sphinx.builder.highlighter.highlight_block(text, language, force=True)


def _folder(sphinx: Sphinx, path: str, pages: set[str]) -> str:
    """The names in a folder. Those that have a page are links."""
    rows = []
    for entry in sorted(os.scandir(Path(sphinx.srcdir) / path), key=lambda entry: entry.name):
        if entry.name.startswith((".", "__pycache__")):
            continue
        inner = f"{path}/{entry.name}"
        document = inner.removesuffix(".md").removesuffix(".ipynb")
        target = f"{FOLDER}/{inner}" if inner in pages else document
        text = f"<code>{html.escape(entry.name)}{'/' if entry.is_dir() else ''}</code>"
        if inner in pages or document in sphinx.env.found_docs:
            uri = sphinx.builder.get_relative_uri(f"{FOLDER}/{path}", target)
            text = f'<a href="{html.escape(uri)}">{text}</a>'
        rows.append(f"<li>{text}</li>")
    return "<ul>\n{}\n</ul>".format("\n".join(rows))


def setup(sphinx: Sphinx) -> dict[str, bool]:
    sphinx.add_transform(SourceLinks)
    sphinx.connect("html-collect-pages", source_pages)
    sphinx.connect("env-purge-doc", lambda _, env, docname: _linked(env).pop(docname, None))
    sphinx.connect("env-merge-info", _merge)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _merge(_: Sphinx, env: BuildEnvironment, docnames: Iterable[str], other: BuildEnvironment) -> None:
    _linked(env).update({name: paths for name, paths in _linked(other).items() if name in docnames})


def _linked(env: BuildEnvironment) -> dict[str, set[str]]:
    """By page, the paths that it links to."""
    if not hasattr(env, "linked_sources"):
        env.linked_sources = {}
    return env.linked_sources
