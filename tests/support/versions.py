"""Test both runtimes at both ends of the versions that ``pyproject.toml`` allows: ``python versions.py low new``.

Each end has its own environment, ``.venv-low`` or ``.venv-new``. In it the script runs the tests of ``SLICE``, the
``quick`` relay and a conversion. The script itself needs only the standard library.

``python versions.py --interpreter maxtext`` prints the interpreter for another environment of the Makefile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = {"low": "3.11", "new": "3.14", "maxtext": "3.12"}
# The low end is pinned. The new end upgrades every package at every run.
INSTALL = {"low": ["-c", "constraints-lowest.txt"], "new": ["--upgrade", "--upgrade-strategy", "eager"]}
SHOWN = ("torch", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ml_dtypes", "tensorstore")
# The tests that touch other packages most. They take about seven minutes on two cores.
SLICE = (
    # DTensor: dispatch of operators, optimizers of torch.optim, state dicts of torch.distributed.checkpoint.
    "tests/torch_impl/dtensor/test_tensor.py",
    "tests/torch_impl/dtensor/test_state_dict.py",
    "tests/torch_impl/optimizer/test_main_weight_adamw.py",
    # Autograd's engine, hooks, torch.compile, several mesh axes.
    "tests/torch_impl/runtime/test_programs.py",
    "tests/torch_impl/runtime/test_compile.py",
    "tests/torch_impl/runtime/test_composition.py",
    # Comparison with FSDP2, which changes from version to version.
    "tests/torch_impl/test_against_fsdp2.py",
    "tests/torch_impl/parallel/test_modules.py",
    # jaxprs (scans, loops, remat), nnx, linen, the text of compiled programs.
    "tests/jax_impl/modules/test_seal.py",
    "tests/jax_impl/test_train.py",
    "tests/jax_impl/comm/test_mesh.py",
    "tests/jax_impl/modules/test_linen_models.py",
    "tests/jax_impl/diagnostics/test_compiled_collectives.py",
    # Names of operations, in jaxprs and in compiled programs.
    "tests/jax_impl/runtime/test_derived.py",
    "tests/jax_impl/diagnostics/test_scopes.py",
    # Orbax and DCP checkpoints, read and written by their own libraries and by ours.
    "tests/jax_impl/checkpoint/test_checkpoint.py",
    "tests/formats/orbax/test_writer.py",
    "tests/formats/dcp/test_pickle_fast.py",
    "tests/checkpoints/test_convert_runtimes.py",
    # The bits of AdamW, which depend on XLA.
    "tests/parity/test_jax_adamw.py",
    # Float8: formats, casts, and the kernels of each torch version.
    "tests/parity/test_jax_moments.py",
    "tests/torch_impl/runtime/test_float8_products.py",
    "tests/jax_impl/runtime/test_float8.py",
    # Asynchronous saves, with threads of DCP and Orbax.
    "tests/torch_impl/checkpoint/test_async.py",
    "tests/jax_impl/checkpoint/test_async.py",
)


def main(ends: list[str]) -> int:
    """Run the ends one after another. Prints the name of each failed step on stderr; returns 1 if any step failed."""
    if ends[:1] == ["--interpreter"]:
        print(interpreter(ends[1]))
        return 0
    failed = [f"{end}: {step}" for end in ends or list(INSTALL) for step in run(end)]
    for failure in failed:
        print(f"failed: {failure}", file=sys.stderr)
    return bool(failed)


def run(end: str) -> Iterator[str]:
    """Build the environment of an end and run all steps in it. Yields the failed steps."""
    folder = ROOT / f".venv-{end}"
    python, started = folder / "bin" / "python", time.monotonic()
    if not python.exists():
        call(interpreter(end), "-m", "venv", folder)
    if call(python, "-m", "pip", "install", "--quiet", *INSTALL[end], "-e", ".[all,test]"):
        yield "installation"
        return
    print(f"{end}: installed in {time.monotonic() - started:.0f} s", flush=True)
    call(
        python,
        "-c",
        f"import importlib.metadata as m; print(*(f'{{n}} {{m.version(n)}}' for n in {SHOWN!r}), sep=', ')",
    )
    with tempfile.TemporaryDirectory(prefix="versions-") as scratch:
        out, copy = Path(scratch, "relay"), Path(scratch, "copy")
        source = out / "leg3-torch" / "checkpoint"
        twinshard = folder / "bin" / "twinshard"
        steps = {
            "tests": [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SLICE],
            "relay": [twinshard, "relay", "quick", "--out", out],
            "convert": [twinshard, "convert", source, copy, "--mapping", "decoder"],
            "diff": [twinshard, "diff", source, copy, "--mapping", "decoder"],
        }
        for name, command in steps.items():
            started = time.monotonic()
            if call(*command):
                yield name
            print(f"{end}: {name} took {time.monotonic() - started:.0f} s", flush=True)


def call(*command: object) -> int:
    return subprocess.run(list(map(str, command)), cwd=ROOT).returncode


def interpreter(end: str) -> str:
    """The interpreter from ``PYTHON_LOW``, ``PYTHON_NEW`` or ``PYTHON_MAXTEXT``, or the first usual interpreter that
    runs.

    Raises SystemExit if no interpreter runs.
    """
    version, variable = PYTHONS[end], f"PYTHON_{end.upper()}"
    chosen = os.environ.get(variable)
    tried = [chosen] if chosen else list(_candidates(version))
    for command in tried:
        # pyenv's shims exist, but fail for versions that are not selected.
        if _runs(command, None if chosen else version):
            return command
    raise SystemExit(
        f"Python {version}: expected an interpreter that runs, found none among {', '.join(tried)}; set "
        f"{variable}=/path/to/python{version}"
    )


def _candidates(version: str) -> Iterator[str]:
    yield f"python{version}"
    yield sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")))


def _runs(command: str, version: str | None) -> bool:
    if shutil.which(command) is None:
        return False
    completed = subprocess.run(
        [command, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
    )
    return completed.returncode == 0 and version in (None, completed.stdout.strip())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
