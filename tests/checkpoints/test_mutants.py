"""Damaged and hostile checkpoints of every format: converted, or refused by an error of ours, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import flax.serialization
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import torch
from safetensors.numpy import save_file

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import CheckpointError, open_checkpoint
from bridge.core.formats.dcp.archive_writer import _around
from bridge.core.formats.files.manifest import MANIFEST_FILE
from tests.support.bridge.bits import random_bits
from tests.support.bridge.dcp_files import edit_metadata, stock_save
from tests.support.bridge.mutants import hostile_pickles
from tests.support.bridge.orbax_helpers import stock_save as orbax_save

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small checkpoints of every kind, by stock libraries and by us."""
    folder = tmp_path_factory.mktemp("mutants")
    where = folder / "sources"
    where.mkdir()
    arrays = {
        "w": random_bits((37, 11), np.dtype(np.float32), 1),
        "deep": {
            "b": random_bits((300,), np.dtype(ml_dtypes.bfloat16), 2),
            "n": random_bits((), np.dtype(np.int64), 3),
        },
    }
    state = {
        "w": torch.from_numpy(arrays["w"].copy()),
        "deep": {
            "t": torch.arange(24.0).reshape(4, 6).t(),
            "lr": 0.1,
            "betas": (0.9, 0.95),
            "names": ["a", "b"],
        },
    }
    stock_save(state, where / "stock-dcp")
    ocp.StandardCheckpointer().save(where / "stock-orbax", {"w": arrays["w"], "n": np.arange(3)})
    orbax_save(where / "stock-files", {"w": arrays["w"]}, use_ocdbt=False)
    orbax_save(where / "stock-zarr3", arrays, use_zarr3=True)
    key = jax.random.key(0, impl="rbg")
    leaves = {"w": arrays["w"], "key": key, "text": "t", "step": 3, "list": [None, {}], "a/b": "u"}
    orbax_save(where / "stock-leaves", leaves)
    for format in ("dcp", "safetensors"):
        convert(where / "stock-leaves", where / f"leaves-{format}", to=format)
        # With it nearly every change is refused before the note of leaves is read.
        (where / f"leaves-{format}" / MANIFEST_FILE).unlink()
    save_file({"w": arrays["w"], "deep.b": np.arange(7.0)}, where / "stock.safetensors", {"format": "pt"})
    moments = {
        "state": {0: {"exp_avg": state["w"], "step": torch.tensor(3.0)}},
        "param_groups": [{"params": [0]}],
    }
    torch.save({"model": state, "optimizer": moments, "rng": np.arange(5)}, where / "stock.pt")
    np.savez(where / "stock.npz", w=arrays["w"], **{"deep/n": np.arange(7.0)})
    np.savez_compressed(
        where / "deflated.npz", w=arrays["w"], n=np.zeros((0, 2)), f=np.asfortranarray(np.eye(5))
    )
    tree = {"params": arrays, "step": 3, "none": None, "list": ["a", 2.5]}
    (where / "stock.msgpack").write_bytes(flax.serialization.msgpack_serialize(tree))
    for format in ("dcp", "orbax", "safetensors"):
        convert(where / "stock-dcp", where / f"ours-{format}", to=format)
    return folder


def run(folder: Path, seed: int, count: int) -> dict[str, int]:
    arguments = [sys.executable, "-m", "tests.support.bridge.mutants", str(folder), str(seed), str(count)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    *bad, summary = done.stdout.splitlines()
    assert bad == [], "\n".join(bad[:20]) + done.stderr[-3000:]
    return json.loads(summary)


def test_300_mutants(sources: Path) -> None:
    counts = run(sources, 0, 300)
    print(counts)
    assert counts["refused"] > 100
    assert counts["converted"] > 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_10000_mutants(sources: Path) -> None:
    total = sum(sum(run(sources, seed, 1000).values()) for seed in range(1, 11))
    assert total == 10_000


def test_hostile_pickles_do_what_they_threaten_elsewhere(tmp_path: Path) -> None:
    """If they did nothing, a test that nothing was executed would prove nothing."""
    marker = tmp_path / "executed"
    pickles = hostile_pickles(marker)
    assert len(pickles) >= 20
    for data in pickles[:6]:
        program = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
        subprocess.run([sys.executable, "-c", program], input=data, check=True)
        assert marker.exists()
        marker.unlink()


@pytest.mark.parametrize("number", range(len(hostile_pickles(Path("x")))))
def test_each_hostile_pickle_as_metadata_and_as_a_value_is_refused(
    tmp_path: Path, sources: Path, number: int
) -> None:
    marker = tmp_path / "executed"
    data = hostile_pickles(marker)[number]
    convert(sources / "sources" / "stock-dcp", tmp_path / "c", to="dcp")
    with open_checkpoint(tmp_path / "c") as reader:
        name = "deep.names"
        extent = reader._metadata.objects[name]
    file = tmp_path / "c" / extent.file
    archive = b"".join(_around({"data.pkl": data}, None, 0, extent.offset))
    with open(file, "ab") as out:
        start = out.tell()
        out.write(archive)

    def move(metadata: object) -> None:
        (index,) = [i for i in metadata.storage_data if i.fqn == name]
        metadata.storage_data[index].offset = start
        metadata.storage_data[index].length = len(archive)

    edit_metadata(tmp_path / "c", move)
    # A hostile checkpoint comes without our manifest, which would give the change away.
    (tmp_path / "c" / MANIFEST_FILE).unlink()
    with (
        open_checkpoint(tmp_path / "c") as reader,
        pytest.raises(CheckpointError, match=r"distcp: object 'deep\.names'"),
    ):
        reader.objects[name]
    with pytest.raises(CheckpointError, match="distcp"):
        convert(tmp_path / "c", tmp_path / "out")
    (tmp_path / "c" / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        convert(tmp_path / "c", tmp_path / "out")
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
