"""A conversion that is killed before its n-th operation on files, run as a program.

    python -m tests.support.bridge.killed SRC DST FORMAT N [--resume] [--replace] [--one]

Prints how many operations there were, when N is 0 and nothing is killed. Two threads, whose operations differ by a few
from run to run as one syncs what the other wrote; with --one there is one, and they are always the same.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

OPERATIONS = (
    "pwrite",
    "write",
    "fdatasync",
    "fsync",
    "rename",
    "replace",
    "unlink",
    "mkdir",
    "rmdir",
    "open",
)


def main() -> None:
    source, destination, format, last, *flags = sys.argv[1:]
    from bridge.checkpoints.convert import conversion as convert
    from bridge.checkpoints.convert import engine
    from bridge.core.formats import open_checkpoint
    from bridge.core.formats.files import atomic, data_file, record

    # Everything that is imported late, before operations are counted.
    with open_checkpoint(source) as reader:
        reader.read(next(iter(reader.tensors)))
    import bridge.core.formats.dcp.writer
    import bridge.core.formats.orbax.writer
    import bridge.core.formats.safetensors.writer  # noqa: F401 (imported for its time only)

    record.SYNC_BYTES = 1000
    # A few small tensors at a time, so that there are moments between them.
    engine.TOGETHER_BYTES = 3000
    data_file._DIRECT_BYTES = data_file.BLOCK
    count = itertools.count(1)

    def counted(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) == int(last):
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name)))
    atomic.exchange = counted(atomic.exchange)
    atomic.rename_new = counted(atomic.rename_new)
    convert.convert(
        source,
        destination,
        to=format,
        resume="--resume" in flags,
        replace="--replace" in flags,
        workers=1 if "--one" in flags else 2,
    )
    print(next(count) - 1)


if __name__ == "__main__":
    main()
