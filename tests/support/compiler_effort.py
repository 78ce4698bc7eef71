"""Lower the effort of XLA's CPU compiler in the fast tier.

Most of the tests' time went into LLVM's optimization of code that runs a few times. `QUICK_FLAGS` turn the optimization
off. Steps of small decoders then take 1.8 s of CPU time to compile instead of 9.4 s (jaxlib 0.10.2). XLA's earlier
work, such as partitioning, the order of collectives and buffer assignment, stays the same. Fusions differ a little, and
sums of products are not contracted to fused multiply-adds.

Tests of compiled programs and of last bits are marked `optimized` and compile like users' programs. So do all tests of
``make test-all``, which includes slow tests.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from typing import Any

# For each flag: the value for low effort, and the default value.
EFFORT: dict[str, tuple[Any, Any]] = {"xla_backend_optimization_level": (0, 3)}
# Later versions of jaxlib abort at an unknown flag.
if importlib.util.find_spec("jaxlib") and importlib.metadata.version("jaxlib").startswith("0.10."):
    EFFORT["xla_cpu_use_fusion_emitters"] = (False, True)
QUICK_FLAGS = [f"--{name}={str(quick).lower()}" for name, (quick, _) in EFFORT.items()]
FULL = {name: full for name, (_, full) in EFFORT.items()}

_full = False
_patched = False


def save_effort() -> None:
    """Compile quickly in this process and in its children. Call this before JAX is in use."""
    os.environ["XLA_FLAGS"] = " ".join([os.environ["XLA_FLAGS"], *QUICK_FLAGS])


def inherited_flags() -> str:
    """The flags that `save_effort` set, if any, for processes that set all other flags themselves."""
    return " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag in QUICK_FLAGS)


def use_full_effort(full: bool) -> None:
    """From now on compile with full effort or not, in this process but not in its children."""
    global _full, _patched
    if full and not _full and "jax" in sys.modules:
        import jax

        # Compile again the functions that earlier tests compiled quickly and share with this test.
        jax.clear_caches()
    _full = full
    if _patched or "jax" not in sys.modules:
        return
    _patched = True
    from jax._src import compiler

    options_of = compiler.get_compile_options

    def options_of_effort(*arguments: Any, **named: Any) -> Any:
        options = options_of(*arguments, **named)
        if _full:
            # The options of the caller come last and win.
            options.env_option_overrides = [*FULL.items(), *options.env_option_overrides]
        return options

    compiler.get_compile_options = options_of_effort
