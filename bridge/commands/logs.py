"""Log lines of the libraries behind object stores, which must not appear next to the command's own error."""

from __future__ import annotations

import logging
from typing import Final

_STORES: Final = frozenset(
    (
        *("aiobotocore", "aiohttp", "asyncio", "boto3", "botocore", "fsspec", "gcsfs", "google", "grpc"),
        *("huggingface_hub", "s3fs", "s3transfer", "urllib3"),
    )
)


def hide_logs_of_stores() -> None:
    """Hide what these libraries log, unless somebody has configured logging.

    Python's handler of last resort would print warnings, errors and their tracebacks. Handlers that are configured, by
    the user or by a variable such as GCSFS_DEBUG, stay as they are.
    """
    if logging.lastResort is not None:
        logging.lastResort.addFilter(lambda record: record.name.partition(".")[0] not in _STORES)
