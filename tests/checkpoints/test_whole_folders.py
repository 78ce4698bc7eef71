"""Folders read as a whole: what is missing is refused by name, and what is left alone is named by every command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import flax.serialization
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file
from typer.testing import CliRunner

from bridge.checkpoints.convert import ConvertOptions, convert, planned
from bridge.checkpoints.summary import inspect
from bridge.checkpoints.verify import verify
from bridge.commands.main import app
from bridge.formats import CheckpointError, create_checkpoint, open_checkpoint
from bridge.formats.files.numbered import numbered_sets
from bridge.formats.orbax.items_writer import OrbaxItemsWriter

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
    with pytest.raises(CheckpointError, match="a number that is there twice, or above the count"):
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
        (("consolidated.00.pth", "consolidated.01.pth"), "1 tensors that differ between ranks"),
        (("rank0.pt", "rank1.pt"), "1 tensors that differ between ranks"),
        (("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"), "1 tensors that differ between ranks"),
        (("tp_rank_0.safetensors", "tp_rank_1.safetensors"), "each has a piece of the same tensors"),
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


ORDINARY = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "LICENSE",
    ),
    *("special_tokens_map.json", "merges.txt", "vocab.json", "tokenizer.model", "spiece.model", "model.png"),
    *(
        "training_args.bin",
        "trainer_state.json",
        ".gitattributes",
        "modeling_x.py",
        "preprocessor_config.json",
    ),
    *("events.out.tfevents.1", "all_results.json", "chat_template.jinja", "latest", "zero_to_fp32.py"),
)
FOREIGN = (
    *(
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
        "adapter_model.safetensors",
        "model.gguf",
        "tf_model.h5",
    ),
    *(
        "pytorch_model.bin",
        "flax_model.msgpack",
        "consolidated.00.pth",
        "model.fp16.safetensors",
        "model.onnx",
    ),
    *("weights.npz", "__0_0.distcp", "rust_model.ot"),
)


def test_ordinary_files_of_a_hub_folder_raise_no_alarm_and_other_weights_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    save(folder / "model.safetensors", "a")
    for name in ORDINARY:
        save(folder / name, "b")
    for below in ("runs", ".cache", "images", "1_Pooling"):
        save(folder / below / "config.json", "b")
    assert told(folder, tmp_path / "o") == {}
    for name in FOREIGN:
        save(folder / name, "b")
    save(folder / "2_Dense" / "model.safetensors", "b")
    save(folder / "checkpoint-500" / "pytorch_model.bin", "b")
    left = told(folder, tmp_path / "o2")
    assert {*left} == {*FOREIGN, "2_Dense/", "checkpoint-500/"}
    assert "state of a training" in left["optimizer.pt"]
    # One file that is given by its path has neighbours that are anybody's.
    assert told(folder / "model.safetensors", tmp_path / "o3") == {}


def test_data_files_of_dcp_that_the_metadata_does_not_name_are_named(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "d")
    assert told(tmp_path / "d", tmp_path / "o") == {}
    shutil.copy(tmp_path / "d" / "__0_0.distcp", tmp_path / "d" / "__3_0.distcp")
    assert told(tmp_path / "d", tmp_path / "o2") == {"__3_0.distcp": "the metadata names nothing in it"}


def test_a_rank_whose_metadata_alone_is_missing_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    (tmp_path / ".metadata").rename(tmp_path / "__0.metadata")
    open_checkpoint(tmp_path).close()
    shutil.copy(tmp_path / "__0_0.distcp", tmp_path / "__1_0.distcp")
    with pytest.raises(CheckpointError, match=r"found 1 and no __1\.metadata"):
        open_checkpoint(tmp_path)


def tree(path: Path, *names: str) -> Path:
    with create_checkpoint(path, "orbax") as writer:
        for name in names:
            info = writer.add_tensor(("params", name), (3,), np.dtype(np.float32))
            for box in writer.chunks(info.name):
                writer.write(info.name, box, np.ones(3, np.float32))
    return path


def test_a_process_whose_index_was_never_merged_is_named(tmp_path: Path) -> None:
    whole, other = tree(tmp_path / "d", "w"), tree(tmp_path / "e", "w", "lost")
    assert told(whole, tmp_path / "o") == {}
    process = whole / "ocdbt.process_1"
    shutil.copytree(other / "d", process / "d")
    shutil.copy(other / "manifest.ocdbt", process / "manifest.ocdbt")
    left = told(whole, tmp_path / "o2")
    assert {*left} == {"ocdbt.process_1/"}
    assert "params.lost" in left["ocdbt.process_1/"]
    # All of it is in the whole, too.
    shutil.rmtree(process)
    shutil.copytree(whole / "d", process / "d")
    shutil.copy(whole / "manifest.ocdbt", process / "manifest.ocdbt")
    assert told(whole, tmp_path / "o3") == {}
    (process / "manifest.ocdbt").write_bytes(b"damaged")
    assert {*told(whole, tmp_path / "o4")} == {"ocdbt.process_1/"}


def test_arrays_that_the_tree_of_orbax_does_not_name_are_named(tmp_path: Path) -> None:
    whole = tree(tmp_path / "d", "w", "v")
    metadata = json.loads((whole / "_METADATA").read_text())
    entry = next(key for key in metadata["tree_metadata"] if "'v'" in key)
    del metadata["tree_metadata"][entry]
    (whole / "_METADATA").write_text(json.dumps(metadata))
    # Our manifest would tell of the change; stock Orbax has none.
    (whole / "twinshard_manifest.json").unlink()
    assert {*told(whole, tmp_path / "o")} == {"params.v"}


@pytest.mark.filterwarnings("ignore:.*also holds metrics")
def test_other_items_of_a_step_are_named(tmp_path: Path) -> None:
    tree(tmp_path / "run" / "7" / "state", "w")
    save(tmp_path / "run" / "7" / "metrics" / "metrics", "x")
    assert {*told(tmp_path / "run", tmp_path / "o")} == {"metrics/"}
    with OrbaxItemsWriter(tmp_path / "two", ["params", "opt_state"]) as writer:
        for key in ("params", "opt_state"):
            info = writer.add_tensor((key, "w"), (3,), np.dtype(np.float32))
            for box in writer.chunks(info.name):
                writer.write(info.name, box, np.ones(3, np.float32))
    assert told(tmp_path / "two", tmp_path / "o2") == {}
    save(tmp_path / "two" / "metrics" / "metrics", "x")
    assert {*told(tmp_path / "two", tmp_path / "o3")} == {"metrics/"}


def test_the_parts_of_a_pipeline_name_what_is_beside_each(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "model_index.json").write_text(json.dumps({"unet": ["a", "B"], "vae": ["a", "C"]}))
    save(tmp_path / "d" / "unet" / "diffusion_pytorch_model.safetensors", "a")
    save(tmp_path / "d" / "vae" / "diffusion_pytorch_model.safetensors", "b")
    save(tmp_path / "d" / "vae" / "config.json", "b")
    assert told(tmp_path / "d", tmp_path / "o") == {}
    save(tmp_path / "d" / "vae" / "diffusion_pytorch_model.fp16.safetensors", "c")
    assert {*told(tmp_path / "d", tmp_path / "o2")} == {"vae/diffusion_pytorch_model.fp16.safetensors"}


def test_what_is_left_alone_is_named_at_a_url(tmp_path: Path) -> None:
    save(tmp_path / "d" / "model-00001-of-00002.safetensors", "a")
    index(tmp_path / "d" / "model.safetensors.index.json", {"a": "model-00001-of-00002.safetensors"})
    save(tmp_path / "d" / "model-mtp.safetensors", "b")
    save(tmp_path / "d" / "checkpoint-5" / "model.safetensors", "b")
    expected = {"model-mtp.safetensors", "model-00002-of-00002.safetensors", "checkpoint-5/"}
    url = f"file://{tmp_path / 'd'}"
    assert {*inspect(url).left_alone} == {*verify(url).left_alone} == expected
    assert {*convert(url, tmp_path / "o", to="dcp").left_alone} == expected


def test_commands_print_what_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "d" / "model.safetensors", "a")
    save(tmp_path / "d" / "optimizer.pt", "a")
    run = CliRunner().invoke
    for command in (
        ["inspect", f"{tmp_path / 'd'}"],
        ["verify", f"{tmp_path / 'd'}"],
        ["convert", f"{tmp_path / 'd'}", f"{tmp_path / 'o'}", "--dry-run"],
        ["convert", f"{tmp_path / 'd'}", f"{tmp_path / 'o'}"],
    ):
        result = run(app, command)
        assert result.exit_code == 0, result.output
        assert "not read: optimizer.pt: state of a training" in result.output
        document = json.loads(run(app, [*command[:2], "--json"]).stdout) if command[0] != "convert" else {}
        assert "optimizer.pt" in document.get("left_alone", {"optimizer.pt"})


def test_the_description_of_an_adapter_stays_where_its_weights_stay(tmp_path: Path) -> None:
    """Beside weights without it, `from_pretrained` would look for the adapter."""
    folder = tmp_path / "d"
    for name in ("adapter_config.json", "config.json"):
        save(folder / name, "a")
    save(folder / "adapter_model.safetensors", "a")
    alone = convert(folder, tmp_path / "o", to="dcp")
    assert {*alone.companions} == {"adapter_config.json", "config.json"}
    save(folder / "model.safetensors", "b")
    both = convert(folder, tmp_path / "o2", to="dcp")
    assert both.companions == ("config.json",)
    assert {*both.not_copied} == {"adapter_config.json"}
    assert not (tmp_path / "o2" / "adapter_config.json").exists()


def test_an_index_by_its_path_is_its_folder(tmp_path: Path) -> None:
    save(tmp_path / "d" / "model-00001-of-00001.safetensors", "a")
    save(tmp_path / "d" / "mtp.safetensors", "b")
    index(tmp_path / "d" / "model.safetensors.index.json", {"a": "model-00001-of-00001.safetensors"})
    assert {*told(tmp_path / "d" / "model.safetensors.index.json", tmp_path / "o")} == {"mtp.safetensors"}


def test_a_rank_of_pytorch_without_a_file_is_named(tmp_path: Path) -> None:
    for rank, name in ((1, "a"), (4, "b")):
        save(tmp_path / "d" / f"shard-0000{rank}-model-00001-of-00001.safetensors", name)
    left = told(tmp_path / "d", tmp_path / "o")
    assert {*left} == {"shard-00002-*", "shard-00003-*", "shard-00005-*"}
    assert "no file says how many ranks there were" in left["shard-00005-*"]
