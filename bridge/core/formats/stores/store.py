"""Object stores: checkpoints at a URL, through fsspec.

    s3://bucket/runs/step_40      needs s3fs          memory://step_40     for tests
    gs://bucket/runs/step_40      needs gcsfs         file:///runs/step_40
    hf://org/model                needs huggingface_hub

fsspec's file systems find credentials and endpoints: in the environment, configuration files and fsspec.config.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from bridge.core.formats.tensors.base import CheckpointError

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")

_NO_SERVER = re.compile("Connector|EndpointConnection|ConnectError|Credentials")
_NO_LOGIN = re.compile(r"credentials", re.IGNORECASE)
_LOG_IN = (
    "; log in with the store's own tool, or give credentials in the environment or in fsspec's configuration; public "
    """data is read with FSSPEC_S3='{"anon": true}' or FSSPEC_GS='{"token": "anon"}' in the environment"""
)

FileSystem: TypeAlias = Any
"""An fsspec.AbstractFileSystem; fsspec has no types."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether this is a URL, not a local path."""
    return isinstance(path, str) and _URL.match(path) is not None


def place_of(path: str | os.PathLike[str]) -> Path | str:
    """A URL unchanged, anything else as a path."""
    return path if isinstance(path, str) and is_url(path) else Path(path)


def local_path(where: Path | str) -> Path | None:
    """The local place of a path, or of a URL of this machine's own files; None for other stores."""
    if isinstance(where, Path):
        return where
    if where.lower().startswith(("file://", "local://")):
        return Path(open_store(where)[1])
    return None


def path_here(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a run's checkpoints on this machine's file system; may be given as `file://`.

    CheckpointError for a URL of another store, which would become a directory of that name.
    """
    local = local_path(os.fspath(path))
    if local is None and is_url(path):
        raise CheckpointError(
            f"{path} is in an object store: expected a directory on a file system, where runs save and load; convert "
            f"from or to the store (twinshard convert {path} DIRECTORY, or the other way round)"
        )
    return Path(os.path.abspath(path if local is None else local))


def without_end(url: str) -> str:
    """A URL without trailing slashes."""
    protocol, mark, name = url.partition("://")
    return f"{protocol}{mark}{name.rstrip('/')}"


def open_store(url: str) -> tuple[FileSystem, str]:
    """The file system of a URL, and the name in it, without a trailing slash.

    CheckpointError for a URL that names nothing, if fsspec does not know the protocol, or if its package is not
    installed; OSError if the store cannot be opened.
    """
    _require_name(url)
    # Imported here: importing fsspec takes longer than listing a checkpoint, and local paths do not need it.
    import fsspec.core

    protocol, mark, name = url.partition("://")
    with store_errors(f"cannot open {url}"):
        try:
            # fsspec knows protocols only in lower case.
            system, root = fsspec.core.url_to_fs(f"{protocol.lower()}{mark}{name}")
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"cannot open {url}: {error}; expected a local path, or the URL of a store that fsspec can open here, "
                "such as s3://bucket/runs/step_40"
            ) from error
    return system, root.rstrip("/")


def require_writable(url: str) -> None:
    """CheckpointError for a URL that is read-only."""
    # A Hub repository is never empty, and each file of a checkpoint would be a commit.
    protocol = url.partition("://")[0].lower()
    if protocol in ("http", "https", "hf"):
        then = ", and upload the directory (hf upload)" if protocol == "hf" else ""
        raise CheckpointError(
            f"{url} is read-only: expected a path, or the URL of a store such as s3:// or gs://, to write to; convert "
            f"to a directory{then}"
        )


def _require_name(url: str) -> None:
    """Refuse a bare protocol: each store has its own error for it, and `file://` would be the working directory."""
    protocol, _, rest = url.partition("://")
    here = protocol.lower() in ("file", "local")
    if rest.strip("/") or (here and rest):
        return
    examples = {"hf": "hf://org/model"} | dict.fromkeys(("file", "local"), f"{protocol}:///runs/step_40")
    example = examples.get(protocol.lower(), f"{protocol}://bucket/runs/step_40")
    raise CheckpointError(
        f"{protocol}:// is only a protocol: expected the URL of a checkpoint, such as {example}, got no name: is a "
        "variable in your script unset?"
    )


def cannot_be_reached(error: Exception) -> bool:
    """Whether a library found no server, or no credentials for one."""
    return _NO_SERVER.search(type(error).__name__) is not None


@contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Turn every error of a file system into an OSError that begins with `what`; FileNotFoundError keeps its type."""
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        error_type = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        advice = _LOG_IN if _NO_LOGIN.search(str(error)) else ""
        raise error_type(f"{what}: {type(error).__name__}: {error}{advice}") from error


_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[\w./-]+)?")
_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[^/]+/[^/]+?)(?:/(?:tree|blob)/(?P<revision>[^/]+).*)?/?"
)
_STORE = re.compile(r"(?P<protocol>s3|gs|gcs|az|abfs|file|memory):/?(?P<name>[^/].*)", re.IGNORECASE)
_SHORT = re.compile(r"hf:/?(?P<id>[^/].*)")


def hub_hint(path: str | os.PathLike[str]) -> str:
    """The end of an error about a missing ``path``: how to write the URL or Hub repository that may be meant."""
    if (store := store_hint(path)) != "":
        return store
    name = hub_repository(path)
    return "" if name is None else f"; for a repository of the Hugging Face Hub, write hf://{name}"


def store_hint(path: str | os.PathLike[str]) -> str:
    """The same for a path that begins like a store's URL; `file:/a` is a path on this machine."""
    if (short := _STORE.fullmatch(os.fspath(path))) is None:
        return ""
    protocol = short["protocol"].lower()
    return f"; for a URL, write {protocol}://{'/' if protocol == 'file' else ''}{short['name']}"


def hub_repository(path: str | os.PathLike[str]) -> str | None:
    """The Hub repository that a missing ``path`` may mean.

    `org/name` may be a repository if there is no local folder `org`, and so may its page's address. Else None.
    """
    text = os.fspath(path)
    if (page := _PAGE.fullmatch(text)) is not None:
        revision = f"@{page['revision']}" if page["revision"] not in (None, "main") else ""
        name = page["id"] + revision
    elif (short := _SHORT.fullmatch(text)) is not None:
        name = short["id"]
    elif (
        _ID.fullmatch(text)
        and not Path(text).parent.exists()
        and not text.endswith((".safetensors", ".toml"))
    ):
        name = text
    else:
        return None
    return name
