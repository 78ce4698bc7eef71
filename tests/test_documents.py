"""Documents: their length, and that their links lead somewhere. ``make docs`` checks the built site as well."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("bridge", "docs", "jax_impl", "notebooks", "tests", "torch_impl")
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
        *(ROOT / "notebooks").glob("*.ipynb"),
    ]
)
MAPS = [path for path in DOCUMENTS if path.name == "README.md" and path.parent != ROOT]
# The changelog grows with each release, and the table of features is generated. In tests/ only the map is for readers.
# The other tables are for tests.
NOT_COUNTED = [ROOT / "CHANGELOG.md", ROOT / "docs/reference/features.md"]
COUNTED = [
    path
    for path in DOCUMENTS
    if path.suffix == ".md"
    and path not in NOT_COUNTED
    and (path in MAPS or ROOT / "tests" not in path.parents)
]
MOST_WORDS, MOST_WORDS_OF_README, MOST_LINES_OF_A_MAP = 35_000, 600, 40
GENERATED = re.compile(r"^<!-- generated: .* -->$", flags=re.MULTILINE)
FENCED = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2`*~*$", flags=re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def words_of(path: Path) -> int:
    """Words of text and code blocks. A mark such as the bar of a table is no word."""
    return sum(bool(re.search(r"\w", word)) for word in path.read_text(encoding="utf-8").split())


def prose_of(path: Path) -> str:
    """The text without code blocks. Of a notebook, the text of its Markdown cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return FENCED.sub("", text)


def anchors_of(path: Path) -> set[str]:
    """The anchors that may follow the file's name: its headings, as GitHub and MyST name them."""
    anchors: set[str] = set()
    for title in re.findall(r"^#+ +(.+?) *#*$", prose_of(path), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in anchors:
            number += 1
        anchors.add(name)
    return anchors


def dead_links(path: Path) -> list[str]:
    """Relative links and images that lead to no file, and links to headings that are not there."""
    # A link's text may be code, but its target may not. So code spans have no targets.
    prose = re.sub(r"(`+)(?!`).+?\1", "code", prose_of(path))
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            dead.append(f"{link}: no such file")
        elif anchor and not has_anchor(target, anchor):
            dead.append(f"{link}: no such heading")
    return dead


def has_anchor(target: Path, anchor: str) -> bool:
    """Whether the target is only on the site, whose own check sees its headings: generated text, or a source page."""
    if target.suffix != ".md" or anchor in anchors_of(target):
        return True
    return bool(GENERATED.search(target.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    assert dead_links(path) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `title`, twice\n\n# A title, twice\n\n```\n# no title\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n[a](other.md#a-title-twice) [b](other.md#a-title-twice-1) [`c`](#page) [d](https://x.org/y)\n"
        "`[e](code.md)`\n~~~\n[f](code.md)\n~~~\n"
        "[g](none.md) ![h](none.png) [i](other.md#no-title) [`j`](#none)\n"
    )
    assert dead_links(page) == [
        "none.md: no such file",
        "none.png: no such file",
        "other.md#no-title: no such heading",
        "#none: no such heading",
    ]


def test_the_documents_are_short_enough_to_be_read() -> None:
    words = {name_of(path): words_of(path) for path in COUNTED}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:10]
    assert words["README.md"] <= MOST_WORDS_OF_README


@pytest.mark.parametrize("path", MAPS, ids=name_of)
def test_the_readme_of_a_package_is_a_map(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_A_MAP
