"""Directories of steps, as a loop that saves every so often leaves them, and choosing a step in one.

::

    run/3    run/4    run/5.orbax-checkpoint-tmp      4: the save of 5 did not finish
    run/step_3 ...                                    prefixes, and zeros before the number, are fine
"""

from __future__ import annotations

import re
from pathlib import Path

from bridge.core.formats.files.atomic import is_unfinished
from bridge.core.formats.orbax.item import COMMIT_FILE, TREE_FILE
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.text import first_of

_STEP = re.compile(r"(?:.+_)?(\d+)")
_OF_A_CHECKPOINT = (TREE_FILE, "_CHECKPOINT_METADATA", ".metadata")
_SHOWN = 10


def choose_step(path: Path, step: int | None) -> Path:
    """The directory of the latest complete step in ``path``, or of ``step``; ``path`` itself if it is a checkpoint.

    Raises ``CheckpointError`` where the step is not there or not complete, and for one that two directories are;
    ``ValueError`` for a step that is no int.
    """
    if isinstance(step, bool) or not (step is None or hasattr(step, "__index__")):
        raise ValueError(f"step: expected an int or None, got {step!r}")
    is_checkpoint = any((path / name).exists() for name in _OF_A_CHECKPOINT)
    numbers = {} if is_checkpoint or not path.is_dir() else _numbers(path)
    if not numbers:
        if step is None:
            return path
        raise CheckpointError(
            f"step: expected a directory of steps at {path}, got another: leave step out to load a single checkpoint"
        )
    complete = _complete(list(numbers))
    known = sorted({numbers[child] for child in complete})
    if step is None and not known:
        raise CheckpointError(
            f"{path}: expected a complete step, got only some whose save did not finish: "
            f"{first_of(sorted(child.name for child in numbers))}"
        )
    wanted = known[-1] if step is None else step
    chosen = [child for child in complete if numbers[child] == wanted]
    if len(chosen) != 1:
        seen = " and ".join(sorted(child.name for child in chosen)) or (
            "one whose save did not finish" if wanted in numbers.values() else "none"
        )
        listed = ", ".join(map(str, known[-_SHOWN:]))
        raise CheckpointError(
            f"step: expected one complete step {wanted} in {path}, got {seen}: complete are {listed or 'none'}"
        )
    return chosen[0]


def complete_steps(path: Path) -> dict[int, list[Path]]:
    """The complete steps in a directory, by number, in order; none where there is no directory.

    Two directories may have one number, such as ``3`` and ``step_3``.
    """
    numbers = _numbers(path) if path.is_dir() else {}
    by_number: dict[int, list[Path]] = {}
    for child in sorted(_complete(list(numbers)), key=lambda child: (numbers[child], child.name)):
        by_number.setdefault(numbers[child], []).append(child)
    return by_number


def _numbers(path: Path) -> dict[Path, int]:
    return {
        child: int(named[1])
        for child in path.iterdir()
        if (named := _STEP.fullmatch(child.name)) and child.is_dir() and not is_unfinished(child)
    }


def _complete(steps: list[Path]) -> list[Path]:
    """Those that have a tree of arrays, and the file that is written last."""
    # DCP writes its own last file last.
    dcp = [step for step in steps if (step / ".metadata").exists()]
    trees = [step for step in steps if _has(step, TREE_FILE)]
    # Orbax before 0.12.3 wrote no such file on disks, where directories appear complete.
    return [*dcp, *([step for step in trees if _has(step, COMMIT_FILE)] or trees)]


def _has(step: Path, name: str) -> bool:
    return any(next(step.glob(pattern + name), None) for pattern in ("", "*/"))
