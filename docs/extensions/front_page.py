"""The file ``index.html`` of the site's root, which leads to the front page in ``docs``."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<meta http-equiv="refresh" content="0; url={target}">
</head>
<body><a href="{target}">{title}</a></body>
</html>
"""


def setup(sphinx: Sphinx) -> dict[str, bool]:
    sphinx.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _write(sphinx: Sphinx, error: Exception | None) -> None:
    if error is None and sphinx.builder.format == "html":
        target = sphinx.builder.get_target_uri(sphinx.config.root_doc)
        page = _PAGE.format(title=sphinx.config.html_title, target=target)
        (Path(sphinx.outdir) / "index.html").write_text(page, encoding="utf-8")
