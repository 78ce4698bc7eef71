"""How much work XLA's CPU compiler puts into the programs of tests: in the fast tier little.

Most of the tests' time was LLVM's, which made machine code fast that ran a few times. `QUICK_FLAGS` leave that out:
steps of small decoders then compile in a sixth of the time (jaxlib 0.10.2: 9.4 s of CPU time became 1.8 s). What XLA
does before, such as partitioning, the order of collectives and the assignment of buffers, stays. Fusions differ a
little, and sums of products are not contracted to fused multiply-adds.

Tests of compiled programs and of last bits are marked `optimized`, and compile as users do. So do all tests where slow
ones are asked for: ``make test-all``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from typing import Any

# By flag: with little effort, and as it is by default.
EFFORT: dict[str, tuple[Any, Any]] = {"xla_backend_optimization_level": (0, 3)}
# Later jaxlibs abort at a flag that they do not know.
if importlib.util.find_spec("jaxlib") and importlib.metadata.version("jaxlib").startswith("0.10."):
    EFFORT["xla_cpu_use_fusion_emitters"] = (False, True)
QUICK_FLAGS = [f"--{name}={str(quick).lower()}" for name, (quick, _) in EFFORT.items()]
FULL = {name: full for name, (_, full) in EFFORT.items()}

_full = False
_patched = False


def save_effort() -> None:
    """Compile quickly in this process and in those that it starts; before JAX is in use."""
    os.environ["XLA_FLAGS"] = " ".join([os.environ["XLA_FLAGS"], *QUICK_FLAGS])


def inherited_flags() -> str:
    """The flags of `save_effort`, if any: for processes that set all other flags themselves."""
    return " ".join(flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag in QUICK_FLAGS)


def use_full_effort(full: bool) -> None:
    """Whether this process, not those that it starts, compiles as users do from now on."""
    global _full, _patched
    if full and not _full and "jax" in sys.modules:
        import jax

        # Functions that earlier tests compiled quickly, and share with this one, compile again.
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
            # What a caller asks for comes last, and prevails.
            options.env_option_overrides = [*FULL.items(), *options.env_option_overrides]
        return options

    compiler.get_compile_options = options_of_effort
