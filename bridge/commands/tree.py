"""A checkpoint's tensors as a tree, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console as RichConsole
from rich.text import Text
from rich.tree import Tree

from bridge.checkpoints.inspect.tensor_tree import Branch
from bridge.core.text import human_bytes, printable


def print_tree(console: RichConsole, title: str, branches: Iterable[Branch], depth: int | None) -> None:
    """Print a tree of ``depth`` levels of names; None: all levels. No name is cut; a terminal folds long lines."""
    tree = Tree(Text(printable(title)))
    widest = [len(title)]
    _add(tree, branches, depth, 1, widest)
    if not console.is_terminal:
        # A pipe has no width.
        console = type(console)(file=console.file, width=max(widest) + 1, color_system=None)
    console.print(tree, highlight=False)


def _add(tree: Tree, branches: Iterable[Branch], left: int | None, level: int, widest: list[int]) -> None:
    if left == 0:
        return
    for branch in branches:
        label = Text.assemble((printable(_name(branch)), "bold" if branch.below else ""), "  ", _told(branch))
        widest.append(4 * level + len(label))
        _add(tree.add(label), branch.below, None if left is None else left - 1, level + 1, widest)


def _name(branch: Branch) -> str:
    if not branch.numbers:
        return branch.name
    return f"{branch.prefix}{_ranges(branch.numbers)}{f'.{branch.name}' if branch.name else ''}"


def _told(branch: Branch) -> str:
    alike = f"{len(branch.numbers)} alike, " if branch.numbers else ""
    tensor = branch.tensor
    if tensor is not None and not branch.below:
        chunks = f", {len(tensor.chunks)} chunks" if len(tensor.chunks) != 1 else ""
        total = f" of {human_bytes(branch.nbytes)}" if branch.numbers else ""
        return f"{alike}{tensor.dtype.name} {list(tensor.shape)}, {human_bytes(tensor.nbytes)}{total}{chunks}"
    own = "" if tensor is None else f"{tensor.dtype.name} {list(tensor.shape)}; "
    return f"{alike}{own}{branch.tensors} tensor{'s' if branch.tensors != 1 else ''}, {human_bytes(branch.nbytes)}"


def _ranges(numbers: Sequence[int]) -> str:
    """{0..3, 8, 10..12}"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return f"{{{', '.join('..'.join(map(str, part)) for part in parts)}}}"
