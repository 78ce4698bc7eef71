"""Damaged and hostile checkpoints, and a program that converts many of them and reports the results.

    python -m tests.support.bridge.mutants FOLDER SEED COUNT

FOLDER holds the initial checkpoints. Each mutant is one of them with one or more changes. This process converts each
mutant with limited memory within 10 seconds. Prints one JSON line for each mutant that neither converts nor is refused
by one of our errors, and then a summary.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import traceback
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SECONDS = 10
EXTRA_BYTES = 600 << 20
"""Address space beyond what the process has when it begins: threads' stacks and arenas of tensorstore, too."""

EXPECTED_ERRORS = (
    "CheckpointError",
    "MappingError",
    "FileNotFoundError",
    "NotADirectoryError",
    "IsADirectoryError",
)
NUMBERS = (-1, 0, 1, 3, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**70, 1.5, "x", None, [], {}, True)


class _Calls:
    """Pickles as a call of any function with any arguments."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def hostile_pickles(marker: Path) -> list[bytes]:
    """Pickles that would create the file `marker` if loaded, and others that exhaust time or memory, or confuse."""
    touch = f"open({str(marker)!r}, 'w').close()"
    text = str(marker).encode()
    calls = [
        pickle.dumps(_Calls(os.system, f"touch {marker}"), protocol) for protocol in (0, 1, 2, 3, 4, 5)
    ] + [
        pickle.dumps(_Calls(eval, touch), 2),
        pickle.dumps(_Calls(exec, touch), 4),
        pickle.dumps({"model": _Calls(os.mkdir, str(marker))}, 4),
        pickle.dumps([_Calls(open, str(marker), "w")], 2),
        b"\x80\x02cposix\nsystem\nX" + struct.pack("<I", len(text) + 6) + b"touch " + text + b"\x85R.",
        b"(S'touch " + text + b"'\nios\nsystem\n.",  # INST
        b"\x80\x02cbuiltins\ngetattr\ncos\nX\x06\x00\x00\x00system\x86R.",
        b"\x80\x02ctorch.storage\n_load_from_bytes\nC\x01a\x85R.",
    ]
    nested = (
        b"\x80\x02)"
        + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
        + b"K\x01}q\xffh\xff.."
    )
    return [
        *calls,
        nested,
        b"\x80\x04" + b"(" * 100_000 + b".",
        b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".",
        b"\x80\x02\x8b\xff\xff\xff\x7f" + b"\1" * 40 + b".",  # LONG4 of 2 GB
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",  # BINBYTES8 of 1 TB
        b"\x80\x02X\xff\xff\xff\xffx.",
        b"\x80\x02]q\0h\0a.",  # a list that holds itself
        b"\x80\x02" + b"K\1" * 100_000 + b"t.",
        b"\x80\x04(" + b"]" * (8 << 20) + b"t.",
    ]


def flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def overwrite(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data)), rng.choice((1, 4, 8, 64, 4096))
    value = rng.choice((b"\0", b"\xff", b"\x80", b"A", rng.randbytes(1)))
    return data[:start] + value * min(length, len(data) - start) + data[start + length :]


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice((0, 1, len(data) // 2, len(data) - 1, rng.randrange(len(data))))]


def extend(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice((b"\0", b"\0" * 5000, data[: rng.randrange(len(data))], rng.randbytes(100)))


def edit_json(data: bytes, rng: random.Random) -> bytes:
    """Another value, or none, at some place of a JSON document; of a safetensors header, if it is one."""
    head = b""
    body = data
    if len(data) > 8 and data[8:9] == b"{":
        length = struct.unpack("<Q", data[:8])[0]
        body, rest = data[8 : 8 + length], data[8 + length :]
    else:
        rest = b""
    try:
        document = json.loads(body)
    except ValueError:
        return flip(data, rng)
    entries: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in list(items):
            entries.append((node, key))
            collect(value)

    collect(document)
    if not entries:
        return truncate(data, rng)
    node, key = rng.choice(entries)
    choice = rng.randrange(4)
    if choice == 0:
        del node[key]
    elif choice == 1 and isinstance(node, dict):
        node[rng.choice(("../x", "", "a" * 5000, "\ud800", "/", "a/b", "x"))] = node.pop(key)
    else:
        node[key] = rng.choice((*NUMBERS, "../../etc/passwd", "/etc/passwd", "\ud800", node, [2**40] * 3))
    try:
        edited = json.dumps(document).encode()
    except (ValueError, RecursionError):
        edited = b"{" * 100_000
    if rest or (len(data) > 8 and data[8:9] == b"{"):
        head = struct.pack("<Q", rng.choice((len(edited), len(edited), len(edited), 2**60, 0)))
    return head + edited + rest


def edit_member(data: bytes, rng: random.Random) -> bytes:
    """Change a member of a zip file and fix its checksum. In any other file flip a bit."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            members = [(entry.filename, entry.compress_type, old.read(entry)) for entry in old.infolist()]
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, NotImplementedError, EOFError):
        return flip(data, rng)
    # Most of what can go wrong is in the pickle of torch.save, and in the headers of NumPy.
    chosen = (
        [k for k, member in enumerate(members) if member[0].endswith("data.pkl")]
        if rng.random() < 0.7
        else []
    )
    number = rng.choice(chosen or range(len(members)))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as new:
        for k, (name, method, content) in enumerate(members):
            if k == number and content:
                content = rng.choice((flip, flip, overwrite, truncate, extend))(content, rng)
            if k != number or rng.random() > 0.05:
                new.writestr(name, content, method)
    return out.getvalue()


BYTES: Sequence[Callable[[bytes, random.Random], bytes]] = (
    flip,
    flip,
    overwrite,
    truncate,
    extend,
    edit_json,
    edit_member,
)


def mutate(path: Path, others: Sequence[Path], rng: random.Random, marker: Path) -> str:
    """Change the checkpoint at `path`. Returns a description of the change."""
    files = sorted(p for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file())
    file = rng.choice(files)
    edit = rng.randrange(16)
    name = file.relative_to(path.parent)
    if edit == 0 and len(files) > 1:
        other = rng.choice([p for p in files if p != file])
        a, b = file.read_bytes(), other.read_bytes()
        file.write_bytes(b)
        other.write_bytes(a)
        return f"{name} and {other.name} swapped"
    if edit == 1:
        file.unlink()
        return f"{name} removed"
    if edit == 2:
        foreign = rng.choice(
            [p for o in others for p in ([o] if o.is_file() else o.rglob("*")) if p.is_file()]
        )
        file.write_bytes(foreign.read_bytes())
        return f"{name} is {foreign}"
    if edit == 3:
        file.unlink()
        target = rng.choice((Path("/etc/passwd"), Path("/dev/zero"), Path("/dev/urandom"), file, path.parent))
        file.symlink_to(target)
        return f"{name} is a link to {target}"
    if edit == 4:
        number = rng.randrange(len(hostile_pickles(marker)))
        file.write_bytes(hostile_pickles(marker)[number])
        return f"{name} is hostile pickle {number}"
    if edit == 5:
        hostile = rng.choice(hostile_pickles(marker))
        data = file.read_bytes()
        start = rng.randrange(max(1, len(data)))
        file.write_bytes(data[:start] + hostile + data[start + len(hostile) :])
        return f"{name} holds a hostile pickle at {start}"
    if edit == 6:
        file.unlink()
        os.mkfifo(file)
        return f"{name} is a FIFO"
    if edit == 7:
        os.truncate(file, 2 << 30)
        return f"{name} goes on with a hole of 2 GiB"
    data = file.read_bytes()
    if not data:
        return f"{name} is empty"
    change = rng.choice(BYTES)
    for _ in range(rng.choice((1, 1, 2))):
        data = change(data, rng) or b"\0"
    file.write_bytes(data)
    return f"{name}: {change.__name__}"


class Hang(BaseException):
    """The conversion took too long."""


def main() -> None:
    folder, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    from bridge.checkpoints.convert.conversion import convert
    from bridge.checkpoints.verify.verification import verify
    from bridge.core.formats import open_checkpoint

    sources = sorted((folder / "sources").iterdir())
    for number, source in enumerate(sources):
        # Import everything and start the threads of tensorstore before memory is limited.
        out = folder / f"warm-{seed}-{number}"
        convert(source, out, to=("dcp", "orbax", "safetensors")[number % 3], workers=2)
        verify(out)
        shutil.rmtree(out)
    originals = {}
    for source in sources:
        with open_checkpoint(source) as reader:
            originals[source] = {name: reader.read(name).tobytes() for name in reader.tensors}
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_BYTES, used + EXTRA_BYTES))

    def hang(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, hang)
    marker = folder / f"executed-{seed}"
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for number in range(count):
        source = rng.choice(sources)
        mutant, out = folder / f"mutant-{seed}" / source.name, folder / f"out-{seed}"
        mutant.parent.mkdir(exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, mutant)
        done = mutate(mutant, sources, rng, marker)
        to = rng.choice(("dcp", "orbax", "safetensors"))
        outcome = ""
        signal.alarm(SECONDS)
        try:
            convert(mutant, out, to=to, workers=1)
            signal.alarm(0)
            outcome = "converted"
            with open_checkpoint(out) as reader:
                result = sorted(reader.read(name).tobytes() for name in reader.tensors)
            if result != sorted(originals[source].values()):
                outcome = "changed"
                # If the format does not protect the data, only the manifest can tell. Our checkpoints have a manifest.
                if source.name.startswith("ours") and verify(mutant).good:
                    outcome = "silently changed"
        except BaseException as error:
            signal.alarm(0)
            outcome = "refused"
            if type(error).__name__ not in EXPECTED_ERRORS:
                outcome = type(error).__name__
                print(traceback.format_exc(limit=-4), file=sys.stderr)
        if marker.exists():
            outcome = "executed"
            marker.rmdir() if marker.is_dir() else marker.unlink()
        if out.exists() and outcome == "refused":
            outcome = "half-written"
        outcomes[outcome] += 1
        if outcome not in ("converted", "refused", "changed"):
            print(json.dumps([outcome, number, source.name, to, done]), flush=True)
        shutil.rmtree(mutant.parent, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
