"""Conversions on a cluster: a stand-in whose workers are lost on purpose, processes that are killed, and Ray."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.plan import ConvertOptions
from bridge.checkpoints.jobs import cluster as cluster_module
from bridge.checkpoints.jobs.array_jobs import PartReport
from bridge.checkpoints.jobs.cluster import MAX_LOST, PartTask, Told, WorkerLost, convert_on
from bridge.checkpoints.jobs.processes import Processes
from bridge.checkpoints.jobs.stage import stages_at
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import create_checkpoint
from bridge.core.formats.files.journal import Journal
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.mapping.language.rules import family_names, load_mapping

ROOT = Path(__file__).parents[2]
MAPPING = """
[convention.one]
[convention.two]
[[rule]]
one = "layers.{i}.weight : x y"
two = "layers.{i}.kernel : y x"
"""


def make(path: Path, matrices: int = 9, rows: int = 50) -> Path:
    rng = np.random.default_rng(0)
    with create_checkpoint(path, "dcp") as writer:
        arrays = {
            f"layers.{i}.weight": rng.standard_normal((rows + i, 40)).astype(np.float32)
            for i in range(matrices)
        }
        for name, array in arrays.items():
            writer.add_tensor((name,), array.shape, array.dtype)
        for name, array in arrays.items():
            for box in writer.chunks(name):
                writer.write(name, box, array[box.slices()])
    return path


class StandIn:
    """A cluster in this process: tasks run when they are waited for, the last submitted first, or are lost."""

    def __init__(self, slots: int, lost: Callable[[PartTask, int], bool]) -> None:
        self.slots = slots
        self.submitted: list[int] = []
        self.closed = False
        self._lost = lost
        self._tasks: dict[int, PartTask] = {}
        self._results: dict[int, PartReport | Exception] = {}

    def submit(self, task: PartTask) -> int:
        self.submitted.append(task.part)
        self._tasks[len(self.submitted)] = task
        assert len(self._tasks) <= self.slots
        return len(self.submitted)

    def wait(self, handles: Sequence[int], hear: Callable[[int, Told], None]) -> int:
        assert set(handles) == set(self._tasks)
        handle = max(handles)
        task = self._tasks.pop(handle)
        if self._lost(task, self.submitted.count(task.part)):
            self._results[handle] = WorkerLost("killed by SIGKILL")
            return handle
        try:
            self._results[handle] = task.run(lambda told: hear(handle, told))
        except CheckpointError as error:
            self._results[handle] = error
        return handle

    def result(self, handle: int) -> PartReport:
        outcome = self._results.pop(handle)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_lost_parts_are_done_again(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, mapping = make(tmp_path / "a"), tmp_path / "mapping.toml"
    mapping.write_text(MAPPING)
    # Workers have another working directory: paths are made absolute, and the mapping goes along.
    monkeypatch.chdir(tmp_path)
    options = ConvertOptions(to=format, mapping="mapping.toml", into="two")

    def lost(task: PartTask, times: int) -> bool:
        mapping.unlink(missing_ok=True)
        os.chdir("/")
        return task.part in (2, 5) and times < (MAX_LOST if task.part == 2 else 2)

    cluster = StandIn(3, lost)
    monkeypatch.setattr(cluster_module, "TELL_SECONDS", 0.0)
    seen: list[tuple[int, int, str]] = []
    report = convert_on(cluster, "a", "b", options, parts=5, progress=lambda *told: seen.append(told))
    assert cluster.closed
    assert sorted(cluster.submitted) == [1, *[2] * MAX_LOST, 3, 4, 5, 5]
    whole = sum((50 + i) * 40 * 4 for i in range(9))
    assert {total for _, total, _ in seen} == {whole}
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1] == (whole, whole, "5 of 5 parts")
    # At its start, after each of nine tensors, at its end.
    assert [name for _, _, name in seen].count("0 of 5 parts") > 1
    assert len({done for done, _, _ in seen}) == 1 + 9
    assert (report.tensors, report.resumed_bytes) == (9, 0)
    mapping.write_text(MAPPING)
    assert diff(source, tmp_path / "b", mapping=str(mapping), into="two").max_ulp == 0
    assert verify(tmp_path / "b").good


def test_a_part_that_loses_all_its_workers_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    source, destination = make(tmp_path / "a"), tmp_path / "b"
    options = ConvertOptions(to="safetensors")
    cluster = StandIn(2, lambda task, _: task.part == 3)
    with pytest.raises(
        CheckpointError, match=f"part 3 of 4: its worker was lost {MAX_LOST} times.*SIGKILL; look"
    ):
        convert_on(cluster, source, destination, options, parts=4)
    assert cluster.closed
    assert not destination.exists()
    done = set(cluster.submitted) - {3}
    again = StandIn(2, lambda task, _: False)
    report = convert_on(again, source, destination, options, parts=4)
    # Complete parts are asked, and write nothing.
    assert report.resumed_bytes > 0
    assert done
    assert diff(source, destination).max_ulp == 0


def test_the_error_of_a_part_is_the_error_of_the_conversion(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    data = bytearray((source / "__0_0.distcp").read_bytes())
    data[3000] ^= 1
    (source / "__0_0.distcp").write_bytes(data)
    cluster = StandIn(2, lambda task, _: False)
    with pytest.raises(CheckpointError, match=r"layers.\d.weight"):
        convert_on(cluster, source, tmp_path / "b", ConvertOptions(to="dcp"), parts=3)
    assert cluster.closed
    assert not (tmp_path / "b").exists()


def test_a_worker_that_counts_as_lost_and_is_not(tmp_path: Path) -> None:
    """Behind a broken network it still holds its lock: the part is written beside it."""
    source, destination = make(tmp_path / "a"), tmp_path / "b"
    task = PartTask(str(source), str(destination), ConvertOptions(to="dcp"), 1, 1, False, 1)
    told: list[Told] = []
    task.run(told.append)
    assert told[0] == (0, sum((50 + i) * 40 * 4 for i in range(9)))
    (folder,) = stages_at(destination)
    part = folder / "twinshard.parts" / "part_1"
    zombie = part.with_name("part_1.tmp-00000000")
    part.rename(zombie)
    key = {**stages_at(destination)[folder], "part": "1"}
    lock = Journal.create(zombie, key)
    try:
        assert not task.run(told.append).found
    finally:
        lock.close()
    assert convert_on(StandIn(1, lambda *_: False), source, destination, task.options, parts=1).resumed_bytes
    assert diff(source, destination).max_ulp == 0
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


class Killer(threading.Thread):
    """Kills processes that write parts of what is called `name`, so many, each as soon as it has opened its journal."""

    def __init__(self, name: str, times: int) -> None:
        super().__init__(daemon=True)
        self.killed: set[int] = set()
        self._name, self._times = name, times
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 200
        while len(self.killed) < self._times and time.monotonic() < deadline:
            for entry in Path("/proc").iterdir():
                if len(self.killed) == self._times:
                    return
                if entry.name.isdecimal() and int(entry.name) not in self.killed and self._writes(entry):
                    os.kill(int(entry.name), signal.SIGKILL)
                    self.killed.add(int(entry.name))
            time.sleep(0.002)

    def _writes(self, process: Path) -> bool:
        try:
            files = [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
        except OSError:
            return False
        return any(self._name in file and "/part_" in file and file.endswith("journal") for file in files)


@dataclasses.dataclass(frozen=True)
class _Ending:
    """A part whose process ends without a report: by a signal, or by an exit status."""

    signal: int | None

    def run(self, tell: Callable[[Told], None]) -> PartReport:
        if self.signal is not None:
            os.kill(os.getpid(), self.signal)
        os._exit(3)


@pytest.mark.parametrize(
    ("ended_by", "said"), [(signal.SIGKILL, "killed by SIGKILL"), (None, "exit status 3")]
)
def test_a_process_that_ends_without_a_report_is_a_lost_worker(ended_by: int | None, said: str) -> None:
    processes = Processes(1)
    part = processes.submit(_Ending(ended_by))
    assert processes.wait([part], lambda *_: None) is part
    with pytest.raises(WorkerLost, match=said):
        processes.result(part)
    processes.close()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["dcp", "orbax", "safetensors"])
def test_processes_that_are_killed(format: str, tmp_path: Path) -> None:
    source, destination = make(tmp_path / "a", 12, 50_000), tmp_path / "killed_parts"
    processes = Processes(2)
    submitted: list[int] = []
    submit = processes.submit
    processes.submit = lambda task: (submitted.append(task.part), submit(task))[1]  # type: ignore[method-assign]
    killer = Killer("killed_parts", 3)
    report = convert_on(processes, source, destination, ConvertOptions(to=format), parts=4)
    killer.join()
    assert len(killer.killed) == 3
    # One may have been killed when its result was sent already.
    assert len(submitted) in (4 + 2, 4 + 3)
    assert report.bytes == sum((50_000 + i) * 40 * 4 for i in range(12))
    assert diff(source, destination).max_ulp == 0
    assert verify(destination).good
    assert sorted(os.listdir(tmp_path)) == ["a", "killed_parts"]


@pytest.mark.parametrize("name", family_names())
def test_mappings_can_be_sent(name: str) -> None:
    """Each shipped family, with sizes of axes of its own."""
    table = load_mapping(name).for_any_model()
    assert pickle.loads(pickle.dumps(table)) == table


@pytest.mark.slow
def test_a_mapped_conversion_by_processes(tmp_path: Path) -> None:
    source, mapping = make(tmp_path / "a"), tmp_path / "mapping.toml"
    mapping.write_text(MAPPING)
    options = ConvertOptions(to="dcp", mapping=mapping, into="two")
    convert_on(Processes(2), source, tmp_path / "b", options, parts=3)
    assert diff(source, tmp_path / "b", mapping=mapping, into="two").max_ulp == 0


@pytest.mark.slow
def test_errors_of_processes_come_back(tmp_path: Path) -> None:
    source = make(tmp_path / "a")
    options = dataclasses.replace(ConvertOptions(to="dcp"), casts=("nothing.*=bfloat16",))
    with pytest.raises(CheckpointError, match=r"cast nothing\.\*=bfloat16: expected floating-point tensors"):
        convert_on(Processes(2), source, tmp_path / "b", options, parts=2)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["dcp", "orbax", "safetensors"])
def test_ray_with_workers_killed(format: str, tmp_path: Path) -> None:
    """By the command, as a user would; workers of a local Ray cluster die while they write."""
    pytest.importorskip("ray")
    source, destination = make(tmp_path / "a", 12, 50_000), tmp_path / "killed_parts"
    mapping = tmp_path / "mapping.toml"
    mapping.write_text(MAPPING)
    killer = Killer("killed_parts", 3)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bridge.commands.main", "convert", source, destination, "--to", format),
            *("--mapping", mapping, "--into", "two"),
            *("--engine", "ray", "--parts", "4", "--workers", "1"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    killer.join()
    assert len(killer.killed) == 3
    assert diff(source, destination, mapping=mapping, into="two").max_ulp == 0
    assert verify(destination).good
    assert sorted(os.listdir(tmp_path)) == ["a", "killed_parts", "mapping.toml"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_progress_moves_within_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """What workers tell arrives: only from them the whole is known, and bytes of parts that are not done."""
    source = make(tmp_path / "a", 12, 200_000)
    whole = sum((200_000 + i) * 40 * 4 for i in range(12))
    if engine == "ray":
        pytest.importorskip("ray")
        from bridge.checkpoints.jobs.ray_cluster import RayCluster

        monkeypatch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    seen: list[tuple[int, int, str]] = []
    convert_on(
        Processes(1) if engine == "processes" else RayCluster(1),
        source,
        tmp_path / "b",
        ConvertOptions(to="dcp", casts=("*=float64",)),
        parts=2,
        progress=lambda *told: seen.append(told),
    )
    assert {total for _, total, _ in seen} == {2 * whole}
    assert any(0 < done < 2 * whole and name == "0 of 2 parts" for done, _, name in seen)
    assert seen[-1] == (2 * whole, 2 * whole, "2 of 2 parts")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.checkpoints.jobs.ray_cluster import RayCluster

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CheckpointError, match=r"--engine ray needs Ray.*pip install '\.\[ray\]'"):
        RayCluster(1)
