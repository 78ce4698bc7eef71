"""Convert to destinations that fail: a full disk, a disk that becomes full, a read-only place.

    unshare --mount --map-root-user python -m tests.support.bridge.destinations MOUNT OUTSIDE

mounts a private tmpfs at MOUNT, and prints the results as JSON by format and case.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from bridge.checkpoints.convert import conversion
from bridge.commands.main import app
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.files import record

FORMATS = ("dcp", "orbax", "safetensors")
DISK = 12 << 20
TENSORS, ROWS = 24, 256
SIZE = TENSORS * ROWS * 256 * 4


def source(path: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    with create_checkpoint(path, "dcp") as writer:
        writer.add_object(("note",), f"seed {seed}")
        for number in range(TENSORS):
            name = writer.add_tensor((f"t{number}",), (ROWS, 256), np.dtype(np.float32)).name
            for box in writer.chunks(name):
                writer.write(name, box, rng.standard_normal(box.sizes).astype(np.float32))
    return path


def digest(path: Path) -> str | None:
    """Of all tensors and objects, None if nothing is there."""
    if not os.path.lexists(path):
        return None
    sha256 = hashlib.sha256()
    with open_checkpoint(path) as reader:
        for name in sorted(reader.tensors):
            sha256.update(name.encode() + reader.read(name).tobytes())
        sha256.update(repr(dict(reader.objects)).encode())
    return sha256.hexdigest()


def command(*arguments: object) -> dict[str, Any]:
    """Exit status and messages of `twinshard convert`."""
    result = CliRunner().invoke(app, ["convert", *map(str, arguments), "--parents", "--workers", "2"])
    crashed = result.exception is not None and not isinstance(result.exception, SystemExit)
    return {
        "status": result.exit_code,
        "said": result.stderr.splitlines(),
        "printed": result.stdout,
        "crashed": repr(result.exception) if crashed else None,
    }


def fill(mount: Path, left: int) -> None:
    """Leave this many bytes free on the disk."""
    free = shutil.disk_usage(mount).free
    with open(mount / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - left)


def vanishing(mount: Path, left: int) -> Callable[[Path, int], None]:
    """A check of the free space, after which another process takes the space."""

    def check(destination: Path, nbytes: int) -> None:
        require_space(destination, nbytes)
        fill(mount, left)

    return check


require_space = conversion.require_space


def full_disk(mount: Path, outside: Path, format: str) -> dict[str, Any]:
    """Too little space from the start, and space that vanishes: in a new, a replacing and a resumed conversion."""
    old, new, target = outside / "old", outside / "new", mount / "out"
    outcomes: dict[str, Any] = {"new": digest(new)}

    fill(mount, SIZE // 2)
    outcomes["too small"] = command(new, target, "--to", format) | {"there": names(mount)}
    (mount / "ballast").unlink()

    conversion.require_space = vanishing(mount, SIZE // 3)
    outcomes["vanished"] = command(new, target, "--to", format) | {"there": names(mount)}
    (mount / "ballast").unlink()

    # The old checkpoint has one weight only, because two whole checkpoints do not fit.
    conversion.require_space = require_space
    command(old, target, "--to", format, "--select", "t1", "--select", "note")
    outcomes["old"] = digest(target)
    # Small tensors are written and synced up to 1 MiB at a time.
    conversion.require_space = vanishing(mount, SIZE // 2)
    outcomes["replace"] = command(new, target, "--to", format, "--replace") | {"there": names(mount)}
    outcomes["replace"]["digest"] = digest(target)
    (mount / "ballast").unlink()

    outcomes["interrupted"] = command(new, target, "--to", format, "--replace", "--resume")
    outcomes["interrupted"] |= {"there": names(mount), "digest": digest(target)}
    (mount / "ballast").unlink()
    conversion.require_space = require_space
    outcomes["resumed"] = command(new, target, "--to", format, "--replace", "--resume", "--json")
    outcomes["resumed"] |= {"there": names(mount), "digest": digest(target)}
    shutil.rmtree(target)
    return outcomes


def refused(mount: Path, outside: Path, format: str) -> dict[str, Any]:
    """A directory without write permission, a read-only file system, a parent that is a file."""
    new = outside / "new"
    outcomes: dict[str, Any] = {}
    (mount / "private").mkdir(mode=0o555)
    outcomes["protected"] = without_privileges(
        lambda: command(new, mount / "private" / "out", "--to", format)
    )
    outcomes["protected"]["there"] = names(mount / "private")
    (mount / "private").rmdir()
    (mount / "file").write_text("precious")
    outcomes["a file"] = command(new, mount / "file" / "out", "--to", format)
    (mount / "file").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
    outcomes["read-only"] = command(new, mount / "out", "--to", format)
    subprocess.run(["mount", "-o", "remount,rw", str(mount)], check=True)
    outcomes["there"] = names(mount)
    return outcomes


def without_privileges(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a function in a process without superuser rights."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        version_3, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None, use_errno=True).capset(version_3, sets) == 0
        os.write(send, json.dumps(run()).encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as answers:
        data = answers.read()
    os.waitpid(child, 0)
    return dict(json.loads(data))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def main() -> None:
    mount, outside = map(Path, sys.argv[1:])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(mount)], check=True)
    record.SYNC_BYTES = 1 << 20
    source(outside / "old", 1)
    source(outside / "new", 2)
    outcomes = {f: {**full_disk(mount, outside, f), "refused": refused(mount, outside, f)} for f in FORMATS}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
