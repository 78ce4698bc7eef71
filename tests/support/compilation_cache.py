"""JAX's persistent compilation cache for the tests, which spend most of their time compiling.

The cache lies outside the checkout, so a fresh clone on the same machine starts warm. The key is the program, the
options and jaxlib, so a changed program compiles again. Only processes that call `start` use the cache: the processes
of the tests, and a few others.

The cache never keeps a program with a collective in a loop or in another called computation. After loading on the CPU
(jaxlib 0.10.2), such programs sometimes compute NaN, crash or hang. `tests/parity/test_jax_checkpoint_matrix.py` failed
in 7 of 9 runs with such programs in the cache, and in 0 of 11 runs without them.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|ragged-all-to-all|reduce-scatter)(-start)?\("
)
_SECONDS = 0.0  # thousands of small programs take as long as a few large ones

_started = False


def cache_folder() -> Path:
    """The folder of compiled programs, below XDG_CACHE_HOME, by default ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "twinshard-tests" / "jax"


def loads_right(text: str) -> bool:
    """Whether a compiled program, given as XLA's text, computes the same after loading. See the module docstring."""
    called = text[: text.index("\nENTRY ")]
    return _COLLECTIVE.search(called) is None


def start() -> None:
    """Turn the cache on in this process. Does nothing before JAX is imported."""
    global _started
    if _started or "jax" not in sys.modules:
        return
    _started = True
    import jax
    from jax._src import compilation_cache

    put = compilation_cache.put_executable_and_time

    def put_if_it_loads_right(
        cache_key: str, module_name: str, executable: Any, backend: Any, compile_time: int
    ) -> None:
        if all(loads_right(module.to_string()) for module in executable.hlo_modules()):
            put(cache_key, module_name, executable, backend, compile_time)

    compilation_cache.put_executable_and_time = put_if_it_loads_right
    jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Compilations during the import of tests made JAX decide that there is no cache.
    compilation_cache.reset_cache()
