"""What lies beside a checkpoint and is not read: named by every command, and no word of what nobody could miss."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from bridge.checkpoints.compare.diff import diff
from bridge.checkpoints.convert.conversion import convert
from bridge.checkpoints.inspect.summary import inspect
from bridge.checkpoints.verify.verification import verify
from bridge.commands.main import app
from bridge.core.formats import CheckpointError, create_checkpoint, open_checkpoint
from bridge.core.formats.orbax.items_writer import OrbaxItemsWriter
from tests.checkpoints.test_whole_folders import index, save, told

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

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
    assert "training state" in left["optimizer.pt"]
    compared = diff(folder, folder).left_alone
    assert {Path(name).name for name in compared} == {Path(name).name for name in left}
    # One file that is given by its path has neighbours that are anybody's.
    assert told(folder / "model.safetensors", tmp_path / "o3") == {}


def test_data_files_of_dcp_that_the_metadata_does_not_name_are_named(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "d")
    assert told(tmp_path / "d", tmp_path / "o") == {}
    shutil.copy(tmp_path / "d" / "__0_0.distcp", tmp_path / "d" / "__3_0.distcp")
    assert told(tmp_path / "d", tmp_path / "o2") == {
        "__3_0.distcp": "the metadata names nothing in this file"
    }


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
        assert "not read: optimizer.pt: training state" in result.output
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
