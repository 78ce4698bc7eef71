"""Where the parts of a conversion meet: a working directory next to the destination, which each part can find.

Its name depends on source, destination, options and the number of parts, so parts with another source, mapping or
options meet in another directory. The destination is that directory, renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bridge.checkpoints.jobs.pieces import PartPlan
from bridge.core.formats.files.atomic import fsync_directory, rename_new, temporaries_of
from bridge.core.formats.files.journal import JOURNAL_FILE
from bridge.core.formats.files.manifest import read_manifest
from bridge.core.formats.files.part_files import PARTS_FOLDER
from bridge.core.formats.tensors.base import CheckpointError

PLAN_FILE = "plan.json"


@dataclass(frozen=True)
class Stage:
    """The parts of one conversion. key: what is converted, in how many parts; destination: an absolute path."""

    destination: Path
    key: Mapping[str, str]

    @cached_property
    def conversion(self) -> str:
        """The origin in the destination's manifest: the same for any number of parts."""
        return _digest({name: value for name, value in self.key.items() if name != "parts"})

    @cached_property
    def path(self) -> Path:
        return self.destination.with_name(f"{self.destination.name}.tmp-{_digest(self.key)[:8]}")

    @property
    def folder(self) -> Path:
        return self.path / PARTS_FOLDER

    @property
    def count(self) -> int:
        return int(self.key["parts"])

    def part(self, number: int) -> Path:
        """The directory of a part, which exists once the part is complete."""
        return self.folder / f"part_{number}"

    @property
    def missing(self) -> tuple[int, ...]:
        """Numbers of the incomplete parts."""
        return tuple(number for number in range(1, self.count + 1) if not self.part(number).is_dir())

    def committed(self) -> bool:
        """Whether the destination is there and was made by this conversion."""
        if not self.destination.is_dir():
            return False
        try:
            manifest = read_manifest(self.destination)
        except CheckpointError:
            return False
        return manifest is not None and manifest.conversion == self.conversion

    def create(self, plan: PartPlan) -> None:
        """Make the directory, unless another part has made it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._put(self.folder / PLAN_FILE, plan.to_json())
        self._put(self.path / JOURNAL_FILE, json.dumps(dict(self.key)) + "\n")
        noted = _key_of(self.path)
        if noted != dict(self.key):
            raise CheckpointError(
                f"{self.path} belongs to another conversion: expected {dict(self.key)}, found {noted}: choose another "
                "name for the destination"
            )

    def note(self, number: int, entries: Mapping[str, object]) -> None:
        """Save a part's report, before the part appears."""
        self._put(self.folder / f"part_{number}.json", json.dumps(dict(entries)), replace=True)

    def notes(self) -> list[Mapping[str, object]]:
        """The saved reports of all parts."""
        files = (self.folder / f"part_{number}.json" for number in range(1, self.count + 1))
        return [json.loads(file.read_text()) for file in files]

    def tidy(self) -> None:
        """Remove the remains of the parts once the destination is there."""
        shutil.rmtree(self.destination / PARTS_FOLDER, ignore_errors=True)
        (self.destination / JOURNAL_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def _put(self, path: Path, text: str, replace: bool = False) -> None:
        """Write a small file, which appears whole; an existing file stays, unless it should be replaced."""
        if path.exists() and not replace:
            return
        temporary = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
        # Parts on several machines may write the same file at once: each writes its own file, and one gets the name.
        temporary.write_text(text)
        try:
            if replace:
                os.replace(temporary, path)
            else:
                rename_new(temporary, path)
        except FileExistsError:
            temporary.unlink(missing_ok=True)
        # Sync the name before the part appears, which needs plan and notes.
        fsync_directory(path.parent)


def stages_at(destination: Path) -> dict[Path, Mapping[str, str]]:
    """The keys of all conversions in parts to this destination, by their directory."""
    return {
        directory: key
        for directory in temporaries_of(destination)
        if (directory / PARTS_FOLDER).is_dir() and (key := _key_of(directory))
    }


def _digest(key: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]


def _key_of(directory: Path) -> Mapping[str, str]:
    try:
        with (directory / JOURNAL_FILE).open() as file:
            key = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return key if isinstance(key, dict) else {}
