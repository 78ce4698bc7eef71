"""Targets are parsed, compilers searched and missed by name, and libtpu's lock is waited for and left alone."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.compiling.leg_process import Leg, LegError
from bridge.compiling.machines import compilers, tpu_lock
from bridge.compiling.machines.targets import CARDS, TPUS, Target, target_named, targets_named
from bridge.planning.models.errors import PlanError

HOLD = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("name", "topology", "devices", "memory"),
    [
        ("h100:1", "1x1x1", 1, 84_942_979_072),
        ("a100:8", "1x1x8", 8, 85_100_068_864),
        ("H200:64", "1x8x8", 64, 151_397_597_184),
        ("b200:24", "1x3x8", 24, 191_514_411_008),
        ("v5e:4x8", "v5e:4x8", 32, 16_000_000_000),
        ("v6e:16x16", "v6e:16x16", 256, 32_000_000_000),
        ("v5p:4x4x8", "v5p:4x4x8", 128, 96_000_000_000),
        ("v4:2x2x2", "v4:2x2x2", 8, 32_000_000_000),
    ],
)
def test_a_target_is_read_from_its_name(name: str, topology: str, devices: int, memory: int) -> None:
    chip = name.lower().partition(":")[0]
    platform = "gpu" if chip in CARDS else "tpu"
    assert target_named(name) == Target(name.lower(), chip, platform, topology, devices, memory)


def test_several_targets_are_each_named_once() -> None:
    assert [target.name for target in targets_named("h100:8, v5e:4x4,h100:8")] == ["h100:8", "v5e:4x4"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", "expected GPUs a100|h100|h200|b200:N or TPUs v4|v5e|v5p|v6e:AxB[xC]"),
        ("mi300:8", "got 'mi300:8'"),
        ("", "got ''"),
        ("h100:12", "up to 8 on one host or a multiple of 8, such as h100:8 or h100:64, got '12'"),
        ("h100:0", "got '0'"),
        ("h100:4x4", "got '4x4'"),
        ("v5e:16", "expected 2 sizes of a slice of v5e in chips, such as v5e:4x4, got '16'"),
        ("v5e:4x4x4", "expected 2 sizes"),
        ("v5p:4x4", "expected 3 sizes of a slice of v5p in chips, such as v5p:4x4x4"),
        ("v5e:0x4", "got '0x4'"),
    ],
)
def test_what_is_no_target_is_refused_with_what_was_expected(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        target_named(name)


def test_every_card_fills_the_template_whole() -> None:
    for name, card in CARDS.items():
        text = card.proto()
        numbers = dict(re.findall(r"(\w+): ([\d.]+)", text))
        assert numbers["core_count"] == str(card.cores), name
        assert float(numbers["clock_rate_ghz"]) == card.clock_ghz
        assert int(numbers["device_memory_size"]) == card.memory
        assert int(numbers["shared_memory_per_core"]) > int(numbers["shared_memory_per_block_optin"])
        assert f"cuda_compute_capability {{ major: {card.capability} }}" in text
        assert f'"{card.description}"' in text
        assert text.count("{") == text.count("}")
    assert not CARDS.keys() & TPUS.keys()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the only one in which compilers are searched."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delenv(compilers.VARIABLE, raising=False)
    monkeypatch.setattr(compilers, "FOLDER", tmp_path / "compilers")
    return tmp_path / "compilers"


def test_missing_packages_are_named_with_what_installs_them(installed: Path) -> None:
    reason = compilers.why_not("tpu")
    assert reason is not None
    assert reason.startswith("the TPU compiler is not installed (libtpu): make compilers in a clone")
    assert "pip install '.[tpu-compiler]'" in reason
    Path(installed, "jax_plugins", "xla_cuda12").mkdir(parents=True)
    reason = compilers.why_not("gpu")
    assert reason is not None
    assert "(nvidia-cuda-nvcc-cu12)" in reason
    Path(installed, "nvidia", "cuda_nvcc").mkdir(parents=True)
    assert compilers.why_not("gpu") is None


def test_a_folder_may_be_named(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compilers.VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(PlanError, match="TWINSHARD_COMPILERS: expected a folder with compilers"):
        compilers.why_not("tpu")
    own = tmp_path / "own"
    (own / "libtpu").mkdir(parents=True)
    monkeypatch.setenv(compilers.VARIABLE, str(own))
    assert compilers.why_not("tpu") is None
    assert str(own) in compilers.environment("tpu")["PYTHONPATH"].split(":")


def test_the_process_of_a_compiler_gets_no_flags_for_simulated_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert "XLA_FLAGS" not in compilers.environment("gpu")
    assert compilers.environment("tpu")["TPU_SKIP_MDS_QUERY"] == "1"


def test_a_process_that_ends_says_what_it_wrote_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dying.py").write_text("import sys\ninput()\nsys.exit('no such chip')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Leg("dying", "gpu") as leg, pytest.raises(LegError, match="ended with 1: no such chip"):
        leg.ask({})


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tpu_lock, "_PAUSE", 0.01)
    return tmp_path / "libtpu_lockfile"


@pytest.fixture
def holder(lock: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_lock_that_no_process_holds_is_not_waited_for(lock: Path) -> None:
    said: list[str] = []
    tpu_lock.wait_for_lock(said.append, 0)
    lock.touch()
    tpu_lock.wait_for_lock(said.append, 0)
    assert (said, tpu_lock.held_lock()) == ([], None)


def test_a_held_lock_is_waited_for_with_one_message(lock: Path, holder: subprocess.Popen[str]) -> None:
    said: list[str] = []
    assert tpu_lock.held_lock() == lock

    def say(text: str) -> None:
        said.append(text)
        holder.communicate()

    tpu_lock.wait_for_lock(say)
    assert said == [f"waiting for another process that compiles for TPUs and holds {lock}"]
    assert lock.exists(), "a lock file that no process holds is left where it is"


def test_waiting_has_an_end(lock: Path, holder: subprocess.Popen[str]) -> None:
    said: list[str] = []
    with pytest.raises(PlanError, match=rf"the process that holds {re.escape(str(lock))} to end within 0 s"):
        tpu_lock.wait_for_lock(said.append, 0.05)
    assert len(said) == 1
    assert lock.exists()
