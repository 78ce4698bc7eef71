"""Convert to a disk that becomes full at different points, from the first file to the last.

    unshare --mount --map-root-user python -m tests.support.bridge.destination_sweep MOUNT OUTSIDE

mounts a private tmpfs at MOUNT, and prints the results as JSON: a list of cases for each format.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bridge.checkpoints.convert import conversion, engine
from bridge.core.formats.files import data_file, record
from tests.support.bridge import destinations
from tests.support.bridge.destinations import command, digest, fill, names, vanishing

TENSORS, ROWS = 8, 64
SIZE = TENSORS * ROWS * 256 * 4
PAGE = 4096
DISK, FILES = 4 << 20, 64
TARGETS = {"dcp": "a/out", "orbax": "a/out", "safetensors": "a/out", "one file": "out.safetensors"}
# No space; too little for the data; enough for the data but not for the other files; enough for everything.
LEFT = (0, PAGE, *range(SIZE // 4, SIZE, SIZE // 4), *range(SIZE - 4 * PAGE, SIZE + 12 * PAGE, 2 * PAGE))
CLI = "from tests.support.bridge.destination_sweep import full_cli; full_cli()"

require_space = conversion.require_space


def contents(path: Path) -> dict[str, bytes]:
    """The files of a checkpoint. If the checkpoint is a file, also the files next to it."""
    if path.is_dir():
        return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    return {p.name: p.read_bytes() for p in path.parent.glob(f"{path.name}*") if p.is_file()}


def alike(format: str, a: dict[str, bytes], b: dict[str, bytes]) -> bool:
    """Whether two attempts wrote the same. Orbax puts times and a random name in its files, but not in front."""
    if format != "orbax":
        return a == b
    values = [next(data for name, data in files.items() if name.startswith("d/"))[:SIZE] for files in (a, b)]
    plain = [sorted(name for name in files if not name.startswith("d/")) for files in (a, b)]
    return values[0] == values[1] and plain[0] == plain[1]


def clear(mount: Path) -> None:
    for path in mount.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def full_cli() -> None:
    """`twinshard`, its first argument a disk that becomes full after the check, its second how much is left."""
    from bridge.commands.main import main

    mount, left = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
    conversion.require_space = vanishing(mount, left)
    main()


class Sweep:
    """The cases of one format. `old` is the checkpoint that a conversion replaces."""

    def __init__(self, mount: Path, source: Path, old: Path, format: str) -> None:
        self.mount, self.source, self.old, self.format = mount, source, old, format
        self.target = mount / TARGETS[format]
        self.to = ["--to", "safetensors" if format == "one file" else format]
        self.want = digest(source)
        assert self.run()["status"] == 0
        self.whole = contents(self.target)
        clear(mount)

    def run(self, *flags: str) -> dict[str, Any]:
        return command(self.source, self.target, *self.to, *flags)

    def outcome(self, result: dict[str, Any]) -> dict[str, Any]:
        """With what is there now but the ballast, and whether it is all that should be."""
        conversion.require_space = require_space
        (self.mount / "ballast").unlink(missing_ok=True)
        shutil.rmtree(self.mount / "files", ignore_errors=True)
        there = [str(p.relative_to(self.mount)) for p in sorted(self.mount.rglob("*"))]
        done = result["status"] == 0 and alike(self.format, contents(self.target), self.whole)
        return result | {"there": there, "complete": done and digest(self.target) == self.want}

    def vanished(self, left: int) -> dict[str, Any]:
        conversion.require_space = vanishing(self.mount, left)
        return self.outcome(self.run())

    def begun_full(self, left: int) -> dict[str, Any]:
        fill(self.mount, left)
        return self.outcome(self.run())

    def no_more_files(self, left: int) -> dict[str, Any]:
        (self.mount / "files").mkdir()
        for number in range(os.statvfs(self.mount).f_ffree - left):
            (self.mount / "files" / str(number)).touch()
        return self.outcome(self.run())

    def resumed(self, left: int) -> dict[str, Any]:
        """Convert over an old checkpoint, then again after the space is back."""
        assert command(self.old, self.target, *self.to)["status"] == 0
        before = contents(self.target)
        conversion.require_space = vanishing(self.mount, left)
        first = self.outcome(self.run("--replace", "--resume"))
        kept = contents(self.target) == before
        if first["status"] == 0:
            return {"first": first, "kept": kept, "second": first, "bytes": None}
        second = self.outcome(self.run("--replace", "--resume", "--json"))
        taken = json.loads(second["printed"])["resumed_bytes"] if second["status"] == 0 else None
        return {"first": first, "kept": kept, "second": second, "bytes": taken}

    def in_a_process(self) -> dict[str, Any]:
        arguments = ["convert", self.source, self.target, *self.to, "--parents"]
        done = subprocess.run(
            [sys.executable, "-c", CLI, self.mount, str(SIZE // 2), *arguments],
            capture_output=True,
            text=True,
        )
        return self.outcome({"status": done.returncode, "said": done.stderr, "printed": done.stdout})

    def all(self) -> dict[str, Any]:
        outcomes: dict[str, Any] = {"in a process": self.in_a_process()}
        clear(self.mount)
        for case, points in (
            (self.vanished, LEFT),
            (self.begun_full, (0, PAGE, SIZE - PAGE)),
            (self.no_more_files, range(12)),
            (self.resumed, LEFT),
        ):
            outcomes[case.__name__] = []
            for left in points:
                outcomes[case.__name__].append(case(left))
                clear(self.mount)
        return outcomes


def main() -> None:
    mount, outside = map(Path, sys.argv[1:])
    options = f"size={DISK},nr_inodes={FILES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)], check=True)
    record.SYNC_BYTES = SIZE // 8
    # Small tensors are written together, up to 1 MiB: here one by one, so that some are there when the disk is full.
    engine.TOGETHER_BYTES = 1
    # Past the cache; tests.support.bridge.destinations goes through it.
    data_file._DIRECT_BYTES = 2 * PAGE
    destinations.TENSORS, destinations.ROWS = TENSORS, ROWS
    new = destinations.source(outside / "new", 3)
    destinations.TENSORS = 1
    old = destinations.source(outside / "old", 4)
    before = contents(new)
    outcomes = {format: Sweep(mount, new, old, format).all() for format in TARGETS}
    assert contents(new) == before
    assert names(mount) == []
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
