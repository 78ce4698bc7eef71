"""Which part of a checkpoint is used: selected or dropped names, weights only.

Names are as in `twinshard inspect`, patterns as in a shell: `*` is any text, `?` one character, `[ab]` one of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bridge.checkpoints.ground.outputs import some_with_reasons
from bridge.core.formats.tensors.base import (
    CheckpointError,
    CheckpointReader,
    TreePath,
    UnreadableValue,
    drop_options,
)
from bridge.core.formats.tensors.leaves import EMPTY, tree_kinds
from bridge.core.formats.tensors.wrapping import ReadWhenAsked, WrappingReader
from bridge.core.text import counted

WEIGHT_ROOTS = frozenset({"model", "params", "module", "state_dict", "weights"})
"""Top-level keys below which checkpoints keep weights."""

_OF_MODELS = WEIGHT_ROOTS | {"batch_stats"}
"""The keys of weights, and flax's key of batch statistics: without the statistics, a model's results differ."""

STATE_ROOTS = frozenset(
    {
        *("optimizer", "optimizers", "optim", "opt_state", "opt", "lr_scheduler", "scheduler", "dataloader"),
        *("train", "train_state", "step", "rng", "rngs", "variables", "ema"),
    }
)
"""Top-level keys of everything else in checkpoints of training runs."""


@dataclass(frozen=True)
class Selection:
    """Which part of a checkpoint is used: names that match `select` (all, if empty) and not `drop`.

    weights_only: use everything below a key `model`, `params` or the like, and below `batch_stats`. Without such a key,
    use all but optimizer and training state. A flat name such as `model.layers.0.weight` has no key: the same model has
    `lm_head.weight`.
    """

    select: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    weights_only: bool = False

    @property
    def everything(self) -> bool:
        """Whether nothing is left out."""
        return not (self.select or self.drop or self.weights_only)

    def of(self, paths: Mapping[str, TreePath], elsewhere: Iterable[str] = ()) -> frozenset[str]:
        """Which of these names are selected. CheckpointError for a pattern that matches no name.

        elsewhere: further names that a drop pattern may match.
        """
        for option, patterns, known in (
            ("select", self.select, [*paths]),
            ("drop", self.drop, [*paths, *elsewhere]),
        ):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in known):
                    raise CheckpointError(
                        f"--{option} {pattern}: expected a pattern that matches a name, got one that matches none of "
                        f"{len(known)}, such as {', '.join(known[:3])}"
                    )
        names: Iterable[str] = paths
        if self.select:
            names = [name for name in names if _any(name, self.select)]
        names = [name for name in names if not _any(name, self.drop)]
        if self.weights_only:
            has_key = any(len(path) > 1 and path[0] in WEIGHT_ROOTS for path in paths.values())
            names = [
                name
                for name in names
                if (
                    root_of(paths[name]) in _OF_MODELS if has_key else root_of(paths[name]) not in STATE_ROOTS
                )
            ]
        return frozenset(names)


class SelectedReader(WrappingReader):
    """A checkpoint reduced to its selected part; see `CheckpointReader`. Closing it closes the checkpoint.

    `left_out`: the names of everything else.
    """

    def __init__(self, reader: CheckpointReader, selection: Selection, elsewhere: Iterable[str] = ()) -> None:
        super().__init__(reader)
        paths = {**{name: info.path for name, info in reader.tensors.items()}, **reader.object_paths}
        wanted = selection.of(paths, elsewhere)
        if selection.weights_only:
            # None and empty containers among the weights belong to their tree.
            kinds = tree_kinds(reader)
            values = [name for name in reader.object_paths if name in wanted and kinds.get(name) not in EMPTY]
            require_no_tensors(reader, values)
            wanted -= {*values}
        self.left_out: Sequence[str] = [name for name in paths if name not in wanted]
        self.tensors = {name: info for name, info in reader.tensors.items() if name in wanted}
        if not self.tensors and reader.tensors:
            raise CheckpointError(
                f"{reader.path}: none of {counted(len(reader.tensors), 'tensor')} is selected: expected at least one"
            )
        self.object_paths = {name: path for name, path in reader.object_paths.items() if name in wanted}
        self.objects = ReadWhenAsked(self.object_paths, reader.objects.__getitem__)


def selected_pair(
    a: CheckpointReader, b: CheckpointReader, selection: Selection
) -> tuple[CheckpointReader, CheckpointReader]:
    """Two checkpoints to compare: the selected part of ``a``, and ``b`` without dropped names and training state."""
    if selection.everything:
        return a, b
    names = (*b.tensors, *b.object_paths)
    dropped = tuple(
        pattern for pattern in selection.drop if any(fnmatchcase(name, pattern) for name in names)
    )
    of_b = Selection(drop=dropped, weights_only=selection.weights_only)
    return SelectedReader(a, selection, names), b if of_b.everything else SelectedReader(b, of_b)


def readable_values(reader: CheckpointReader, names: Iterable[str]) -> dict[str, object]:
    """The values of these objects. One CheckpointError for all unreadable ones, with options that leave them out."""
    values: dict[str, object] = {}
    closed: dict[str, UnreadableValue] = {}
    for name in names:
        try:
            values[name] = reader.objects[name]
        except UnreadableValue as error:
            closed[name] = error
    if not closed:
        return values
    advice = f"leave out what is not needed ({drop_options([*closed])})"
    with suppress(CheckpointError):
        SelectedReader(reader, Selection(weights_only=True))
        advice += ", or everything but weights (--weights-only)"
    if len(closed) == 1:
        raise CheckpointError(f"{next(iter(closed.values()))}; {advice}")
    reasons = {name: error.reason for name, error in closed.items()}
    raise CheckpointError(
        f"{reader.path}: expected values that can be read, found {len(closed)} that cannot: object "
        f"{some_with_reasons(reasons)}; {advice}"
    )


def require_no_tensors(reader: CheckpointReader, names: Iterable[str]) -> None:
    """CheckpointError if any of these values is a weight that cannot be read, such as a DTensor of torch.save.

    Without the check, a mapping or a template finds no tensor of that name, and does not say why.
    """
    closed = {}
    for name in names:
        try:
            reader.objects[name]
        except CheckpointError as error:
            # Values that are left out may be damaged.
            if isinstance(error, UnreadableValue) and error.holds_tensors:
                closed[name] = error.reason
    if closed:
        raise CheckpointError(
            f"{reader.path}: expected weights that can be read, found {some_with_reasons(closed)}: "
            f"save them as plain tensors, or leave them out ({drop_options([*closed])})"
        )


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def root_of(path: TreePath) -> str:
    """The first key of a path, even as a part of a flat name."""
    return str(path[0]).partition(".")[0]
