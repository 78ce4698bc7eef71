"""The frame of all HTML pages: one style, light and dark, tables, and charts, in a file that needs no network.

A tool with a page writes a template that extends ``page.html``, and renders it::

    render("plan.html", title="Plan: llama3-8b", sections=[...])    # bridge/compiling/page.py
    inline_svg(figure, "bytes at the peak of a step")               # a chart of matplotlib, for a page

Values become text: no name can become a tag, an attribute or an escape sequence. Blocks of ``page.html`` are ``main``,
what the page says, and ``script``, which lets ``script.js`` sort, filter and unfold. ``parts.html`` has tables. The
page's policy lets a browser run that script and apply that style only.
"""
