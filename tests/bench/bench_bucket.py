"""Compare conversions from and to a bucket with a plain parallel copy of the same number of bytes.

python -m tests.bench.bench_bucket --gb 1 --rounds 3

The server is moto's S3 on this machine. s3fs makes the plain copy, in ranges of 8 MiB and parts of 16 MiB, four at a
time, and drops the bytes. Rounds alternate. The table shows medians, and the highest memory of a process.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bridge.core.formats import create_checkpoint
from tests.support.buckets import free_port, s3_environment, server

FORMATS = ("dcp", "orbax", "safetensors")
ROOT = Path(__file__).parents[2]
BUCKET = "bench-bucket"
RANGE, PART, AT_ONCE = 8 << 20, 16 << 20, 4

TIMED = """
import time
from pathlib import Path
from tests.bench import bench_bucket
started = time.perf_counter()
{call}
seconds = time.perf_counter() - started
# Not from getrusage, whose peak starts at the peak of the parent process.
(peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
print(seconds, int(peak) * 1024)
"""


def make(path: Path, nbytes: int) -> None:
    """Write a DCP checkpoint with tensors of 32 MB and of 100 kB."""
    rng = np.random.default_rng(0)
    shapes = [(2000, 4000)] * (nbytes // 32_000_000) + [(25, 1000)] * 200
    with create_checkpoint(path, "dcp") as writer:
        names = [
            writer.add_tensor(("model", f"layers.{i}.w"), shape, np.dtype(np.float32)).name
            for i, shape in enumerate(shapes)
        ]
        for name in names:
            for box in writer.chunks(name):
                writer.write(name, box, rng.standard_normal(box.sizes, np.float32))


def plain_download(name: str) -> None:
    """Read every byte of an object and drop it."""
    import fsspec

    system = fsspec.filesystem("s3")
    size = system.info(name)["size"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        starts = range(0, size, RANGE)
        got = pool.map(
            lambda start: len(system.cat_file(name, start=start, end=min(start + RANGE, size))), starts
        )
        assert sum(got) == size


def plain_upload(name: str, nbytes: int) -> None:
    """Upload ``nbytes`` random bytes."""
    import fsspec

    system, data = fsspec.filesystem("s3"), os.urandom(PART)
    bucket, _, key = name.partition("/")
    upload = system.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]

    def put(number: int) -> dict[str, object]:
        body = data[: min(PART, nbytes - (number - 1) * PART)]
        where = {"Bucket": bucket, "Key": key, "UploadId": upload, "PartNumber": number}
        return {"PartNumber": number, "ETag": system.call_s3("upload_part", Body=body, **where)["ETag"]}

    with ThreadPoolExecutor(AT_ONCE) as pool:
        parts = list(pool.map(put, range(1, -(-nbytes // PART) + 1)))
    system.call_s3(
        "complete_multipart_upload", Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}
    )


def convert(source: str, destination: str, format: str) -> None:
    from bridge.checkpoints.convert.conversion import convert as run

    run(source, destination, to=format)


def measured(call: str) -> tuple[float, int]:
    """Seconds of the call without the start of its process, and the peak memory in bytes."""
    told = subprocess.run(
        [sys.executable, "-c", TIMED.format(call=f"bench_bucket.{call}")],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds, peak = told.stdout.split()
    return float(seconds), int(peak)


def paths(folder: Path, name: str, nbytes: int, number: int) -> Iterator[tuple[str, str]]:
    """Title and call of each measurement in a round."""
    yield "plain copy from the bucket", f"plain_download({name!r})"
    for format in FORMATS:
        target = folder / f"{format}{number}"
        yield (
            f"bucket dcp -> {format} on disk",
            f"convert('s3://{BUCKET}/source', {str(target)!r}, {format!r})",
        )
    yield "plain copy to the bucket", f"plain_upload('{BUCKET}/plain{number}', {nbytes})"
    for format in FORMATS:
        url = f"s3://{BUCKET}/{format}{number}"
        yield f"dcp on disk -> bucket {format}", f"convert({str(folder / 'source')!r}, {url!r}, {format!r})"
    yield (
        "bucket dcp -> bucket orbax",
        f"convert('s3://{BUCKET}/source', 's3://{BUCKET}/both{number}', 'orbax')",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    nbytes, port = int(options.gb * 1e9), free_port()
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {platform.python_version()}, moto")
    costs: dict[str, list[tuple[float, int]]] = {}
    with (
        tempfile.TemporaryDirectory() as scratch,
        server("-m", "moto.server", "-p", str(port), port=port) as url,
    ):
        os.environ.update(s3_environment(url))
        import fsspec

        folder = Path(scratch)
        make(folder / "source", nbytes)
        system = fsspec.filesystem("s3")
        system.mkdir(BUCKET)
        system.put(str(folder / "source"), f"{BUCKET}/source", recursive=True)
        data = f"{BUCKET}/source/__0_0.distcp"
        # No copied byte may land in a temporary directory.
        os.environ["TMPDIR"] = "/nonexistent"
        for number in range(options.rounds):
            for title, call in paths(folder, data, nbytes, number):
                costs.setdefault(title, []).append(measured(call))
            for format in FORMATS:
                shutil.rmtree(folder / f"{format}{number}")
                system.rm(f"{BUCKET}/{format}{number}", recursive=True)
            system.rm([f"{BUCKET}/plain{number}", *system.find(f"{BUCKET}/both{number}")])
    print("| path | MB/s | of the plain copy | peak MB |\n|---|---:|---:|---:|")
    medians = {title: statistics.median(seconds for seconds, _ in runs) for title, runs in costs.items()}
    down, up = medians["plain copy from the bucket"], medians["plain copy to the bucket"]
    for title, seconds in medians.items():
        beside = down + up if title.startswith("bucket") and "-> bucket" in title else up
        beside = down if title.endswith(("on disk", "from the bucket")) else beside
        peak = max(peak for _, peak in costs[title])
        print(f"| {title} | {nbytes / seconds / 1e6:.0f} | {beside / seconds:.0%} | {peak / 1e6:.0f} |")


if __name__ == "__main__":
    main()
