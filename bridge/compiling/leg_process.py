"""A process that compiles for one platform: ``Leg`` talks to the process, and ``serve`` is its main function.

XLA reads its environment once, and libtpu belongs to one process, so no compiler runs in the process of the command.
A request is one line of JSON on standard input, and its answer is one line on standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from bridge.compiling.machines import tpu_text
from bridge.compiling.machines.compilers import environment, folders
from bridge.planning.models.errors import PlanError

_LONGEST = 3000
"""The number of letters of an error that are passed on."""


class LegError(RuntimeError):
    """The error that the process reported, or the end of its output if the process ended."""


class Leg:
    """Starts at the first request and runs until ``close``. ``module``: the argument of ``python -m``."""

    def __init__(self, module: str, platform: str) -> None:
        self.module, self.platform = module, platform
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  # open as long as the process
        self._texts = tempfile.TemporaryDirectory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        return self._process is not None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises ``LegError`` if there is no answer."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = process.wait()
            self._process = None
            self._errors.seek(0)
            raise LegError(
                f"the compiler's process ended with {status}: {self._errors.read()[-_LONGEST:].strip()}"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise LegError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process, even during a compilation."""
        self.restart()
        self._errors.close()
        self._texts.cleanup()

    def restart(self) -> None:
        """The next request starts a new process."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        libraries = [*folders(), *map(Path, sys.path)]
        texts = tpu_text.settings(self._texts.name, libraries) if self.platform == "tpu" else {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**environment(self.platform), **texts},
        )
        return self._process


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the requests on standard input, one after the other."""
    # Compilers also write to standard output, so answers get a separate descriptor.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                reply = answer(json.loads(line))
            except PlanError as error:
                reply = {"error": str(error)}
            except Exception as error:
                reply = {"error": f"{type(error).__name__}: {error}"[:_LONGEST]}
            print(json.dumps(reply), file=answers, flush=True)
