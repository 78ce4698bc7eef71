"""Choosing a step in a directory of steps, of any format, here or in a store.

    run/3  run/step_40  run/step-1000  run/checkpoint-500           directories
    run/step_40.pt  run/epoch=3-step=900.ckpt  run/checkpoint_100   files
    run/epoch=3-step=900-val_loss=0.35.ckpt

The step is the number after the word "step", else the last number, if names differ in no other. "latest" is the highest
complete step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, Literal

from bridge.core.formats.orbax.item import COMMIT_FILE, STEP_FILE, TREE_FILE
from bridge.core.formats.stores.store import is_url, open_store, store_errors, without_end
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.text import first_of

Step = int | Literal["latest"]
_NAME: Final = re.compile(r"(?:.*\D)?(\d{1,18})(?:\.(?:pt|pth|bin|ckpt|npz|msgpack|safetensors))?")
_SAID: Final = re.compile(r"step[-_=. ]?(\d{1,18})", re.IGNORECASE)
_NUMBERS: Final = re.compile(r"\d+")
_SHARD: Final = re.compile(r".*-\d+-of-\d+\.\w+")
_UNFINISHED: Final = re.compile(r".*\.orbax-checkpoint-tmp.*|.*\.tmp-[0-9a-f]{8}")
_OF_A_CHECKPOINT: Final = (TREE_FILE, STEP_FILE, ".metadata", "model.safetensors", "pytorch_model.bin")
_ENDS: Final = (TREE_FILE, ".metadata", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".msgpack")
_SHOWN = 10


class NoStepsError(CheckpointError):
    """The given path is not a directory of steps."""


def at_step(path: str | os.PathLike[str], step: Step | None) -> str | os.PathLike[str]:
    """The checkpoint of this step in the directory at `path`, a local path or a URL; `path` itself for None.

    CheckpointError if the step is missing or incomplete, if two names are this step, and for a path that is not a
    directory of steps. ValueError for an invalid step.
    """
    if step is None:
        return path
    if step != "latest" and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"step: expected a number of at least 0, or latest, got {step!r}")
    if is_url(path):
        url = without_end(str(path))
        system, root = open_store(url)
        with store_errors(f"cannot list {url}"):
            below = {
                name[len(root) + 1 :]: info
                for name, info in system.find(root, maxdepth=4, detail=True).items()
            }
        names = {name.partition("/")[0] for name in below}
        if not names:
            raise NoStepsError(f"{url}: expected a directory of steps (--step), found nothing there")
        chosen = _choose(url, step, names, lambda name: _files_of(name, below))
        return f"{url}/{chosen}"
    directory = Path(path)
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing there"
        raise NoStepsError(f"{directory}: expected a directory of steps (--step), found {found}")
    names = {child.name for child in directory.iterdir()}
    return directory / _choose(str(directory), step, names, lambda name: _local_files(directory / name))


def each_at_step(paths: Sequence[str | os.PathLike[str]], step: Step | None) -> list[str | os.PathLike[str]]:
    """The same for several paths; paths that are not directories of steps stay unchanged.

    CheckpointError if none is a directory of steps.
    """
    chosen, refusals = [], []
    for path in paths:
        try:
            chosen.append(at_step(path, step))
        except NoStepsError as error:
            chosen.append(path)
            refusals.append(error)
    if len(refusals) == len(paths):
        raise refusals[0]
    return chosen


def has_steps(names: Collection[str]) -> bool:
    """Whether any of these names in a directory may name a step."""
    return any(_NAME.fullmatch(name) and not _UNFINISHED.fullmatch(name) for name in names)


def _choose(where: str, step: Step, names: Collection[str], files: Callable[[str], Collection[str]]) -> str:
    if any(name in names for name in _OF_A_CHECKPOINT):
        raise NoStepsError(
            f"{where}: expected a directory of steps (--step), found one checkpoint: leave the step out"
        )
    numbers = {
        name: _step_in(name, match)
        for name in names
        if (match := _NAME.fullmatch(name)) and not _SHARD.fullmatch(name) and not _UNFINISHED.fullmatch(name)
    }
    content = {name: files(name) for name in numbers}
    whole = [name for name in numbers if any(file.endswith(_ENDS) or file == "" for file in content[name])]
    # Orbax before 0.12.3 wrote no such file on local disks, where directories appear complete.
    trees = [name for name in whole if _has(content[name], TREE_FILE)]
    if any(_has(content[name], COMMIT_FILE) for name in trees):
        whole = [name for name in whole if name not in trees or _has(content[name], COMMIT_FILE)]
    _require_one_number(where, whole)
    steps = sorted({numbers[name] for name in whole})
    if not steps:
        raise CheckpointError(
            f"{where}: expected a directory of steps (--step), found "
            f"{'only some whose save did not finish: ' if numbers else 'no step among '}"
            f"{first_of(sorted(numbers or names)) or 'no names'}"
        )
    wanted = steps[-1] if step == "latest" else step
    chosen = sorted(name for name in whole if numbers[name] == wanted)
    if len(chosen) != 1:
        seen = " and ".join(chosen) or ("one that is not complete" if wanted in numbers.values() else "none")
        raise CheckpointError(
            f"{where}: expected one step {wanted} (--step), found {seen}: complete are "
            f"{', '.join(map(str, steps[-_SHOWN:]))}"
        )
    return chosen[0]


def _step_in(name: str, last: re.Match[str]) -> int:
    said = _SAID.findall(name)
    return int(said[0] if len(said) == 1 else last[1])


def _require_one_number(where: str, names: Sequence[str]) -> None:
    """CheckpointError if names differ in several numbers, and no word says which number is the step."""
    starts: dict[str, str] = {}
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match and len(_SAID.findall(name)) != 1 and len(_NUMBERS.findall(name[: match.end(1)])) > 1:
            starts.setdefault(name[: match.start(1)], name)
    if len(starts) > 1:
        raise CheckpointError(
            f"{where}: expected names with one number, or with the word step before the number of the step (--step), "
            f"found {' and '.join([*starts.values()][:2])}: give the path of one"
        )


def _has(files: Collection[str], name: str) -> bool:
    return any(file.rpartition("/")[2] == name for file in files)


def _files_of(name: str, below: Collection[str]) -> list[str]:
    return [
        file[len(name) :].removeprefix("/") for file in below if file == name or file.startswith(f"{name}/")
    ]


def _local_files(where: Path) -> list[str]:
    """Files in a place and up to two directories below it; "" if the place itself is a file."""
    if not where.is_dir():
        return [""]
    return [str(file.relative_to(where)) for pattern in ("*", "*/*", "*/*/*") for file in where.glob(pattern)]
