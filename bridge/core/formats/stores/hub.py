"""Names of the Hugging Face Hub that lack `hf://`, and of stores that lack `//`: what is meant by one, for errors."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[\w./-]+)?")
_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[^/]+/[^/]+?)(?:/(?:tree|blob)/(?P<revision>[^/]+).*)?/?"
)
_STORE = re.compile(r"(?P<protocol>s3|gs|gcs|az|abfs|file|memory):/?(?P<name>[^/].*)", re.IGNORECASE)
_SHORT = re.compile(r"hf:/?(?P<id>[^/].*)")


def hub_hint(path: str | os.PathLike[str]) -> str:
    """End of an error about ``path``, where nothing is: how to write the URL or the Hub's repository that it means."""
    if (store := store_hint(path)) != "":
        return store
    name = hub_repository(path)
    return "" if name is None else f"; for a repository of the Hugging Face Hub, write hf://{name}"


def store_hint(path: str | os.PathLike[str]) -> str:
    """The same for what begins as the URL of a store; `file:/a` is a path of this machine."""
    if (short := _STORE.fullmatch(os.fspath(path))) is None:
        return ""
    protocol = short["protocol"].lower()
    return f"; for a URL, write {protocol}://{'/' if protocol == 'file' else ''}{short['name']}"


def hub_repository(path: str | os.PathLike[str]) -> str | None:
    """The Hub's repository that may be meant by ``path``, where nothing is.

    `org/name` may be one where there is no local folder `org`, and so may the address of its page. None for others.
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
