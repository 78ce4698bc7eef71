"""Why a compiler cannot be used here is said by name; its process gets no setting of the simulated devices."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jax_impl.diagnostics.scheduled import Array, Scheduled
from tests.support.compilers import targets
from tests.support.compilers.setting import Compiled, Setting, Stored
from tests.support.compilers.worker import Compiler

HOLD = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the only one in which compilers are searched."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(targets, "FOLDER", tmp_path / "compilers")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "compilers"


def test_missing_packages_are_named_with_what_installs_them(installed: Path):
    assert targets.why_not("tpu") == (
        'the TPU compiler is not installed (libtpu): make compilers, or pip install "twinshard[compilers]"'
    )
    Path(installed, "jax_plugins", "xla_cuda12").mkdir(parents=True)
    reason = targets.why_not("gpu")
    assert reason is not None
    assert "(nvidia-cuda-nvcc-cu12)" in reason
    Path(installed, "nvidia", "cuda_nvcc").mkdir(parents=True)
    assert targets.why_not("gpu") is None


def test_a_lock_of_libtpu_that_another_process_holds_is_named(installed: Path, tmp_path: Path):
    Path(installed, "libtpu").mkdir(parents=True)
    assert targets.why_not("tpu") is None
    lock = tmp_path / "libtpu_lockfile"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        reason = targets.why_not("tpu")
        assert reason is not None
        assert str(lock) in reason
    assert targets.why_not("tpu") is None, "a lock file that no process holds is left where it is"


def test_the_process_of_a_compiler_gets_no_flags_for_simulated_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert "XLA_FLAGS" not in targets.environment("gpu")
    assert targets.environment("tpu")["TPU_SKIP_MDS_QUERY"] == "1"


def test_unknown_targets_and_targets_of_another_compiler_are_refused():
    with pytest.raises(ValueError, match="expected one of h100:8, h100:64, v5e:4x4, v5p:4x4x4, got 'h200'"):
        targets.target_named("h200")
    with pytest.raises(ValueError, match="expected a target of tpu, got h100:8"):
        Compiler("tpu").compile(Setting("h100:8", "pjit"))


def test_what_was_compiled_crosses_processes_whole():
    gathers = Scheduled("all_gather", (Array("f32", 8), Array("f32", 1)), 3, True, "s")
    found = Compiled(1.5, 7, (gathers,), (Stored("layers/0", 8, 1, True),), (4, 2))
    assert Compiled.from_json(found.to_json()) == found
    assert found.sizes() == {("all_gather", 8): 3}
