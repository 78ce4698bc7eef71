"""Run a conversion that is killed before its n-th file operation.

    python -m tests.support.bridge.killed SRC DST FORMAT N [--resume] [--replace] [--one]

With N = 0 nothing is killed, and the program prints the number of operations. By default two threads run, whose
operations differ a little from run to run, because one thread syncs the other's writes. With --one there is one thread,
whose operations are always the same.
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

    # Import lazily imported modules before operations are counted.
    with open_checkpoint(source) as reader:
        reader.read(next(iter(reader.tensors)))
    import bridge.core.formats.dcp.writer
    import bridge.core.formats.orbax.writer
    import bridge.core.formats.safetensors.writer  # noqa: F401 (imported for its time only)

    record.SYNC_BYTES = 1000
    # Write few small tensors at a time, so that there are operations between them.
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
