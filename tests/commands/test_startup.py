"""What a start imports: `twinshard --help` and `import twinshard` wait for no library of arrays, stores or pictures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LATE = {
    *("numpy", "ml_dtypes", "tensorstore", "zstandard", "fsspec", "matplotlib", "jinja2"),
    *("torch", "jax", "flax", "optax", "torch_impl", "jax_impl"),
}


def imported(program: str) -> set[str]:
    """The modules that ``program`` imports, without those of Python's own start."""
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"
        f"{program}\n"
        "print(*sorted(set(sys.modules) - before), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_no_library_that_a_subcommand_uses() -> None:
    modules = imported(
        "from bridge.commands.main import main\n"
        "sys.argv = ['twinshard', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0"
    )
    assert "bridge.commands.plan" in modules
    assert {module.partition(".")[0] for module in modules} & LATE == set()
    assert {
        module for module in modules if module.startswith(("bridge.core.formats", "bridge.core.mapping"))
    } == set()
    assert len(modules) < 300


def test_the_front_door_imports_the_standard_library_only() -> None:
    modules = imported("import twinshard")
    outside = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names)
    assert outside == {"twinshard", "bridge"}
    assert len(modules) < 80
