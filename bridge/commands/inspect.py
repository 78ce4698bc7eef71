"""`twinshard inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from bridge.commands.grouping import print_left_alone
from bridge.commands.option_groups import grouped_options
from bridge.commands.options import ItemOptions, JsonOption, user_errors
from bridge.commands.output import Console, print_json, print_line, print_table
from bridge.core.text import counted, human_bytes, printable
from bridge.core.text_files import MAX_JSON, read_text

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.tree import Tree

    from bridge.checkpoints.inspect.summary import Summary
    from bridge.checkpoints.inspect.tensor_tree import Branch
    from bridge.core.sharding.layout.layout import Layout

_CHECKPOINTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".msgpack"})
"""Suffixes of files that are not layouts."""
_GROUPS = "param_groups"


@dataclass(frozen=True)
class DrawingOptions:
    """Which parts of a checkpoint are shown."""

    layout: Annotated[
        bool, typer.Option("--layout", help="Draw to scale which chunk or rank holds which rows.")
    ] = False
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --layout: also draw a .png, .svg or .pdf.")
    ] = None
    tree: Annotated[
        bool | None,
        typer.Option(
            "--tree/--list", help="A tree, or a row for each tensor; default: a tree on a terminal."
        ),
    ] = None
    depth: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Show a tree of only the first N levels of names.")
    ] = None

    def __post_init__(self) -> None:
        if self.depth is not None and self.tree is False:
            raise typer.BadParameter("--depth limits a tree: expected no --list with --depth")
        if self.layout and (self.tree is not None or self.depth is not None):
            raise typer.BadParameter("--layout draws chunks: expected no --tree, --list or --depth as well")
        if self.picture is not None and not self.layout:
            raise typer.BadParameter("--picture needs --layout")


@grouped_options
def inspect(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="Checkpoint of any format; with --layout also a layout file."),
    ],
    drawing: DrawingOptions,
    which: ItemOptions,
    json: JsonOption = False,
) -> None:
    """List the contents of a checkpoint.

    The command shows the shape, dtype, size and number of stored chunks of each tensor. On a terminal it prints a tree
    with the counts and bytes of each group, and equal layers are one branch, {0..31}. In a pipe it prints a row for
    each tensor, with its whole name, and totals by group. Values that are not tensors follow; with --depth, deeper
    ones are only counted. The first line says whether there is a manifest, for `twinshard verify`.

    With --layout, the command draws to scale instead. For a checkpoint the drawing shows which chunk stores which
    rows. For a layout file (the JSON of a planned layout) it shows the rows of each rank, with dots for padding.

    \b
    Example:
      twinshard inspect runs/torch/step_40
      twinshard inspect runs/torch/step_40 --depth 2
      twinshard inspect runs/torch/step_40 --list | grep exp_avg
      twinshard inspect layout.json --layout --picture layout.png
    """
    from bridge.checkpoints.inspect.chart import PictureError, chunks_figure, save_picture
    from bridge.checkpoints.inspect.summary import inspect as run
    from bridge.core.formats.stores.store import place_of

    out = Console()
    step = which.step_number()
    with user_errors(PictureError, json=json):
        location = place_of(path)
        if drawing.layout and isinstance(location, Path) and not _is_checkpoint(location):
            _inspect_layout_file(out, location, drawing.picture, json)
            return
        summary = run(path, items=which.items, step=step)
        if drawing.picture is not None:
            save_picture(chunks_figure(summary.tensors), drawing.picture)
    if json:
        print_json(out, _document(summary))
    else:
        _print(out, summary, drawing)


def _is_checkpoint(location: Path) -> bool:
    return location.is_dir() or location.suffix in _CHECKPOINTS


def _document(summary: Summary) -> dict[str, object]:
    tensors = [
        {
            "name": tensor.name,
            "path": tensor.path,
            "shape": tensor.shape,
            "dtype": tensor.dtype.name,
            "bytes": tensor.nbytes,
            "chunks": [{"offsets": chunk.offsets, "sizes": chunk.sizes} for chunk in tensor.chunks],
        }
        for tensor in summary.tensors
    ]
    totals = {"bytes": summary.bytes, "num_chunks": summary.chunks}
    return {**vars(summary), **totals, "tensors": tensors}


def _print(out: Console, summary: Summary, drawing: DrawingOptions) -> None:
    from bridge.checkpoints.inspect.summary import chunk_lines
    from bridge.checkpoints.inspect.tensor_tree import tensor_tree

    title = summary.summary()
    if drawing.layout:
        for line in [title, *chunk_lines(summary.tensors)]:
            print_line(out, line)
        return
    depth = drawing.depth
    as_tree = drawing.tree or depth is not None or (drawing.tree is None and out.is_terminal)
    if as_tree:
        print_tree(out, title, tensor_tree(summary.tensors), depth)
    else:
        print_line(out, title)
        _print_list(out, summary)
    if summary.certificate is not None:
        print_line(out, str(summary.certificate))
    print_left_alone(out, summary.left_alone)
    for name, implementation in summary.key_types.items():
        print_line(out, f"{name} is a typed PRNG key, key<{implementation}>")
    _print_objects(out, summary, depth, fold=as_tree)
    for name, reason in summary.unreadable.items():
        print_line(out, f"{name} cannot be read: {reason}")


def print_tree(console: RichConsole, title: str, branches: Iterable[Branch], depth: int | None) -> None:
    """Print a tree of ``depth`` levels of names; None: all levels. No name is cut; a terminal folds long lines."""
    from rich.tree import Tree

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


def _print_objects(out: Console, summary: Summary, depth: int | None, *, fold: bool) -> None:
    """Print the values that are not tensors; of values deeper than ``depth``, only the number.

    fold: a value that three or more of an optimizer's ``param_groups`` have in common is printed once.
    """
    from bridge.checkpoints.inspect.tensor_tree import ALIKE
    from bridge.core.formats.tensors.leaves import separator_of
    from bridge.core.mapping.states.notes import PLACES

    deeper: Counter[str] = Counter()
    alike: dict[tuple[str, ...], list[tuple[str, list[str]]]] = {}
    for name, value in summary.objects.items():
        if summary.object_paths[name] == PLACES and isinstance(value, dict):
            print_line(
                out, f"{name}: the places of {' and '.join(value)}, for the way back (--json prints them)"
            )
            continue
        words = [word for key in summary.object_paths[name] for word in str(key).split(".")]
        # Flat optimizer states have groups by parameter: param_groups.layers.0.weight.lr
        head = words.index(_GROUPS) + 1 if fold and _GROUPS in words[:-2] else len(words)
        if depth is None or len(words) <= depth:
            # Each group has its own list of parameters.
            same = "[...]" if words[-1] == "params" and head < len(words) else repr(value)
            alike.setdefault((*words[:head], words[-1], same), []).append((name, words[head:]))
        else:
            shown = words[: min(depth, head)]
            deeper[separator_of(summary.format).join(shown) or "in all"] += 1
    for (*path, last, value), members in alike.items():
        if len(members) < ALIKE:
            for name, _ in members:
                print_line(out, f"{name} = {summary.objects[name]!r}")
        else:
            first, final = (".".join(words[:-1]) for _, words in (members[0], members[-1]))
            groups = f"{{{first} ... {final}: {len(members)} alike}}"
            print_line(out, f"{separator_of(summary.format).join([*path, groups, last])} = {value}")
    for group, count in deeper.items():
        print_line(out, f"{group}: {counted(count, 'value')} in addition to the tensors")


def _print_list(out: Console, summary: Summary) -> None:
    heading, *rows = summary.table()
    print_table(out, heading, rows, left=2)
    # With flat names each tensor is its own group: the second table would repeat the first.
    if not {group.name for group in summary.groups} <= {tensor.name for tensor in summary.tensors}:
        totals = [(g.name, str(g.tensors), str(g.elements), human_bytes(g.bytes)) for g in summary.groups]
        print_table(out, ("group", "tensors", "elements", "size"), totals)


def _inspect_layout_file(out: Console, path: Path, picture: Path | None, json: bool) -> None:
    from bridge.checkpoints.inspect.chart import layout_figure, save_picture
    from bridge.core.formats.stores.store import hub_hint
    from bridge.core.formats.tensors.base import CheckpointError
    from bridge.core.sharding.layout.layout import Layout

    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: expected a layout file or a checkpoint directory there{hub_hint(path)}"
        )
    text = read_text(
        path, lambda text: CheckpointError(f"layout file {text}"), most=MAX_JSON, expected="JSON"
    )
    try:
        layout = Layout.from_json(text)
    except ValueError as error:
        raise CheckpointError(f"layout file {path}: {error}") from None
    if picture is not None:
        save_picture(layout_figure(layout), picture)
    if json:
        print_json(out, {"path": path, **_layout_numbers(layout)})
        return
    for line in [*layout.render().splitlines(), f"fingerprint {layout.fingerprint}"]:
        print_line(out, line)


def _layout_numbers(layout: Layout) -> dict[str, object]:
    """The layout as JSON values, with rows by rank only where the ranks are few enough to list."""
    from bridge.core.sharding.layout.drawing import MAX_RANKS
    from bridge.core.sharding.layout.layout import SLOT_FIELDS

    ranks = range(layout.num_shards if layout.num_shards <= MAX_RANKS else 0)
    buffers = []
    for buffer, size in enumerate(layout.shard_sizes):
        elements = sum(slot.numel for slot in layout.occupied(buffer))
        padding = layout.num_shards * size - elements
        buffers.append({"shard_size": size, "elements": elements, "padding": padding})
    tensors = [
        {
            **{field: getattr(slot, field) for field in SLOT_FIELDS},
            "rows": [layout.row_range(slot.name, rank) for rank in ranks] or None,
        }
        for slot in layout.slots
    ]
    return {
        "num_shards": layout.num_shards,
        "elements": layout.numel,
        "padded": layout.padded_size,
        "overhead": layout.overhead(),
        "fingerprint": layout.fingerprint,
        "buffers": buffers,
        "tensors": tensors,
    }
