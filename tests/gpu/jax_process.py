"""A process in which JAX has the GPU: the tests' own has eight simulated devices, and torch's share of the memory.

Functions are run one after another, and return what the test then judges. A process that dies fails one test.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_GPU = {
    # Some arrays are computed on the host for comparison.
    "JAX_PLATFORMS": "cuda,cpu",
    # The tests' own flags are those of simulated devices. To tune programs takes time, and memory that would count.
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
_EXACT = {"XLA_FLAGS": f"{_GPU['XLA_FLAGS']} --xla_gpu_deterministic_ops=true"}
_REHEARSAL = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_disable_hlo_passes=cse_barrier_expander,small-while-loop-hoisting "
    "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


class JaxProcessError(AssertionError):
    """The function raised, or the process died; the text holds the traceback."""


class JaxProcess:
    """Starts with its first function, and again after it died or did not answer.

    ``exact``: a GPU adds in the same order each time, so that two runs have the same bits.
    """

    def __init__(self, on_gpu: bool, exact: bool = False) -> None:
        self._environment = {**_GPU, **(_EXACT if exact else {})} if on_gpu else _REHEARSAL
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection
        self._asked = ""

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 150) -> Any:
        """``function(*args)``, of a module's level; arguments and result travel by pickle."""
        self.start(function, *args)
        return self.result(timeout)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Let it run beside what this process does until ``result``."""
        if self._process is None:
            self._spawn()
        self._asked = function.__name__
        self._pipe.send_bytes(pickle.dumps((function.__module__, function.__name__, args)))

    def result(self, timeout: float = 150) -> Any:
        """What the function that was started returned; ``JaxProcessError`` with what it raised."""
        if not self._pipe.poll(timeout):
            self.close()
            raise JaxProcessError(f"{self._asked}: no answer within {timeout} s")
        try:
            status, value = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.close()
            raise JaxProcessError(f"{self._asked}: the process died; see its stderr") from None
        if status == "error":
            raise JaxProcessError(value)
        return value

    def close(self) -> None:
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def _spawn(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._environment), daemon=True)
        self._process.start()
        theirs.close()


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    while True:
        try:
            module, name, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            reply = ("ok", getattr(importlib.import_module(module), name)(*args))
        except BaseException:
            reply = ("error", traceback.format_exc())
        pipe.send_bytes(pickle.dumps(reply))
