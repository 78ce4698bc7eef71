"""Folders read as a whole: what is missing is refused by name, and what is left alone is named by every command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import flax.serialization
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.convert.plan import ConvertOptions, planned
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.core.formats import CheckpointError, open_checkpoint
from bridge.core.formats.reading.model_files import numbered_sets

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(path: Path, *names: str) -> None:
    """A file of a format that its name says, with these tensors; an index is of the files in its directory."""
    arrays = {name: np.full(3, ord(name[0]), np.float32) for name in names}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(arrays, path)
    elif path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".msgpack":
        path.write_bytes(flax.serialization.msgpack_serialize(arrays))
    elif path.suffix in (".bin", ".pt", ".pth"):
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    else:
        path.write_bytes(b"\0" * 8)


def index(path: Path, weight_map: Mapping[str, str]) -> None:
    path.write_text(json.dumps({"weight_map": weight_map}))


def told(path: Path, out: Path) -> Mapping[str, str]:
    """What is left alone: the same by each command and each way."""
    left = inspect(path).left_alone
    report = verify(path)
    assert report.good
    assert report.left_alone == left
    with planned(path, ConvertOptions("dcp")) as (conversion, _):
        assert conversion.left_alone == left
    copy = convert(path, out, to="dcp")
    assert copy.left_alone == left
    assert bool(copy) is copy.complete is not left
    return left


NUMBERS = {
    "one of two": (["model-00001-of-00002{}"], "model-00002-of-00002{}"),
    "the last of two": (["model-00002-of-00002{}"], "model-00001-of-00002{}"),
    "a gap": (["weights_1_of_3{}", "weights_3_of_3{}"], "weights_2_of_3{}"),
    "counted from 0": (["part-0-of-3{}", "part-1-of-3{}"], "part-2-of-3{}"),
    "a rank of a world": (["model_world_size_2_rank_0{}"], "model_world_size_2_rank_1{}"),
    "a second number": (["model_world_size_2_rank_0_tp_rank_1{}"], "model_world_size_2_rank_1_tp_rank_1{}"),
    "the second rank alone": (["mp_rank_01_model_states{}"], "mp_rank_00_model_states{}"),
    "more than can be listed": (["model-00001-of-999999999{}"], "999999993 more are missing"),
}


@pytest.mark.parametrize("end", [".safetensors", ".bin", ".pt", ".npz", ".msgpack"])
@pytest.mark.parametrize("case", NUMBERS)
def test_a_folder_without_a_file_that_its_numbers_call_for_is_refused(
    tmp_path: Path, case: str, end: str
) -> None:
    names, missing = NUMBERS[case]
    for k, name in enumerate(names):
        save(tmp_path / "d" / name.format(end), "abc"[k])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "d")
    assert missing.format(end) in str(caught.value)
    assert names[0].format(end) in str(caught.value)
    report = verify(tmp_path / "d")
    assert not report
    assert missing.format(end) in report.problems[0].text
    with pytest.raises(CheckpointError, match="give the path of one file"):
        convert(tmp_path / "d", tmp_path / "o", to="dcp")
    # The advice holds, and the file that is not read is named.
    left = told(tmp_path / "d" / names[0].format(end), tmp_path / "o")
    assert missing.format(end) in left or "more" in missing


@pytest.mark.parametrize(
    "names",
    [
        [
            "model-00001-of-00002.safetensors",
            "model-1-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ],
        ["model-00001-of-00002.bin", "model-00002-of-00002.bin", "model-00003-of-00002.bin"],
    ],
)
def test_a_number_that_is_there_twice_or_above_the_count_is_refused(
    tmp_path: Path, names: Sequence[str]
) -> None:
    for k, name in enumerate(names):
        save(tmp_path / name, "abc"[k])
    with pytest.raises(CheckpointError, match="a number that occurs twice, or exceeds the count"):
        open_checkpoint(tmp_path)


def test_sets_of_different_counts_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002", "model-00002-of-00002", "model-00001-of-00003"):
        save(tmp_path / f"{name}.safetensors", "a")
    with pytest.raises(CheckpointError, match="expected one file of weights, found model-00001-of-00002"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("end", [".safetensors", ".bin", ".msgpack"])
def test_all_numbers_without_an_index_are_one_checkpoint(tmp_path: Path, end: str) -> None:
    for k in range(3):
        save(tmp_path / "d" / f"model-0000{k + 1}-of-00003{end}", "abc"[k])
    assert told(tmp_path / "d", tmp_path / "o") == {}
    with open_checkpoint(tmp_path / "o") as reader:
        assert {name: reader.read(name)[0] for name in reader.tensors} == {"a": 97, "b": 98, "c": 99}


def test_numbers_of_npz_files_are_not_joined(tmp_path: Path) -> None:
    for k in range(2):
        save(tmp_path / f"part-{k}-of-2.npz", "ab"[k])
    with pytest.raises(CheckpointError, match="expected one archive of NumPy"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("consolidated.00.pth", "consolidated.01.pth"), "1 tensor not alike on all ranks"),
        (("rank0.pt", "rank1.pt"), "1 tensor not alike on all ranks"),
        (("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"), "1 tensor not alike on all ranks"),
        (("tp_rank_0.safetensors", "tp_rank_1.safetensors"), "each file contains pieces of the same tensors"),
    ],
)
def test_files_of_ranks_are_said_to_hold_pieces(tmp_path: Path, names: Sequence[str], why: str) -> None:
    for rank, name in enumerate(names):
        save(tmp_path / "d" / name, "a")
        if name.endswith(("pt", "pth")):
            torch.save({"a": torch.full((3,), float(rank)), "same": torch.ones(2)}, tmp_path / "d" / name)
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(tmp_path / "d")
    assert names[1] in told(tmp_path / "d" / names[0], tmp_path / "o")


def test_a_rank_in_a_folder_of_its_own_names_its_neighbours(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / f"mp_rank_0{rank}" / "model_optim_rng.pt", "a")
    assert {*told(tmp_path / "mp_rank_00", tmp_path / "o")} == {"mp_rank_01"}
    by_file = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    assert {*told(by_file, tmp_path / "of_file")} == {"mp_rank_01"}


def test_placeholders_of_zero_stage_3_are_no_weights(tmp_path: Path) -> None:
    state = {
        "module": {"w": torch.empty(0), "table": torch.ones(3)},
        "param_shapes": [{"w": torch.Size((2, 2))}],
    }
    for rank in range(2):
        torch.save(state, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    for source, why in (
        (tmp_path, r"expected optim files of ranks 0 to 0 .*, found none of rank 0: fetch all files"),
        (
            tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt",
            r"'module\.w' \(a placeholder of DeepSpeed.*give the folder with all files",
        ),
    ):
        with pytest.raises(CheckpointError, match=why):
            convert(source, tmp_path / "o", to="safetensors")


def test_a_rank_of_lora_is_no_number_of_a_file(tmp_path: Path) -> None:
    save(tmp_path / "d" / "lora_rank_8.pt", "a")
    assert told(tmp_path / "d", tmp_path / "o") == {}
    save(tmp_path / "d" / "lora_rank_16.pt", "a")
    assert told(tmp_path / "d" / "lora_rank_8.pt", tmp_path / "o2") == {}
    assert numbered_sets(["lora_rank_8.pt", "epoch_3.pt", "step-1000.pt"]) == []
    folds = ("Fold_1_of_5.pt", "model.epoch-3-of-10.pt")
    assert numbered_sets(folds) == []
    for fold in folds:
        save(tmp_path / fold.removesuffix(".pt") / fold, "a")
        assert told(tmp_path / fold.removesuffix(".pt"), tmp_path / f"copy of {fold}") == {}
    save(tmp_path / "part-1-of-3" / "model.pt", "a")
    assert told(tmp_path / "part-1-of-3", tmp_path / "o3") == {}


def test_a_shard_of_pytorchs_ranks_that_lacks_its_second_file_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "shard-00001-model-00001-of-00002.safetensors", "a")
    save(tmp_path / "shard-00002-model-00001-of-00002.safetensors", "b")
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("stem", "end", "read"),
    [
        ("model", ".safetensors", "z"),
        ("pytorch_model", ".bin", "z"),
        ("flax_model", ".msgpack", "z"),
        # diffusers looks for the index first.
        ("diffusion_pytorch_model", ".safetensors", "a"),
        ("diffusion_pytorch_model", ".bin", "a"),
    ],
)
def test_one_file_beside_an_index_is_read_as_its_library_reads_it(
    tmp_path: Path, stem: str, end: str, read: str
) -> None:
    shards = [f"{stem}-0000{k}-of-00002{end}" for k in (1, 2)]
    save(tmp_path / "d" / shards[0], "a")
    save(tmp_path / "d" / shards[1], "b")
    index(tmp_path / "d" / f"{stem}{end}.index.json", {"a": shards[0], "b": shards[1]})
    save(tmp_path / "d" / f"{stem}{end}", "z")
    left = told(tmp_path / "d", tmp_path / "o")
    with open_checkpoint(tmp_path / "d") as reader:
        assert read in reader.tensors
    assert {*left} == ({f"{stem}{end}.index.json", *shards} if read == "z" else {f"{stem}{end}"})


def test_an_index_of_the_one_file_is_obeyed(tmp_path: Path) -> None:
    save(tmp_path / "d" / "model.safetensors", "a")
    index(tmp_path / "d" / "model.safetensors.index.json", {"a": "model.safetensors"})
    assert told(tmp_path / "d", tmp_path / "o") == {}
    index(
        tmp_path / "d" / "model.safetensors.index.json", {"a": "model.safetensors", "b": "model.safetensors"}
    )
    with pytest.raises(CheckpointError, match="not in that file: 'b'"):
        open_checkpoint(tmp_path / "d")


def test_shards_that_the_index_does_not_name_are_named(tmp_path: Path) -> None:
    names = [f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)]
    for k, name in enumerate(names):
        save(tmp_path / "d" / name, "abc"[k])
    index(tmp_path / "d" / "model.safetensors.index.json", {"a": names[0], "b": names[1]})
    assert {*told(tmp_path / "d", tmp_path / "o")} == {names[2]}
    (tmp_path / "d" / names[2]).unlink()
    assert {*told(tmp_path / "d", tmp_path / "o2")} == {names[2]}
    (tmp_path / "d" / names[1]).unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        open_checkpoint(tmp_path / "d")
