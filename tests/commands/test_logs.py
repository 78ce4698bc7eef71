"""What libraries of object stores log does not stand beside the command's error, unless the user asked for it."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.commands.main import hide_logs_of_stores
from tests.support.buckets import free_port

ROOT = Path(__file__).parents[2]
MAIN = "from bridge.commands.main import main; main()"
SPEAKING = """
import logging, sys
import bridge.commands.main as command

def speak():
    for name in ("gcsfs", "google.auth._default", "asyncio", "jax"):
        try:
            raise OSError("no network")
        except OSError:
            logging.getLogger(name).exception("said by %s", name)

command.app = lambda **_: speak()
"""


def stderr_of(program: str, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        env=os.environ | environment,
    )
    return done.stderr


def test_only_what_other_libraries_log_is_shown() -> None:
    shown = stderr_of(f"{SPEAKING}\ncommand.main()")
    assert shown.startswith("said by jax\nTraceback")
    assert shown.count("said by") == shown.count("Traceback") == 1


def test_what_the_user_configures_stays() -> None:
    shown = stderr_of(f"{SPEAKING}\nlogging.basicConfig()\ncommand.main()")
    assert shown.count("said by") == shown.count("Traceback") == 4


def test_a_program_without_a_handler_of_last_resort_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "lastResort", None)
    hide_logs_of_stores()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is None, reason="needs gcsfs")
def test_a_store_that_cannot_be_reached_is_one_error() -> None:
    nowhere = {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{free_port()}",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
    shown = stderr_of(MAIN, "inspect", "gs://bucket/x", **nowhere)
    assert shown.startswith("error: cannot list gs://bucket/x: ")
    assert shown.count("\n") == 1
