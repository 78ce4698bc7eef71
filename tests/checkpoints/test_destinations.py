"""A full disk, an unwritable place: the destination is absent or complete, the previous one intact."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge.core.formats.dcp.reader import DcpReader
from tests.support.bridge.destination_sweep import SIZE, TARGETS, contents
from tests.support.bridge.destinations import FORMATS, command, source
from tests.support.processes import importing_from

ROOT = Path(__file__).parents[2]
NAMESPACE = ["unshare", "--mount", "--map-root-user"]

# `twinshard` without a superuser's rights: permissions hold for it.
UNPRIVILEGED = (
    "import ctypes\n"
    "header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()\n"
    "assert ctypes.CDLL(None).capset(header, sets) == 0\n"
    "from bridge.commands.main import main\n"
    "main()\n"
)

Found = dict[str, Any]


def in_a_namespace(module: str, folder: Path) -> tuple[Path, dict[str, Found]]:
    """The mount point, and what a program that mounts a small disk there prints; skips where mounting is refused."""
    mount, outside = folder / "mount", folder / "outside"
    mount.mkdir()
    outside.mkdir()
    try:
        possible = subprocess.run(
            [*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(mount)], capture_output=True
        )
    except FileNotFoundError:
        pytest.skip("mounting a small disk needs Linux's unshare")
    if possible.returncode:
        pytest.skip(f"mounting a small disk is not permitted here: {possible.stderr.decode().strip()}")
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", module, str(mount), str(outside)],
        cwd=ROOT,
        env=importing_from(ROOT),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return mount, json.loads(done.stdout)


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Found]]:
    return in_a_namespace("tests.support.bridge.destinations", tmp_path_factory.mktemp("destinations"))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Found]]:
    return in_a_namespace("tests.support.bridge.destination_sweep", tmp_path_factory.mktemp("swept"))


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    happened: tuple[Path, dict[str, Found]], format: str
) -> None:
    mount, outcomes = happened
    case = outcomes[format]["too small"]
    assert (case["status"], case["there"], case["crashed"]) == (2, ["ballast"], None)
    (line,) = case["said"]
    assert f"too little free space for {mount}/out: expected" in line


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_fills_up_leaves_nothing_and_the_old_checkpoint_as_it_was(
    happened: tuple[Path, dict[str, Found]], format: str
) -> None:
    mount, outcomes = happened
    for name, there in (("vanished", ["ballast"]), ("replace", ["ballast", "out"])):
        case = outcomes[format][name]
        assert (case["status"], case["there"], case["crashed"]) == (2, there, None)
        (line,) = case["said"]
        assert line.startswith("error: ")
        assert f"{mount}/out" in line
        assert "No space left on device" in line
    assert outcomes[format]["old"] is not None
    assert outcomes[format]["replace"]["digest"] == outcomes[format]["old"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_resumed_conversion_takes_over_what_there_was_space_for(
    happened: tuple[Path, dict[str, Found]], format: str
) -> None:
    _, outcomes = happened
    interrupted, resumed = outcomes[format]["interrupted"], outcomes[format]["resumed"]
    assert interrupted["status"] == 2
    assert interrupted["digest"] == outcomes[format]["old"]
    assert [name.partition(".tmp-")[0] for name in interrupted["there"]] == ["ballast", "out", "out"]
    assert (resumed["status"], resumed["there"]) == (0, ["out"])
    assert json.loads(resumed["printed"])["resumed_bytes"] > 0
    assert resumed["digest"] == outcomes[format]["new"] != outcomes[format]["old"]


@pytest.mark.parametrize("format", FORMATS)
def test_places_that_cannot_be_written_to_are_named(
    happened: tuple[Path, dict[str, Found]], format: str
) -> None:
    mount, outcomes = happened
    cases = outcomes[format]["refused"]
    for name, line in (
        ("protected", f"error: '{mount}/private/out': Permission denied"),
        ("a file", f"error: {mount}/file is a file: expected a directory, to hold {mount}/file/out"),
        ("read-only", f"error: '{mount}/out': Read-only file system"),
    ):
        assert (cases[name]["status"], cases[name]["said"]) == (2, [line])
    assert cases["protected"]["there"] == cases["there"] == []


@pytest.mark.slow  # a sweep over all moments at which a disk is full
@pytest.mark.parametrize("format", TARGETS)
@pytest.mark.parametrize("case", ["vanished", "begun_full", "no_more_files"])
def test_whenever_a_disk_is_full_there_is_nothing_or_all_of_it(
    swept: tuple[Path, dict[str, Found]], case: str, format: str
) -> None:
    mount, outcomes = swept
    results = outcomes[format][case]
    for result in results:
        assert result["crashed"] is None
        if result["status"] == 0:
            assert result["complete"]
            continue
        assert (result["status"], result["there"], result["printed"]) == (2, [], "")
        (line,) = result["said"]
        assert line.startswith("error: ")
        assert str(mount / TARGETS[format]) in line
        assert ".tmp-" not in line
        assert line.endswith("No space left on device") or "too little free space for" in line
    complete = [result["complete"] for result in results]
    assert not complete[0]
    assert complete[-1] == (case != "begun_full")


@pytest.mark.slow
@pytest.mark.parametrize("format", TARGETS)
def test_whenever_a_disk_was_full_resuming_writes_the_same_files(
    swept: tuple[Path, dict[str, Found]], format: str
) -> None:
    _, outcomes = swept
    failed = [case for case in outcomes[format]["resumed"] if case["first"]["status"] != 0]
    assert len(failed) >= 5
    for case in failed:
        assert case["first"]["status"] == 2
        # Every file of the old one is as it was.
        assert case["kept"]
        assert case["second"]["complete"]
        assert not [name for name in case["second"]["there"] if ".tmp-" in name]
    taken = [case["bytes"] for case in failed]
    assert taken[0] == 0
    # The last of them have failed after most of the data.
    assert max(taken) >= SIZE * 3 // 4


@pytest.mark.slow
@pytest.mark.parametrize("format", TARGETS)
def test_a_process_whose_disk_fills_up_says_so_in_one_line(
    swept: tuple[Path, dict[str, Found]], format: str
) -> None:
    mount, outcomes = swept
    case = outcomes[format]["in a process"]
    assert (case["status"], case["printed"], case["there"]) == (2, "", [])
    assert case["said"].count("\n") == 1
    assert case["said"].startswith("error: ")
    assert str(mount / TARGETS[format]) in case["said"]
    assert case["said"].endswith("No space left on device\n")


@pytest.mark.fast_cases("dcp")
@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
@pytest.mark.parametrize("format", TARGETS)
def test_a_directory_that_may_not_be_written_to_stays_as_it_is(tmp_path: Path, format: str) -> None:
    new, old = source(tmp_path / "new", 5), source(tmp_path / "old", 6)
    folder = tmp_path / "place"
    to = ["--parents", "--to", "safetensors" if format == "one file" else format]
    there, absent = folder / TARGETS[format], folder / f"b{TARGETS[format]}"
    assert command(old, there, *to)["status"] == 0
    before, read = contents(folder), contents(new)
    for directory in (folder, there.parent):
        directory.chmod(0o555)
    for target, flag in ((absent, "--resume"), (there, "--replace")):
        done = subprocess.run(
            [sys.executable, "-c", UNPRIVILEGED, "convert", new, target, *to, flag],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"error: '{target}': Permission denied\n"
        assert contents(folder) == before
        assert [path for path in folder.rglob("*") if ".tmp-" in path.name] == []
    assert contents(new) == read


def test_what_the_source_refuses_is_not_put_down_to_the_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = source(tmp_path / "c", 7) / "__0_0.distcp"

    class StoreError(OSError):
        """Like those of network libraries, made of other things than an OSError."""

        def __init__(self, host: str) -> None:
            super().__init__(111, f"Connection refused by {host}")

    for error, line in (
        (PermissionError(13, "Permission denied", str(data)), f"error: '{data}': Permission denied"),
        (OSError("no such bucket"), "error: no such bucket"),
        (StoreError("host"), f"error: '{tmp_path}/out': Connection refused by host"),
    ):

        def refuse(*_: object, error: OSError = error) -> None:
            raise error

        monkeypatch.setattr(DcpReader, "read", refuse)
        monkeypatch.setattr(DcpReader, "lend", refuse)
        monkeypatch.setattr(DcpReader, "read_into", refuse)
        result = command(tmp_path / "c", tmp_path / "out", "--to", "orbax")
        assert (result["status"], result["said"], result["crashed"]) == (2, [line], None)
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
