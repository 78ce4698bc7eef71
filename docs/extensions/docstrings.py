"""Docstrings of this repository as Markdown.

The docstrings are plain prose. Paragraphs end with a blank line. An indented block after a blank line is literal text.
``Args:`` and ``Raises:`` begin sections, and a paragraph whose lines all begin with ``name: `` describes names, with
further lines indented.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator

_SECTION = re.compile(r"(Args|Raises|Returns|Yields|Attributes|Example|Examples):")
_NAME = r"(?:\*{0,2}[A-Za-z_][\w.]*|`+[^`]+`+)"
_ENTRY = re.compile(rf"({_NAME}(?:, {_NAME})*): (.*)")
_CODE_SPAN = re.compile(r"(`+)(.+?)\1")
_FENCE = "~~~~"


def as_markdown(docstring: str) -> str:
    """The docstring as Markdown text that ends with a newline."""
    return "\n".join(_blocks(docstring.expandtabs().splitlines()))


def as_code(text: str, language: str = "") -> str:
    """A fenced block. ``language``: for highlighting; "" chooses Python where the text is a Python program."""
    return f"{_FENCE}{language or _language_of(text)}\n{text}\n{_FENCE}\n"


def escaped(prose: str) -> str:
    """Prose in which nothing but code between backticks and ``*emphasis*`` is markup."""
    parts, end = [], 0
    for span in _CODE_SPAN.finditer(prose):
        parts += [_escaped(prose[end : span.start()]), span[0]]
        end = span.end()
    return "".join([*parts, _escaped(prose[end:])])


def _escaped(text: str) -> str:
    text = re.sub(r"([\\<\[\]#$`|])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)|\*(?=\*)|(?<=\*)\*|(?<!\w)\*(?=[\w]+[^\w*])", r"\\\g<0>", text)


def _language_of(text: str) -> str:
    try:
        ast.parse(text)
    except SyntaxError:
        return "text"
    return "python"


def _blocks(lines: list[str]) -> Iterator[str]:
    for block in _chunks(lines):
        first = block[0]
        if _is_indented(first):
            yield as_code(textwrap.dedent("\n".join(block)))
        elif (section := _SECTION.fullmatch(first)) and len(block) > 1:
            yield f"**{section[1].replace('Args', 'Arguments')}**\n"
            content = textwrap.dedent("\n".join(block[1:]))
            yield as_code(content) if section[1].startswith("Example") else as_markdown(content)
        elif _ENTRY.match(first) and all(_is_indented(line) or _ENTRY.match(line) for line in block):
            yield from (_entry(entry) for entry in _items(block, lambda line: not _is_indented(line)))
        elif first.startswith("- "):
            for item in _items(block, lambda line: line.startswith("- ")):
                yield f"- {escaped(_joined(item).removeprefix('- '))}\n"
        else:
            yield from _paragraph(block)


def _chunks(lines: list[str]) -> Iterator[list[str]]:
    """Blocks between blank lines. Literal text and sections go on behind blank lines while lines are indented."""
    block: list[str] = []
    for number, line in enumerate(lines):
        if line.strip():
            block.append(line)
        elif block:
            following = next((other for other in lines[number:] if other.strip()), "")
            goes_on = _is_indented(block[0]) or _SECTION.fullmatch(block[0])
            if goes_on and _is_indented(following):
                block.append("")
            else:
                yield block
                block = []
    if block:
        yield block


def _paragraph(block: list[str]) -> Iterator[str]:
    """Prose, and the literal text that follows the prose without a blank line."""
    end = next((number for number, line in enumerate(block) if _is_indented(line)), len(block))
    text = _joined(block[:end])
    if text.endswith("::"):
        text = text[:-1]
    if text != ":":
        yield escaped(text) + "\n"
    if end < len(block):
        yield as_code(textwrap.dedent("\n".join(block[end:])))


def _items(block: list[str], begins: Callable[[str], bool]) -> Iterator[list[str]]:
    item: list[str] = []
    for line in block:
        if begins(line) and item:
            yield item
            item = []
        item.append(line)
    yield item


def _entry(lines: list[str]) -> str:
    match = _ENTRY.match(_joined(lines))
    assert match is not None
    names = ", ".join(f"`{name.strip('`')}`" for name in match[1].split(", "))
    return f"- {names}: {escaped(match[2])}\n"


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


def _is_indented(line: str) -> bool:
    return line.startswith((" ", "\t"))
