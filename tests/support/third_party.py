"""Models that no one here wrote: packages of PyPI, pinned by version and sha256, fetched once to a cache of their own.

Nothing of them enters the repository. The cache lies outside of the checkout, below XDG_CACHE_HOME, by default
~/.cache/twinshard-tests/models. A test that needs a package which is not there, where there is no network, is skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_SECONDS = 300


class Unreachable(Exception):
    """A package could not be downloaded: there is no network, or no pip."""


@dataclass(frozen=True)
class Package:
    """One file of a release on PyPI: its wheel, or with ``source`` its sdist.

    ``keep``: the folder of the archive to unpack, all of it by default.
    """

    name: str
    version: str
    sha256: str
    source: bool = False
    keep: str = ""

    def folder(self) -> Path:
        """The unpacked archive, downloaded where need be.

        Raises ``Unreachable`` where it cannot be had, and ``ValueError`` for another file than the pinned one.
        """
        target = _cache_folder() / f"{self.name}-{self.version}-{self.sha256[:12]}"
        if not target.exists():
            with _only_one(target.with_suffix(".lock")):
                if not target.exists():
                    self._fetch(target)
        return target

    def _fetch(self, target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            archive = self._download(Path(scratch))
            found = hashlib.sha256(archive.read_bytes()).hexdigest()
            if found != self.sha256:
                raise ValueError(
                    f"{archive.name}: expected sha256 {self.sha256}, got {found}: either the index serves another "
                    "file, or tests/support/third_party.py pins the wrong one"
                )
            unpacked = Path(scratch) / "unpacked"
            _unpack(archive, unpacked, self.keep)
            # At once, so that no one ever sees a part.
            unpacked.rename(target)

    def _download(self, folder: Path) -> Path:
        kind = ["--no-binary", ":all:"] if self.source else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "--quiet", "--retries", "1", "--timeout", "20", "download"]
        command += ["--no-deps", *kind, "--dest", str(folder), f"{self.name}=={self.version}"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or ["no output"])[-1]
            raise Unreachable(f"{self.name}=={self.version}: {last}") from error
        except subprocess.TimeoutExpired as error:
            raise Unreachable(f"{self.name}=={self.version}: no answer in {_SECONDS} s") from error
        (archive,) = folder.iterdir()
        return archive


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(home) if home else Path.home() / ".cache") / "twinshard-tests" / "models"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """One process at a time; a process that dies lets go."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unpack(archive: Path, folder: Path, keep: str) -> None:
    folder.mkdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(keep)])
        return
    with tarfile.open(archive) as sdist:
        for member in sdist:
            # An sdist has one folder, of the release's name.
            member.name = member.name.partition("/")[2]
            if member.name.startswith(keep) and member.isfile():
                sdist.extract(member, folder, filter="data")


def put_on_path(*packages: Package) -> None:
    """Make libraries importable, behind those that are installed."""
    for package in packages:
        folder = str(package.folder())
        if folder not in sys.path:
            sys.path.append(folder)


class _Absent(ModuleType):
    """Stands for a module that a file imports for what the test does not call; does nothing, whatever is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


def load_file(
    name: str,
    path: Path,
    *,
    siblings: bool = False,
    absent: Sequence[str] = (),
    packages: Mapping[str, Path] | None = None,
) -> ModuleType:
    """Import one file, as it is, under a name of its own.

    ``siblings``: the file imports others of its folder by their bare names. ``absent``: modules that it imports, but
    that the test does not need. ``packages``: folders of packages whose ``__init__`` imports far more than the file.
    None of these names stays in ``sys.modules``, for several examples have a file ``models``.
    """
    if name in sys.modules:
        return sys.modules[name]
    before = dict(sys.modules)
    for key in absent:
        sys.modules.setdefault(key, _Absent(key))
    for key, folder in (packages or {}).items():
        sys.modules[key] = ModuleType(key)
        sys.modules[key].__path__ = [str(folder)]
    ours = {
        *absent,
        *(packages or {}),
        *((file.stem for file in path.parent.glob("*.py")) if siblings else ()),
    }
    sys.path[:0] = [str(path.parent)] if siblings else []
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # It stays: linen's lifted classes look up their module.
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        if siblings:
            sys.path.remove(str(path.parent))
        for key in [key for key in sys.modules if ours & {key, key.partition(".")[0]} and key not in before]:
            del sys.modules[key]
    return module
