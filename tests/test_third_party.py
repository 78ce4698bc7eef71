"""The cache of packages: each is pinned, whole or absent, and fetched once. A stand-in for pip uses no network."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.third_party import Package, Unreachable, load_file


def wheel() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("net/model.py", "from layers import WIDTH\nimport heavy\nheavy.seed(0)\n")
        archive.writestr("net/layers.py", "WIDTH = 3\n")
        archive.writestr("data/large.bin", "x")
    return file.getvalue()


def sdist() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name in ("net-1.0/net/model.py", "net-1.0/data/large.bin"):
            archive.addfile(tarfile.TarInfo(name))
    return file.getvalue()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The packages that pip was asked for. It answers with the wheel, or with the sdist if no wheel is wanted."""
    asked: list[str] = []

    def run(command: list[str], **options: Any) -> None:
        asked.append(command[-1])
        source = "--no-binary" in command
        name = "net-1.0.tar.gz" if source else "net-1.0-py3-none-any.whl"
        Path(command[command.index("--dest") + 1], name).write_bytes(sdist() if source else wheel())

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    return asked


def package(content: bytes, **options: Any) -> Package:
    return Package("net", "1.0", hashlib.sha256(content).hexdigest(), **options)


@pytest.mark.parametrize("source", [False, True])
def test_a_package_is_fetched_once_and_only_the_wanted_part_unpacked(served, source):
    wanted = package(sdist() if source else wheel(), source=source, keep="net/")
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: wanted.folder(), range(4)))
    (folder,) = folders
    assert served == ["net==1.0"]
    assert (folder / "net" / "model.py").exists()
    assert not (folder / "data").exists()


def test_another_file_than_the_pinned_one_is_refused_and_not_kept(served, tmp_path):
    with pytest.raises(ValueError, match=r"net-1.0.*whl: expected sha256 0000.*got"):
        Package("net", "1.0", "0" * 64).folder()
    kept = [path for path in (tmp_path / "twinshard-tests" / "models").iterdir() if path.suffix != ".lock"]
    assert not kept


def test_without_network_a_package_is_unreachable(monkeypatch, tmp_path):
    def run(command: list[str], **options: Any) -> None:
        raise subprocess.CalledProcessError(
            1, command, stderr="ERROR: first\nERROR: No matching distribution"
        )

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(Unreachable, match=r"net==1\.0: ERROR: No matching distribution"):
        package(wheel()).folder()


def test_a_file_is_loaded_as_it_is_and_leaves_no_bare_names(served):
    path = package(wheel()).folder() / "net" / "model.py"
    before = list(sys.path)
    module = load_file("third_party_net", path, siblings=True, absent=["heavy"])
    assert module.WIDTH == 3
    assert load_file("third_party_net", path) is module
    assert sys.path == before
    assert not {"layers", "heavy", "model"} & sys.modules.keys()
    del sys.modules["third_party_net"]
