"""`twinshard convert --part`, `--commit` and `--engine`: what a job array calls, and what 5 TB on 16 machines take."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.jobs.pieces import CPU_SECONDS_PER_GB, REARRANGED_CPU_SECONDS_PER_GB
from bridge.commands import output
from bridge.commands.main import app
from bridge.core.formats import create_checkpoint
from bridge.core.formats.safetensors.header import format_header
from bridge.core.text import human_bytes

MAPPING = """
[convention.one]
[convention.two]
[[rule]]
one = "w.{i}.up : x y"
two = "w.{i}.kernel : y x"
[[rule]]
one = "w.{i}.norm : x"
two = "w.{i}.norm : x"
"""


def twinshard(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a"
    with create_checkpoint(path, "dcp") as writer:
        names = [writer.add_tensor((f"w{k}",), (50, 20), np.dtype(np.float32)).name for k in range(4)]
        for k, name in enumerate(names):
            for box in writer.chunks(name):
                writer.write(name, box, np.full(box.sizes, 1e30 if k == 2 else k, np.float32))
    return path


def test_an_array_of_jobs(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "b"
    cast = ("--cast", "*=float16")
    first = twinshard("convert", source, destination, "--part", "1/2", *cast)
    assert first.exit_code == 0, first.output
    assert "part 1 of 2: 2 pieces, 4 kB in" in first.output
    assert "1 of 2 parts are missing" in first.output
    assert not destination.exists()
    last = twinshard("convert", source, destination, "--part", "2/2", "--json", *cast)
    document = json.loads(last.stdout)
    assert (document["part"], document["parts"], document["pieces"], document["committed"]) == (2, 2, 2, True)
    assert document["overflowed"] == {"w2": 1000}
    report = diff(source, destination, rounded=True)
    assert [tensor.name for tensor in report.tensors] == ["w0", "w1", "w2", "w3"]
    assert report.max_ulp == 0
    again = twinshard("convert", source, destination, "--part", "2/2", *cast)
    assert again.exit_code == 0
    assert "part 2 of 2 was complete already" in again.output
    assert "is complete" in again.output


def test_the_job_that_commits_says_what_the_whole_conversion_would(source: Path, tmp_path: Path) -> None:
    destination = f"file://{tmp_path}/b"
    assert twinshard("convert", source, destination, "--to", "dcp").exit_code == 0
    (tmp_path / "b" / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text("{}")
    options = ("--to", "dcp", "--replace", "--no-verify", "--drop", "w3", "--cast", "*=float16")
    first = twinshard("convert", source, destination, "--part", "1/2", *options)
    assert first.exit_code == 0, first.output
    assert "copied along" not in first.output
    last = twinshard("convert", source, destination, "--part", "2/2", *options)
    assert last.exit_code == 0, last.output
    assert (
        "copied along: tokenizer.json\nkept from the checkpoint that was replaced: config.json" in last.output
    )
    assert "warning: not verified" in last.output
    assert (
        "warning: w2: 1000 finite elements became infinite or NaN by the cast\ndropped 1: w3" in last.output
    )
    again = json.loads(twinshard("convert", source, destination, "--part", "1/2", "--json", *options).stdout)
    assert again["whole"] is None


def test_directories_above_a_file_url_are_asked_about_too(source: Path, tmp_path: Path) -> None:
    done = twinshard("convert", source, f"file://{tmp_path}/typo/b")
    assert done.exit_code == 2
    assert "typo does not exist: expected the directory for file://" in done.output.replace("\n", " ")
    assert not (tmp_path / "typo").exists()


def test_a_commit_of_its_own(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "b"
    for part in ("1/2", "2/2"):
        done = twinshard("convert", source, destination, "--to", "safetensors", "--part", part, "--no-commit")
        assert done.exit_code == 0, done.output
        early = twinshard("convert", source, destination, "--to", "safetensors", "--commit")
        if part == "1/2":
            assert early.exit_code == 2
            assert "expected 2 complete parts, found 1: missing is part 2 of 2" in early.output.replace(
                "\n", " "
            )
        else:
            assert early.exit_code == 0, early.output
            assert "(safetensors): 4 tensors, 0 objects, 16 kB" in early.output.replace("\n", " ")
            # A commit writes no elements, and its seconds are no part's.
            assert re.search(r"16 kB, all of it before, in \d+\.\d s\n", early.output), early.output
    assert diff(source, destination).max_ulp == 0
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--part", "3/2"), "expected --part K/N with K from 1 to N, such as 3/16, got '3/2'"),
        (("--part", "0/4"), "arrays that count from 0 need K+1"),
        (("--part", "x"), "expected --part K/N"),
        (("--no-commit",), "--no-commit needs --part"),
        (("--parts", "4"), "--parts needs --engine processes or ray"),
        (("--part", "1/2", "--engine", "ray"), "give only one of them"),
        (("--commit", "--engine", "processes"), "commits without it"),
        (("--commit", "--resume"), "leave out --resume"),
        (("--part", "1/2", "--bandwidth", "2"), "expected --dry-run and a bandwidth above 0"),
        (("--part", "1/2", "--dry-run", "--bandwidth", "0"), "expected --dry-run and a bandwidth above 0"),
        (("--bandwidth", "2"), "--bandwidth needs --dry-run --part K/N"),
        (("--commit", "--dry-run"), "--dry-run shows parts with --part K/N"),
    ],
)
def test_options_that_do_not_fit(
    options: tuple[str, ...], message: str, source: Path, tmp_path: Path
) -> None:
    result = twinshard("convert", source, tmp_path / "b", *options)
    assert result.exit_code == 2
    text = " ".join(result.output.replace("│", " ").split())
    assert message in text
    assert os.listdir(tmp_path) == ["a"]


def make_5_tb(path: Path) -> int:
    """The headers of 5 TB in files that are all holes; the bytes of the elements."""
    path.mkdir()
    weight_map, total = {}, 0
    for layer in range(400):
        tensors = [
            (f"w.{layer}.up", np.dtype(np.float32), (57344, 53248)),
            (f"w.{layer}.norm", np.dtype(np.float32), (16384,)),
        ]
        name = f"model-{layer + 1:05}-of-00400.safetensors"
        header = format_header(tensors, {"format": "pt"})
        size = sum(int(np.prod(shape)) * 4 for _, _, shape in tensors)
        with (path / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + size)
        total += size
        weight_map |= {tensor: name for tensor, _, _ in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


@pytest.mark.slow
def test_5_tb_on_16_machines_on_paper(tmp_path: Path) -> None:
    mapping = tmp_path / "mapping.toml"
    mapping.write_text(MAPPING)
    total = make_5_tb(tmp_path / "a")
    assert 4.8e12 < total < 5e12
    options = (
        "--mapping",
        mapping,
        "--into",
        "two",
        "--dry-run",
        "--part",
        "3/16",
        "--workers",
        "8",
        "--json",
    )
    started = time.perf_counter()
    result = twinshard("convert", tmp_path / "a", tmp_path / "b", *options)
    assert time.perf_counter() - started < 60
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    parts = document["parts"]
    assert len(parts) == 16
    assert sum(part["bytes"] for part in parts) == total
    for part in parts:
        # Within two pieces of a 16th, and all of it transposed but norms.
        assert abs(part["bytes"] - total / 16) < 2 * (256 << 20)
        assert part["bytes"] - part["rearranged_bytes"] < 100e6
        assert part["read_bytes"] == part["bytes"]
        assert part["memory"] == 8 * (64 << 20)
        assert part["cache"] == 57344 * 53248 * 4
        assert part["cpu_seconds"] == pytest.approx(
            part["bytes"] / 1e9 * REARRANGED_CPU_SECONDS_PER_GB / 8, rel=1e-3
        )
        assert part["transfer_seconds"] == pytest.approx(part["bytes"] / 1.25e9)
        assert (part["seconds"], part["limit"]) == (part["transfer_seconds"], "storage")
        assert part["rate"] == pytest.approx(2.5e9)
    assert document["part"] == parts[2]
    assert len(document["pieces"]) == parts[2]["pieces"] > 1000
    assert sum(piece["bytes"] for piece in document["pieces"]) == parts[2]["bytes"]
    # With more bandwidth the cores limit, and untouched elements need fewer of them.
    fast = json.loads(twinshard("convert", tmp_path / "a", "b", *options, "--bandwidth", "10").stdout)["part"]
    assert fast["limit"] == "cores"
    plain = ("--to", "dcp", "--dry-run", "--part", "3/16", "--workers", "8")
    plainly = json.loads(twinshard("convert", tmp_path / "a", "b", *plain, "--json").stdout)["part"]
    assert (plainly["rearranged_bytes"], plainly["cache"]) == (0, 0)
    assert plainly["cpu_seconds"] == pytest.approx(plainly["bytes"] / 1e9 * CPU_SECONDS_PER_GB / 8)
    shown = twinshard("convert", tmp_path / "a", "b", *plain).output
    assert (
        "in 16 parts, one machine each, 8 workers, 1.25 GB/s of storage each way: about 24"
        in shown.replace("\n", " ")
    )
    assert "limited by storage" in shown.replace("\n", " ")
    assert not (tmp_path / "b").exists()


def test_an_engine_says_how_many_bytes_are_done(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "PLAIN_SECONDS", 0.0)
    done = twinshard(
        "convert", source, tmp_path / "b", "--engine", "processes", "--workers", "1", "--parts", "2", "--json"
    )
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    whole = human_bytes(json.loads(done.stdout)["bytes"])
    assert all(line.startswith("convert: ") and f" of {whole}, " in line for line in lines)
    assert lines[0].startswith("convert: 0 B of ")
    assert lines[0].endswith(", 0 of 2 parts")
    assert lines[-1].startswith(f"convert: {whole} of {whole}, ")
    assert lines[-1].endswith(", 2 of 2 parts")
    assert json.loads(done.stdout)["tensors"] == 4


def test_a_dry_run_says_what_one_part_writes(source: Path) -> None:
    options = ("--to", "orbax", "--dry-run", "--part", "1/2", "--bandwidth", "2")
    part = json.loads(twinshard("convert", source, "b", *options, "--json").stdout)["part"]
    assert (part["part"], part["bytes"]) == (1, 8000)
    assert part["transfer_seconds"] == pytest.approx(8000 / 2e9)
