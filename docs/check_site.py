"""Check the built site: ``python docs/check_site.py FOLDER``. Nothing is fetched.

Every link and image of a page must lead to a file of the site, every ``#anchor`` to an element there, and every image
must have an alternative text. Links to other sites are listed in ``FOLDER/external-links.txt``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_TARGETS = {"a": "href", "link": "href", "img": "src", "script": "src", "iframe": "src"}


class Page(HTMLParser):
    """What links to other places and what can be linked to.

    links: as written. anchors: ids and names. pictures: sources of images without an alternative text.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.pictures: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if link := values.get(_TARGETS.get(tag, "")):
            self.links.append(link)
        self.anchors |= {name for name in (values.get("id"), values.get("name")) if name}
        # Sphinx writes a picture's own path where no author gave a text.
        if tag == "img" and values.get("alt") in (
            None,
            "",
            values.get("src"),
            _shown_path(values.get("src")),
        ):
            self.pictures.append(values.get("src") or "")


def _shown_path(source: str | None) -> str | None:
    return source and source[source.find("_images/") :]


def problems(folder: Path, external: set[str]) -> Iterator[str]:
    """A sentence for each dead link and each image without a text. Adds links to other sites to ``external``."""
    read = functools.cache(lambda path: Page(path.read_text(encoding="utf-8")))
    for path in sorted(folder.rglob("*.html")):
        name = path.relative_to(folder)
        for source in read(path).pictures:
            yield f"{name}: the image {source[:80]} has no alternative text"
        for link in dict.fromkeys(read(path).links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if parts.scheme != "data":
                    external.add(link)
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{name}: {link} leads to no file of the site"
            elif target.suffix == ".html" and unquote(parts.fragment) not in {"", *read(target).anchors}:
                yield f"{name}: {link} leads to no element of {target.relative_to(folder)}"


def main(folder: Path) -> int:
    """1 when there is a problem; each is a line on standard error."""
    external: set[str] = set()
    found = list(problems(folder.resolve(), external))
    (folder / "external-links.txt").write_text("".join(f"{link}\n" for link in sorted(external)), "utf-8")
    for problem in found:
        print(problem, file=sys.stderr)
    pages = len(list(folder.rglob("*.html")))
    print(f"{pages} pages, {len(found)} problems; {len(external)} links to other sites are not fetched")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
