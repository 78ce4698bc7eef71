"""Tools of the documentation site that need no package. ``make docs`` runs them on all pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[1] / "docs"


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, DOCS / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_check_of_the_site_finds_dead_links_and_silent_pictures(tmp_path: Path) -> None:
    (tmp_path / "_images").mkdir()
    (tmp_path / "_images/a.png").touch()
    (tmp_path / "b.html").write_text('<h1 id="top">B</h1>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#top">1</a> <a href="b.html#none">2</a> <a href="c.html">3</a> <a href="#here" id="here">4</a>'
        '<a href="https://x.org">5</a> <img src="_images/a.png" alt="a picture"> <img src="_images/a.png">'
        '<img src="_images/a.png" alt="_images/a.png"> <img src="_images/b.png" alt="a picture">'
    )
    external: set[str] = set()
    assert list(load("check_site.py").problems(tmp_path, external)) == [
        "a.html: the image _images/a.png has no alternative text",
        "a.html: the image _images/a.png has no alternative text",
        "a.html: b.html#none leads to no element of b.html",
        "a.html: c.html leads to no file of the site",
        "a.html: _images/b.png leads to no file of the site",
    ]
    assert external == {"https://x.org"}


def test_docstrings_become_markdown() -> None:
    docstring = (
        "Sums ``*rows`` of a <T> and _b_, with *care*::\n"
        "\n"
        "    total = sum(rows)\n"
        "\n"
        "    print(total)\n"
        "\n"
        "rows: numbers,\n"
        "    at least one. mean: see below.\n"
        "mean, ``scale``: of all.\n"
        "\n"
        "Args:\n"
        "    first: of two\n"
        "        lines.\n"
        "\n"
        "- one\n"
        "  item\n"
        "- another\n"
        "\n"
        "A picture:\n"
        "    | 1 2 |\n"
    )
    assert load("extensions/docstrings.py").as_markdown(docstring).splitlines() == [
        r"Sums ``*rows`` of a \<T> and \_b\_, with *care*:",
        "",
        "~~~~python",
        "total = sum(rows)",
        "",
        "print(total)",
        "~~~~",
        "",
        "- `rows`: numbers, at least one. mean: see below.",
        "",
        "- `mean`, `scale`: of all.",
        "",
        "**Arguments**",
        "",
        "- `first`: of two lines.",
        "",
        "- one item",
        "",
        "- another",
        "",
        "A picture:",
        "",
        "~~~~text",
        "| 1 2 |",
        "~~~~",
    ]
