"""Checkpoints in a bucket, over HTTP: streamed both ways through faults and kills, without a local copy of anything."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.stores.folder import CLAIM
from bridge.core.formats.tensors.base import CheckpointError
from tests.formats.stores.conftest import Bucket
from tests.support.bridge.bits import random_bits
from tests.support.buckets import Fault, Request, kill_at

FORMATS = ("dcp", "orbax", "safetensors")
ROOT = Path(__file__).parents[3]


def source(path: Path, format: str, large: int = 3, small: int = 40, rows: int = 1500) -> Path:
    """A checkpoint of some tensors of several MB and of many small ones, of several dtypes, and two values."""
    shapes = {f"large.{k}": ((rows, 1001), np.float32 if k % 2 else np.int16) for k in range(large)}
    shapes |= {f"small.{k}": ((3 + k, 5), np.float64 if k % 3 else np.int8) for k in range(small)}
    with create_checkpoint(path, format) as writer:
        for name, value in (("step", 7), ("note", "none")):
            writer.add_object(("train", name), value)
        names = {
            name: writer.add_tensor(tuple(name.split(".")), shape, np.dtype(dtype)).name
            for name, (shape, dtype) in shapes.items()
        }
        for seed, (name, (shape, dtype)) in enumerate(shapes.items()):
            array = random_bits(shape, np.dtype(dtype), seed)
            for box in writer.chunks(names[name]):
                writer.write(names[name], box, array[box.slices()])
    return path


def require_same(source: str | Path, other: str | Path) -> None:
    assert diff(source, other).max_ulp == 0
    with open_checkpoint(source) as a, open_checkpoint(other) as b:
        assert set(map(repr, a.objects.values())) == set(map(repr, b.objects.values()))


def require_clean(bucket: Bucket, path: str) -> None:
    """Nothing of the attempts is there but the checkpoint."""
    assert not bucket.uploads()
    assert not [name for name in bucket.names(path) if CLAIM in name]
    assert bucket.names(path)


@pytest.mark.fast_cases("orbax-safetensors")
@pytest.mark.parametrize(("format", "target"), list(itertools.product(FORMATS, FORMATS)))
def test_from_bucket_to_bucket(tmp_path: Path, bucket: Bucket, format: str, target: str) -> None:
    local = source(tmp_path / "local", format)
    url = bucket.put(local, "runs/step_1")
    bucket.proxy.seen.clear()
    convert(url, bucket.url("out/step_1"), to=target, workers=2)
    size = sum(file.stat().st_size for file in local.rglob("*") if file.is_file())
    # Of the source everything once, with what is looked at twice of small files; of the destination as much.
    assert size < bucket.proxy.received < 1.1 * size + 200_000
    assert 0.9 * size < bucket.proxy.sent < 1.1 * size + 200_000
    require_clean(bucket, "out/step_1")
    assert verify(bucket.url("out/step_1")).good
    require_same(local, bucket.url("out/step_1"))


@pytest.mark.fast_cases("safetensors")
@pytest.mark.parametrize("format", FORMATS)
def test_many_small_tensors_are_few_requests(tmp_path: Path, bucket: Bucket, format: str) -> None:
    local = source(tmp_path / "local", format, large=0, small=600)
    url = bucket.put(local, "many")
    bucket.proxy.seen.clear()
    convert(url, bucket.url("out"), to=format)
    assert len(bucket.proxy.seen) < 60
    require_same(local, bucket.url("out"))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_five_thousand_tensors_are_few_requests(tmp_path: Path, bucket: Bucket, format: str) -> None:
    local = source(tmp_path / "local", format, large=0, small=5000)
    bucket.proxy.latency = 0.1
    url = bucket.put(local, "many")
    bucket.proxy.seen.clear()
    convert(url, bucket.url("out"), to=format)
    # 5,000 tensors of 3 to 5,003 rows are 500 MB: a request for 8 MiB, or a part of 5.
    assert len(bucket.proxy.seen) < 300
    require_same(local, bucket.url("out"))


def faulty(faults: tuple[Fault, ...], every: int) -> Callable[[Request], Fault | None]:
    """Every so many requests fail, each in the next of these ways."""
    count, ways = itertools.count(1), itertools.cycle(faults)
    return lambda request: next(ways) if next(count) % every == 0 else None


@pytest.mark.fast_cases("dcp")
@pytest.mark.parametrize("target", FORMATS)
def test_faults_of_the_server_change_nothing(tmp_path: Path, bucket: Bucket, target: str) -> None:
    local = source(tmp_path / "local", "dcp", large=4)
    url = bucket.put(local, "source")
    bucket.proxy.fault = faulty(("500", "503", "reset", "truncate", "slow"), 3)
    convert(url, bucket.url("out"), to=target, workers=2)
    bucket.proxy.fault = lambda _: None
    assert verify(bucket.url("out")).good
    require_same(local, bucket.url("out"))
    require_clean(bucket, "out")


@pytest.mark.fast_cases("True")
@pytest.mark.parametrize("resume", [False, True])
def test_a_server_that_goes_on_failing_is_one_error_and_leaves_nothing(
    tmp_path: Path, bucket: Bucket, resume: bool
) -> None:
    local = source(tmp_path / "local", "dcp", large=5)
    parts = itertools.count()
    bucket.proxy.fault = lambda request: "503" if request.part and next(parts) > 2 else None
    with pytest.raises(OSError, match=rf"^cannot write {bucket.url('out')}/__0_0.distcp: "):
        convert(local, bucket.url("out"), to="dcp", resume=resume, workers=2)
    bucket.proxy.fault = lambda _: None
    with pytest.raises((CheckpointError, FileNotFoundError)):
        open_checkpoint(bucket.url("out"))
    assert bool(bucket.uploads()) == bool(bucket.names()) == resume
    convert(local, bucket.url("out"), to="dcp", resume=resume)
    require_same(local, bucket.url("out"))
    require_clean(bucket, "out")


def test_an_answer_that_is_lost_does_not_fail_what_was_done(tmp_path: Path, bucket: Bucket) -> None:
    """The store has made an object of the parts, and knows the upload no more when it is asked again."""
    local = source(tmp_path / "local", "dcp", large=3)
    ends = itertools.count()

    def fault(request: Request) -> Fault | None:
        if request.method != "POST" or "uploadId=" not in request.path:
            return None
        return "reset after" if next(ends) == 0 else "404"

    bucket.proxy.fault = fault
    convert(local, bucket.url("out"), to="dcp")
    assert next(ends) > 1
    require_same(local, bucket.url("out"))
    require_clean(bucket, "out")


def test_a_source_that_cannot_be_read_is_one_error(tmp_path: Path, bucket: Bucket) -> None:
    url = bucket.put(source(tmp_path / "local", "dcp"), "source")
    bucket.proxy.fault = lambda request: "500" if "distcp" in request.path else None
    with pytest.raises(OSError, match=rf"^cannot read {url}/__0_0.distcp: "):
        convert(url, tmp_path / "out")
    assert not (tmp_path / "out").exists()


CONVERT = """
import sys
from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats.files import record
from bridge.core.formats.stores import numbered_parts, upload
upload.PART, record.SYNC_BYTES, numbered_parts.PAUSE = 5 << 20, 6 << 20, 0.01
convert(sys.argv[1], sys.argv[2], to=sys.argv[3], resume=sys.argv[4] == "resume", workers=2)
"""


def run(bucket: Bucket, *arguments: str, kill: int | None = None) -> int:
    """Convert in a process of its own, killed as its request of this number arrives; its exit code."""
    process = subprocess.Popen(
        [sys.executable, "-c", CONVERT, *arguments], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    bucket.proxy.before = kill_at(kill, lambda: process.pid) if kill else lambda _: True
    try:
        return process.wait(120)
    finally:
        process.kill()
        # Requests before the one at which it was killed may still be on their way.
        while bucket.proxy.busy:
            time.sleep(0.01)
        bucket.proxy.before = lambda _: True


def killed_and_resumed(
    tmp_path: Path, bucket: Bucket, target: str, kill: int, resume: bool, number: int = 0
) -> tuple[bool, int]:
    """Kill a conversion, see that nothing is half there, and convert again: whether killed, bytes of parts sent."""
    local, out = tmp_path / "local", f"out{number}"
    url = bucket.url(out)
    code = run(bucket, str(local), url, target, "resume", kill=kill)
    assert code in (0, -9)
    if code == 0:
        return False, 0
    try:
        with open_checkpoint(url):
            pass
    except (CheckpointError, FileNotFoundError):
        bucket.proxy.seen.clear()
        assert run(bucket, str(local), url, target, "resume" if resume else "anew") == 0
        again = sum(request.sent for request in bucket.proxy.seen if request.part)
    else:
        # All was there but the removal of notes: the next attempt does that, and changes nothing else.
        again = 0
        assert run(bucket, str(local), url, target, "resume") == 1
    require_clean(bucket, out)
    assert verify(url).good
    require_same(local, url)
    return True, again


@pytest.mark.slow
@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("target", FORMATS)
def test_a_killed_conversion_is_resumed_with_the_parts_that_are_there(
    tmp_path: Path, bucket: Bucket, target: str, resume: bool
) -> None:
    local = source(tmp_path / "local", "dcp", large=12)
    size = sum(file.stat().st_size for file in local.iterdir())
    killed, again = killed_and_resumed(tmp_path, bucket, target, 16, resume)
    assert killed
    assert (again < 0.8 * size) == resume


@pytest.mark.slow
@pytest.mark.parametrize("target", FORMATS)
def test_kills_at_any_time(tmp_path: Path, bucket: Bucket, target: str) -> None:
    source(tmp_path / "local", "orbax", large=8)
    rng, kills = random.Random(target), 0
    for number in range(6):
        killed, _ = killed_and_resumed(
            tmp_path, bucket, target, rng.randint(4, 30), rng.random() < 0.6, number
        )
        kills += killed
    assert kills > 2


@pytest.mark.slow
def test_another_conversion_is_not_resumed_and_one_that_lives_not_disturbed(
    tmp_path: Path, bucket: Bucket
) -> None:
    local, other = source(tmp_path / "local", "dcp", large=12), source(tmp_path / "other", "dcp", large=2)
    url = bucket.url("out")
    assert run(bucket, str(local), url, "dcp", "resume", kill=16) == -9
    with pytest.raises(CheckpointError, match="is unfinished, but belongs to another conversion"):
        convert(other, url, to="dcp", resume=True)
    claim = f"{bucket.name}/out/{CLAIM}"
    content = json.loads(bucket.direct.cat_file(claim))
    parent = os.getppid()
    began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    content["process"] |= {"pid": str(parent), "began": began}
    bucket.direct.pipe_file(claim, json.dumps(content).encode())
    for resume in (False, True):
        with pytest.raises(CheckpointError, match=f"^{url} is being written by another process"):
            convert(local, url, to="dcp", resume=resume)
    content["process"]["began"] = "1"
    bucket.direct.pipe_file(claim, json.dumps(content).encode())
    bucket.direct.pipe_file(f"{bucket.name}/out/mine", b"precious")
    with pytest.raises(FileExistsError, match=f"expected nothing at {url}"):
        convert(other, url, to="dcp")
    bucket.direct.rm_file(f"{bucket.name}/out/mine")
    convert(other, url, to="dcp")
    require_same(other, url)
    require_clean(bucket, "out")


def test_no_bucket_is_created_and_what_is_there_stays(tmp_path: Path, bucket: Bucket) -> None:
    local = source(tmp_path / "local", "dcp", large=1)
    before = bucket.direct.ls("")
    with pytest.raises(FileNotFoundError, match="found no bucket 'no-such-bucket-typo'"):
        convert(local, "s3://no-such-bucket-typo/x")
    bucket.direct.invalidate_cache()
    assert bucket.direct.ls("") == before
    bucket.direct.pipe_file(f"{bucket.name}/out/x", b"precious")
    with pytest.raises(FileExistsError, match="expected nothing at"):
        convert(local, bucket.url("out"))
    assert bucket.names() == ["out/x"]


@pytest.mark.slow
def test_a_bucket_or_a_directory_of_steps_that_is_not_there(bucket: Bucket) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        open_checkpoint("s3://no-such-bucket/runs/step_1")
    assert str(missing.value) == (
        "s3://no-such-bucket/runs/step_1 does not exist: expected a checkpoint there; The specified bucket does not "
        "exist"
    )
    with pytest.raises(
        CheckpointError, match=r"runs: expected a directory of steps \(--step\), found nothing there$"
    ):
        open_checkpoint(bucket.url("runs"), step="latest")


def test_one_file_and_its_manifest(tmp_path: Path, bucket: Bucket) -> None:
    local = source(tmp_path / "local", "dcp")
    convert(local, bucket.url("w.safetensors"))
    assert bucket.names() == ["w.safetensors", "w.safetensors.manifest.json"]
    assert verify(bucket.url("w.safetensors")).manifest
    require_same(local, bucket.url("w.safetensors"))
    with pytest.raises(FileExistsError, match="expected nothing at"):
        convert(local, bucket.url("w.safetensors"))
