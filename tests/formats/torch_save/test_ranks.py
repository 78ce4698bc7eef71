"""Files that each rank has written by torch.save, with DTensors in them, read as one checkpoint without PyTorch.

Every rank trains on data of its own; what was saved is told by PyTorch's own gathering of the full state.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.ground.selection import Selection
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import Box, CheckpointError, open_checkpoint
from bridge.core.formats.dcp.pickle_records import Call
from bridge.core.formats.torch_save.tree import LocalPiece, Placement
from tests.formats.dcp.test_sources import sharded, truth
from tests.support.bridge.bits import same_bits
from tests.support.bridge.dcp_files import array_of
from tests.support.bridge.plain_torch import trees
from tests.support.ranks import RankGroup

Arrays = Mapping[str, np.ndarray]
NAME = "model_world_size_{}_rank_{}.pt"


# On the ranks.


def save_ranks(strategy: str, path: str) -> dict[str, np.ndarray]:
    model, optimizer = sharded(strategy)
    torch.save(trees(model, optimizer), Path(path) / NAME.format(dist.get_world_size(), dist.get_rank()))
    dist.barrier()
    return truth(model, optimizer)


def save_placed(path: str) -> dict[str, np.ndarray]:
    """Other placements than FSDP's: columns, replicas, both axes of a mesh on one dimension, views, empty pieces."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(3)
    full = {
        "columns": torch.randn(3, 5),
        "blocks": torch.randn(5, 7),
        "twice": torch.randn(11, 2),
        "replicas": torch.randn(4),
        "few rows": torch.randn(2, 3),
        "scalar": torch.tensor(3.0),
    }
    placed = {
        "columns": (Replicate(), Shard(1)),
        "blocks": (Shard(0), Shard(1)),
        "twice": (Shard(0), Shard(0)),
        "replicas": (Replicate(), Replicate()),
        "few rows": (Shard(0), Shard(0)),
        "scalar": (Replicate(), Replicate()),
    }
    state = {name: distribute_tensor(tensor, mesh, placed[name]) for name, tensor in full.items()}
    torch.save(state, Path(path) / NAME.format(4, dist.get_rank()))
    dist.barrier()
    return {name: array_of(tensor) for name, tensor in full.items()}


def save_unlike(path: str) -> None:
    """What cannot be joined, a file each."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(3) * (rank + 1), mesh, [Partial()])
    cases = {
        "partial": {"w": partial, "v": torch.ones(2)},
        "plain": {"w": torch.ones(3) * rank, "v": torch.ones(2)},
        "shapes": {"w": torch.ones(3 + rank)},
        "replicas": {"w": DTensor.from_local(torch.ones(3) * rank, mesh, [Replicate()], run_check=False)},
        "values": {"w": torch.ones(3), "seen": 5 + rank, "same": 1},
    }
    for case, state in cases.items():
        (Path(path) / case).mkdir(exist_ok=True)
        torch.save(state, Path(path) / case / NAME.format(2, rank))
    dist.barrier()


# Here.


def assert_holds(path: Path, expected: Arrays) -> None:
    with open_checkpoint(path) as reader:
        assert not getattr(reader, "unreadable", {})
        for name, array in expected.items():
            assert same_bits(reader.read(name), array), name
            if array.ndim and array.shape[0] > 1:
                box = Box((1, *(0 for _ in array.shape[1:])), (array.shape[0] - 1, *array.shape[1:]))
                assert same_bits(reader.read(name, box), np.ascontiguousarray(array[1:]))


@pytest.mark.parametrize(("strategy", "world"), [("fsdp2", 3), ("hsdp", 4), ("fsdp x tp", 4)])
def test_the_files_of_ranks_are_joined_by_their_placements(
    ranks: RankGroup, tmp_path: Path, strategy: str, world: int
) -> None:
    (tmp_path / "d").mkdir()
    expected, *_ = ranks.run(world, save_ranks, strategy, str(tmp_path / "d"))
    assert_holds(tmp_path / "d", expected)
    report = verify(tmp_path / "d")
    assert report.good
    assert report.protected == report.bytes
    convert(tmp_path / "d", tmp_path / "o", to="dcp")
    assert_holds(tmp_path / "o", expected)
    convert(f"file://{tmp_path / 'd'}", tmp_path / "from a url", to="dcp")
    assert_holds(tmp_path / "from a url", expected)
    with open_checkpoint(tmp_path / "o") as reader:
        assert (reader.objects["note"], reader.read("step")[()]) == (("x", 1), 2)
    # A rank that is missing, whatever it held.
    last = tmp_path / "d" / NAME.format(world, world - 1)
    last.rename(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=rf"rank_{world - 1}\.pt is missing"):
        open_checkpoint(tmp_path / "d")
    # Two files of one rank: of replicas nothing is lost.
    shutil.copy(tmp_path / "d" / NAME.format(world, 0), last)
    if strategy == "hsdp":
        assert_holds(tmp_path / "d", expected)
        return
    with pytest.raises(CheckpointError, match=r"what each rank has|is in 0"):
        convert(tmp_path / "d", tmp_path / "o2", to="dcp")


def test_every_placement_is_where_pytorch_has_it(ranks: RankGroup, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    expected, *_ = ranks.run(4, save_placed, str(tmp_path / "d"))
    assert_holds(tmp_path / "d", expected)
    # Files of optimizers beside, as verl names them, are named and not read.
    shutil.copy(tmp_path / "d" / NAME.format(4, 0), tmp_path / "d" / "optim_world_size_4_rank_0.pt")
    shutil.copy(tmp_path / "d" / NAME.format(4, 0), tmp_path / "d" / "extra_state_world_size_4_rank_0.pt")
    assert_holds(tmp_path / "d", expected)
    assert {*inspect(tmp_path / "d").left_alone} == {
        "optim_world_size_4_rank_0.pt",
        "extra_state_world_size_4_rank_0.pt",
    }


def test_one_rank_alone_is_listed_and_never_taken_for_the_whole(ranks: RankGroup, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    expected, *_ = ranks.run(4, save_placed, str(tmp_path / "d"))
    rank_file = tmp_path / "d" / NAME.format(4, 0)
    summary = inspect(rank_file)
    assert {t.name: t.shape for t in summary.tensors} == {n: a.shape for n, a in expected.items()}
    assert {*summary.unreadable} == {*expected} - {"replicas", "scalar"}
    for selection in (Selection(), Selection(weights_only=True)):
        with pytest.raises(CheckpointError, match=r"a piece of a DTensor.*give the folder with all files"):
            convert(rank_file, tmp_path / "o", to="dcp", selection=selection)
    # Replicas are whole in each file.
    convert(rank_file, tmp_path / "o", to="dcp", selection=Selection(select=("replicas",)))
    with open_checkpoint(tmp_path / "o") as reader:
        assert same_bits(reader.read("replicas"), expected["replicas"])


def test_what_cannot_be_joined_is_named(ranks: RankGroup, tmp_path: Path) -> None:
    ranks.run(2, save_unlike, str(tmp_path))
    for case in ("plain", "shapes", "replicas"):
        with pytest.raises(CheckpointError, match=r"1 tensor not alike on all ranks.*: w; join these files"):
            open_checkpoint(tmp_path / case)
    with open_checkpoint(tmp_path / "values") as reader:
        assert reader.objects["same"] == 1
        with pytest.raises(CheckpointError, match=r"object 'seen': different values in .*rank_1\.pt"):
            reader.objects["seen"]
    with pytest.raises(CheckpointError, match=r"weights that can be read.*'w'.*DTensor"):
        convert(tmp_path / "partial", tmp_path / "o", selection=Selection(weights_only=True))


def test_verify_reads_the_copies_that_other_ranks_have(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.mkdir()
    for rank in range(2):
        torch.save({"w": torch.arange(100.0), "v": torch.ones(2)}, path / NAME.format(2, rank))
    assert verify(path)
    file = path / NAME.format(2, 1)
    data = bytearray(file.read_bytes())
    data[data.index(np.float32(50).tobytes() + np.float32(51).tobytes())] ^= 1
    file.write_bytes(data)
    report = verify(path)
    assert [problem.where for problem in report.problems] == ["w"]
    assert file.name in report.problems[0].text
    assert not report.damaged
    convert(path, tmp_path / "o", to="dcp")
    with open_checkpoint(tmp_path / "o") as reader:
        assert same_bits(reader.read("w"), np.arange(100, dtype=np.float32))


def test_coordinates_of_unlike_meshes_place_nothing() -> None:
    piece = LocalPiece((4,), Call("x", ()), (Placement(0), Placement(None)), (1, 0))
    assert piece.box([2, 3]) == Box((2,), (2,))
    assert piece.box([2]) is None
