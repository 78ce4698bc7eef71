"""Checkpoints of every kind that `torch.distributed.checkpoint` writes on several ranks, read without PyTorch.

Every rank trains on data of its own; what was saved is told by PyTorch's own gathering of the full state.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import torch_impl
from bridge import verify
from bridge.core.formats import Box, CheckpointError, open_checkpoint
from bridge.core.formats.dcp.reader import DcpReader
from bridge.core.formats.safetensors.reader import SafetensorsReader
from tests.support.bridge.bits import same_bits
from tests.support.bridge.dcp_files import array_of, edit_metadata, numbered, stock_save
from tests.support.bridge.plain_torch import build, optimizer_of, shard, train, trees
from tests.support.ranks import RankGroup

Arrays = Mapping[str, np.ndarray]


# On the ranks.


def truth(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Weights and optimizer state, gathered; on rank 0 only."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    tensors = {f"model.{name}": value for name, value in weights.items()}
    for name, entry in state.get("state", {}).items():
        tensors.update({f"optimizer.state.{name}.{key}": value for key, value in entry.items()})
    return {name: array_of(value) for name, value in tensors.items()}


def sharded(strategy: str) -> tuple[nn.Module, torch.optim.AdamW]:
    """Trained for two steps."""
    model = build()
    rank_and_world = shard(model, strategy)
    optimizer = optimizer_of(model)
    train(model, optimizer, rank_and_world, range(2))
    return model, optimizer


def save_stock(strategy: str, path: str, how: str = "save") -> dict[str, np.ndarray]:
    model, optimizer = sharded(strategy)
    state = trees(model, optimizer)
    if how == "async":
        dcp.async_save(state, checkpoint_id=path).result()
    elif how == "alone":
        dcp.save(state, checkpoint_id=path, use_collectives=False)
    elif how == "many files":
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, single_file_per_rank=False))
    elif how == "safetensors":
        writer = dcp.FileSystemWriter(path, serialization_format=SerializationFormat.SAFETENSORS)
        dcp.save(state, storage_writer=writer)
    else:
        dcp.save(state, checkpoint_id=path)
    return truth(model, optimizer)


def save_ours(path: str) -> dict[str, np.ndarray]:
    """Rows as our layout cuts them, which is not as torch.chunk does."""
    model = torch_impl.fully_shard(build())
    optimizer = optimizer_of(model)
    train(model, optimizer, (dist.get_rank(), dist.get_world_size()), range(2))
    torch_impl.save_checkpoint(path, model, optimizer)
    weights = {f"model.{n}": torch_impl.full_tensor(p.detach()) for n, p in model.named_parameters()}
    return {name: array_of(value) for name, value in weights.items()}


def save_like_torchtitan(path: str) -> dict[str, np.ndarray]:
    """Weights at the root, the optimizer flattened, the rest as numbers, lists and pickled bytes."""
    model, optimizer = sharded("fsdp2")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    weights, state = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    loader = {f"dp_rank_{dist.get_rank()}": pickle.dumps({"seen": 7 + dist.get_rank()}), "world_size": 3}
    dcp.save(
        {
            **weights,
            "optimizer": state,
            "lr_scheduler": schedule.state_dict(),
            "dataloader": loader,
            "train_state": {"step": torch.tensor(2, dtype=torch.int32), "ntokens_seen": 1 << 40},
        },
        checkpoint_id=path,
    )
    return truth(model, optimizer)


def save_hugging_face(path: str, consolidated: bool) -> dict[str, np.ndarray]:
    model, optimizer = sharded("fsdp2")
    weights, _ = get_state_dict(model, optimizer)
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=consolidated)
    dcp.save(weights, storage_writer=writer)
    full = truth(model, optimizer)
    return {name.removeprefix("model."): a for name, a in full.items() if name.startswith("model.")}


def save_own_values(path: str) -> None:
    """What is not sharded is each rank's own, as random states are."""
    rng = torch.tensor([5, 6, 7 + dist.get_rank()])
    state = {"rng": rng, "seen": 5 + dist.get_rank(), "same": torch.ones(2)}
    dcp.save(state, checkpoint_id=path, use_collectives=False)


# Here.


def assert_holds(path: Path, expected: Arrays) -> None:
    with open_checkpoint(path) as reader:
        for name, array in expected.items():
            assert same_bits(reader.read(name), array), name
            if array.ndim == 2 and array.shape[0] > 2:
                box = Box((1, 1), (array.shape[0] - 2, array.shape[1] - 1))
                assert same_bits(reader.read(name, box), np.ascontiguousarray(array[box.slices()]))


@pytest.mark.fast_cases("fsdp2-3", "fsdp x tp-4")
@pytest.mark.parametrize(
    ("strategy", "world"), [("fsdp2", 2), ("fsdp2", 3), ("fsdp2", 4), ("hsdp", 4), ("fsdp x tp", 4)]
)
def test_whatever_the_sharding_every_tensor_is_read_whole(
    ranks: RankGroup, tmp_path: Path, strategy: str, world: int
) -> None:
    expected, *_ = ranks.run(world, save_stock, strategy, str(tmp_path / "c"))
    assert len(expected) == 8 * 4
    assert_holds(tmp_path / "c", expected)
    with DcpReader(tmp_path / "c") as reader:
        chunks = len(reader.tensors["model.0.weight"].chunks)
        assert chunks == (2 if strategy == "hsdp" else world)
        assert reader.objects["note"] == ("x", 1)
        assert reader.objects["optimizer.param_groups.0.betas"] == (0.8, 0.9)


@pytest.mark.fast_cases("many files")
@pytest.mark.parametrize("how", ["async", "many files"])
def test_other_ways_of_saving_make_no_difference(ranks: RankGroup, tmp_path: Path, how: str) -> None:
    expected, *_ = ranks.run(3, save_stock, "fsdp2", str(tmp_path / "c"), how)
    assert_holds(tmp_path / "c", expected)
    assert len(list((tmp_path / "c").glob("*.distcp"))) > (64 if how == "many files" else 2)


def test_our_own_uneven_shards_are_read_whole(ranks: RankGroup, tmp_path: Path) -> None:
    expected, *_ = ranks.run(3, save_ours, str(tmp_path / "c"))
    assert_holds(tmp_path / "c", expected)
    with DcpReader(tmp_path / "c") as reader:
        rows = [chunk.sizes[0] for name in expected for chunk in reader.tensors[name].chunks]
        assert len(set(rows)) > 3


def test_a_directory_as_torchtitan_writes_it_is_read_whole(ranks: RankGroup, tmp_path: Path) -> None:
    expected, *_ = ranks.run(2, save_like_torchtitan, str(tmp_path / "c"))
    assert_holds(tmp_path / "c", {name.removeprefix("model."): array for name, array in expected.items()})
    with DcpReader(tmp_path / "c") as reader:
        assert reader.tensors["0.weight"].path == ("0.weight",)
        path = reader.tensors["optimizer.state.0.weight.exp_avg"].path
        assert path == ("optimizer", "state.0.weight.exp_avg")
        assert reader.objects["optimizer.param_groups.4.weight.betas"] == (0.8, 0.9)
        assert reader.objects["lr_scheduler.last_epoch"] == 0
        assert reader.objects["train_state.ntokens_seen"] == 1 << 40
        for rank in range(2):
            state = reader.objects[f"dataloader.dp_rank_{rank}"]
            assert isinstance(state, bytes)
            assert pickle.loads(state) == {"seen": 7 + rank}
        assert {"lr_scheduler.lr_lambdas", "dataloader.world_size"} <= dict(reader.objects).keys()


@pytest.mark.fast_cases("hsdp")
@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp"])
def test_one_metadata_file_per_rank_is_put_together(ranks: RankGroup, tmp_path: Path, strategy: str) -> None:
    expected, *_ = ranks.run(4, save_stock, strategy, str(tmp_path / "c"), "alone")
    assert not (tmp_path / "c" / ".metadata").exists()
    assert_holds(tmp_path / "c", expected)
    assert verify(tmp_path / "c")
    with DcpReader(tmp_path / "c") as reader:
        assert reader.objects["note"] == ("x", 1)
        assert len(reader._metadata.copies["step", 0]) == 3
        # One alone would not be compared with the others.
        memory = memoryview(bytearray(reader.tensors["step"].nbytes))
        assert reader.read_into([("step", memory)]) == [None]
        assert ("model.0.weight", 0) in reader._metadata.copies or strategy == "fsdp2"
    (tmp_path / "c" / "__2.metadata").rename(tmp_path / "kept")
    with pytest.raises(
        CheckpointError, match=r"the metadata of every rank, found 3 files .* but no __2\.metadata"
    ):
        open_checkpoint(tmp_path / "c")
    (tmp_path / "kept").rename(tmp_path / "c" / "__2.metadata")
    (tmp_path / "c" / "__3.metadata").unlink()
    if strategy == "fsdp2":
        with pytest.raises(CheckpointError, match=r"tensor 'model\.0\.weight': .* is in 0 \(3 chunks hold"):
            open_checkpoint(tmp_path / "c")


def test_values_that_differ_between_ranks_are_not_taken_from_one_of_them(
    ranks: RankGroup, tmp_path: Path
) -> None:
    ranks.run(2, save_own_values, str(tmp_path / "c"))
    with DcpReader(tmp_path / "c") as reader:
        assert reader.read("same").tolist() == [1, 1]
        with pytest.raises(
            CheckpointError, match=r"__1_0.distcp: tensor 'rng', .* as in __0_0.distcp.*--drop"
        ):
            reader.read("rng")
        with pytest.raises(
            CheckpointError, match=r"__1_0.distcp: object 'seen': .* got a different value from __0_0.distcp"
        ):
            reader.objects["seen"]


def test_copies_without_checksums_are_compared_by_their_bytes(ranks: RankGroup, tmp_path: Path) -> None:
    ranks.run(2, save_own_values, str(tmp_path / "c"))
    with DcpReader(tmp_path / "c") as reader, pytest.MonkeyPatch.context() as patch:
        find = DcpReader._find

        def unchecked(self: DcpReader, *args: Any) -> Any:
            return find(self, *args)._replace(record=None)

        patch.setattr(DcpReader, "_find", unchecked)
        patch.setattr("bridge.core.formats.dcp.reader.BLOCK", 8)
        assert reader.read("same").tolist() == [1, 1]
        with pytest.raises(CheckpointError, match=r"tensor 'rng'.* expected the same values"):
            reader.read("rng")


def test_ranks_that_contradict_each_other_are_refused(ranks: RankGroup, tmp_path: Path) -> None:
    ranks.run(2, save_own_values, str(tmp_path / "c"))
    (tmp_path / "one").mkdir()
    rank = tmp_path / "c" / "__1.metadata"
    for change, why in (
        (lambda m: setattr(m.state_dict_metadata["rng"].properties, "dtype", torch.int32), "got int32"),
        (lambda m: m.planner_data.update(same=("other",)), r"got float32 \(2,\) at \('other',\)"),
        (lambda m: m.planner_data.update(seen=("other",)), "path of 'seen' to be the same on all ranks"),
    ):
        shutil.copy(rank, tmp_path / "one" / ".metadata")
        edit_metadata(tmp_path / "one", change)
        kept = rank.read_bytes()
        rank.write_bytes((tmp_path / "one" / ".metadata").read_bytes())
        with pytest.raises(CheckpointError, match=why):
            open_checkpoint(tmp_path / "c")
        rank.write_bytes(kept)


@pytest.mark.parametrize("world", [1, 3])
def test_the_half_finished_safetensors_serialization_is_read(
    ranks: RankGroup, tmp_path: Path, world: int
) -> None:
    """PyTorch itself cannot load what it saves so."""
    expected, *_ = ranks.run(world, save_stock, "fsdp2", str(tmp_path / "c"), "safetensors")
    assert_holds(tmp_path / "c", expected)
    with DcpReader(tmp_path / "c") as reader:
        assert reader.objects["note"] == ("x", 1)


@pytest.mark.parametrize("value", [io.BytesIO(b"x"), np.ones(1), (torch.ones(2), 1), {1, 2}, Path("x")])
def test_a_value_that_is_not_plain_data_is_named_and_can_be_left_out(tmp_path: Path, value: object) -> None:
    stock_save({"w": numbered((2,)), "odd": value, "raw": b"\0\xff", "empty": b""}, tmp_path / "c")
    with DcpReader(tmp_path / "c") as reader:
        with pytest.raises(
            CheckpointError, match=r"__0_0.distcp: object 'odd': expected a plain value, found (an?|one) "
        ):
            reader.objects["odd"]
        assert (reader.objects["raw"], reader.objects["empty"]) == (b"\0\xff", b"")


def test_a_chunk_that_the_safetensors_serialization_overwrote_is_noticed(tmp_path: Path) -> None:
    """It keys chunks by name alone: of several on one rank the last one wins."""
    writer = dcp.FileSystemWriter(tmp_path / "c", serialization_format=SerializationFormat.SAFETENSORS)
    stock_save({"w": numbered((4, 3)), "v": numbered((2,))}, tmp_path / "c", writer)
    with DcpReader(tmp_path / "c") as reader:
        assert same_bits(reader.read("w"), array_of(numbered((4, 3))))

    def as_second_half(m: Any) -> None:
        entry = m.state_dict_metadata["w"]
        (chunk,), (index,) = entry.chunks, [i for i in m.storage_data if i.fqn == "w"]
        entry.size = torch.Size((8, 3))
        storage = m.storage_data.pop(index)
        entry.chunks = [type(chunk)(torch.Size((row, 0)), torch.Size((4, 3))) for row in (0, 4)]
        m.storage_data.update({type(index)("w", c.offsets): storage for c in entry.chunks})

    edit_metadata(tmp_path / "c", as_second_half)
    with DcpReader(tmp_path / "c") as reader:
        assert reader.read("v").tolist() == [0, 1]
        assert reader.read("w", Box((0, 0), (4, 3))).sum() == 66
        with pytest.raises(
            CheckpointError, match=r"chunk at \(4, 0\): .* got the chunk at \(0, 0\): .* are lost"
        ):
            reader.read("w")


def test_the_files_of_ranks_in_hugging_face_style_are_put_together(ranks: RankGroup, tmp_path: Path) -> None:
    expected, *_ = ranks.run(3, save_hugging_face, str(tmp_path / "c"), False)
    assert_holds(tmp_path / "c", expected)
    with SafetensorsReader(tmp_path / "c") as reader:
        assert len(reader.tensors["0.weight"].chunks) == 3
        assert reader.objects == {}
    (tmp_path / "c" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensor '0\.bias': .* element \(5,\) is in 0"):
        open_checkpoint(tmp_path / "c")


def test_what_pytorch_consolidated_in_hugging_face_style_is_read(ranks: RankGroup, tmp_path: Path) -> None:
    expected, *_ = ranks.run(2, save_hugging_face, str(tmp_path / "c"), True)
    assert_holds(tmp_path / "c", expected)
    assert_holds(tmp_path / "c" / "sharded", expected)


def test_values_that_pytorch_mixes_into_a_safetensors_file_are_explained(tmp_path: Path) -> None:
    """It writes their pickles in front of the header, so that nothing can read the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(tmp_path / "c"))
        dcp.save({"w": numbered((2, 3)), "lr": 0.5}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointError, match="values that are not tensors"):
        open_checkpoint(tmp_path / "c")


def test_the_index_of_a_hugging_face_save_by_one_rank_is_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = HuggingFaceStorageWriter(str(tmp_path / "c"), fqn_to_index_mapping={"w": 1, "v": 2})
        dcp.save({"w": numbered((2, 3)), "v": numbered((4,))}, storage_writer=writer, no_dist=True)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    assert_holds(tmp_path / "c", {"w": array_of(numbered((2, 3))), "v": array_of(numbered((4,)))})
