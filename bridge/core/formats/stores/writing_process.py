"""Which process writes a checkpoint into a store, and whether it is alive, as far as this machine can tell."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

ACTIVE: Final[set[str]] = set()
"""The places that this process writes to."""


def this_process() -> dict[str, str]:
    return {"host": platform.node(), "boot": _boot(), "pid": str(os.getpid()), "began": _began(os.getpid())}


def lives(process: Mapping[str, str], root: str) -> bool:
    """Whether the process that wrote a claim is alive, as far as this machine can tell."""
    own = this_process()
    if (process.get("host"), process.get("boot")) != (own["host"], own["boot"]):
        return False
    if process.get("pid") == own["pid"]:
        return process.get("began") == own["began"] and root in ACTIVE
    began = _began(int(process.get("pid", "0")))
    return bool(began) and began == process.get("began")


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _began(pid: int) -> str:
    """When a process started, in ticks since system start; empty if there is no such process."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
