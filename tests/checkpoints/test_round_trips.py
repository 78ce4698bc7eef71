"""Checkpoints of plain PyTorch and of plain JAX through the other's format and back: equal bytes, equal training.

The programs that write and read them import nothing of this package: `plain_torch`, `plain_jax`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import open_checkpoint
from tests.support.bridge import plain_torch
from tests.support.compiler_effort import inherited_flags
from tests.support.ranks import RankGroup

ROOT = Path(__file__).parents[2]
# Each is loaded by others of these; the usual run tries one.
KINDS = [
    ("fsdp2", 3),
    *(
        pytest.param(strategy, world, marks=pytest.mark.slow)
        for strategy, world in [("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4), ("fsdp x tp", 4)]
    ),
]
OPTIMIZERS = ("adamw", "chain", "masked")


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankGroup]:
    """Not those of other tests, which have imported this package."""
    group = RankGroup()
    yield group
    group.close()


def assert_equal(path: Path, other: Path) -> None:
    """The same names, paths, dtypes, shapes, bytes and values that are no tensors."""
    with open_checkpoint(path) as a, open_checkpoint(other) as b:
        assert {n: (i.path, i.shape, i.dtype) for n, i in a.tensors.items()} == {
            n: (i.path, i.shape, i.dtype) for n, i in b.tensors.items()
        }
        for name in a.tensors:
            assert a.read(name).tobytes() == b.read(name).tobytes(), name
        assert dict(a.objects) == dict(b.objects)
        assert dict(a.object_paths) == dict(b.object_paths)


@pytest.fixture(scope="module")
def torch_losses(own_ranks: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Of four steps of the whole batch in one process."""
    path = tmp_path_factory.mktemp("alone") / "c"
    return own_ranks.run(1, plain_torch.save_and_go_on, "alone", str(path))[0]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world"), KINDS)
def test_torch_goes_on_from_what_was_in_orbax_and_in_safetensors(
    own_ranks: RankGroup, tmp_path: Path, torch_losses: list[float], strategy: str, world: int
) -> None:
    losses = own_ranks.run(world, plain_torch.save_and_go_on, strategy, str(tmp_path / "dcp"))
    for between in ("orbax", "safetensors"):
        convert(tmp_path / "dcp", tmp_path / between, to=between)
        convert(tmp_path / between, tmp_path / f"{between}-dcp", to="dcp")
        assert_equal(tmp_path / "dcp", tmp_path / f"{between}-dcp")
        convert(tmp_path / f"{between}-dcp", tmp_path / f"{between}-again", to=between)
        assert_equal(tmp_path / between, tmp_path / f"{between}-again")
        assert verify(tmp_path / f"{between}-dcp").good
    # The same sums in the same order: equal to the bit.
    resumed = own_ranks.run(world, plain_torch.load_and_go_on, strategy, str(tmp_path / "orbax-dcp"))
    assert resumed == [rank_losses[2:] for rank_losses in losses]
    # Sharded otherwise, sums have another order.
    others = {("hsdp", 4), ("fsdp x tp", 4), ("fsdp2", 3), ("alone", 1)} - {(strategy, world)}
    for other, ranks in sorted(others):
        continued = own_ranks.run(ranks, plain_torch.load_and_go_on, other, str(tmp_path / "safetensors-dcp"))
        assert continued[0] == pytest.approx(torch_losses[2:], rel=1e-5)
    assert losses[0] == pytest.approx(torch_losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("save", marks=pytest.mark.slow), "async"])
def test_bfloat16_weights_and_asynchronous_saves_come_back_too(
    own_ranks: RankGroup, tmp_path: Path, how: str
) -> None:
    bf16 = torch.bfloat16
    losses = own_ranks.run(3, plain_torch.save_and_go_on, "fsdp2", str(tmp_path / "dcp"), bf16, how)
    convert(tmp_path / "dcp", tmp_path / "orbax")
    convert(tmp_path / "orbax", tmp_path / "back")
    assert_equal(tmp_path / "dcp", tmp_path / "back")
    resumed = own_ranks.run(3, plain_torch.load_and_go_on, "fsdp2", str(tmp_path / "back"), bf16)
    assert resumed == [rank_losses[2:] for rank_losses in losses]


def run_jax(jobs: list[dict[str, Any]], processes: int = 1, devices: int = 8) -> list[list[float]]:
    """The losses of each job, in a program of its own, or in several processes that share the devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    members = []
    for index in range(processes):
        environment = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // processes} {inherited_flags()}",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        if processes > 1:
            environment["TWINSHARD_TEST_PROCESSES"] = f"localhost:{port},{processes},{index}"
        members.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.bridge.plain_jax", json.dumps(jobs)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [member.communicate(timeout=240) for member in members]
    finally:
        for member in members:
            member.kill()
    for member, (_, errors) in zip(members, outputs, strict=True):
        assert member.returncode == 0, errors[-3000:]
    results = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    assert all(result == results[0] for result in results)
    return list(results[0])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, OPTIMIZERS[:1]), id=f"1 process, {OPTIMIZERS[0]}"),
        pytest.param((1, OPTIMIZERS[1:]), id="1 process, the others", marks=pytest.mark.slow),
        # Two minutes of imports and compilations on two cores.
        pytest.param((4, OPTIMIZERS), id="4 processes", marks=pytest.mark.slow),
    ],
)
def jax_saves(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Path, dict[str, list[float]]]:
    """Saved by stock Orbax with each optimizer, and the losses before and after."""
    processes, optimizers = request.param
    folder = tmp_path_factory.mktemp("jax")
    jobs = [{"do": "save", "path": str(folder / o), "optimizer": o, "devices": 8} for o in optimizers]
    losses = run_jax(jobs, processes)
    return processes, folder, dict(zip(optimizers, losses, strict=True))


@pytest.mark.slow
def test_jax_goes_on_from_what_was_in_dcp_and_in_safetensors(
    tmp_path: Path, jax_saves: tuple[int, Path, dict[str, list[float]]]
) -> None:
    processes, folder, losses = jax_saves
    same, other = [], []
    for optimizer in losses:
        source = folder / optimizer
        home = tmp_path / optimizer
        for between in ("dcp", "safetensors"):
            convert(source, home / between, to=between)
            convert(home / between, home / f"{between}-orbax", to="orbax")
            assert_equal(source, home / f"{between}-orbax")
            convert(home / f"{between}-orbax", home / f"{between}-again", to=between)
            assert_equal(home / between, home / f"{between}-again")
            assert verify(home / f"{between}-orbax").good
        convert(home / "dcp", home / "steps" / "7" / "default", to="orbax")
        job = {"do": "load", "optimizer": optimizer}
        for how, path in (("v0", "dcp-orbax"), ("v1", "dcp-orbax"), ("manager", "steps")):
            same.append({**job, "path": str(home / path), "how": how, "axis": 0, "devices": 8})
        for how, path, devices in (("v0", "dcp-orbax", 4), ("v1", "safetensors-orbax", 2)):
            other.append({**job, "path": str(home / path), "how": how, "axis": 1, "devices": devices})
    resumed = run_jax([dict(job) for job in same], processes)
    for job, run_losses in zip(same, resumed, strict=True):
        # The same program on the same devices: equal to the bit.
        assert run_losses == losses[str(job["optimizer"])][2:], job
    for job, run_losses in zip(other, run_jax([dict(job) for job in other]), strict=True):
        assert run_losses == pytest.approx(losses[str(job["optimizer"])][2:], rel=1e-5), job
