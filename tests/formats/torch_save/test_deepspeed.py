"""Checkpoints of DeepSpeed's ZeRO, with the shards of all ranks joined.

`zero_0_19_8.zip` has small ones that DeepSpeed 0.19.8 itself wrote on 2 and 3 ranks with different data, after three
steps of AdamW with two groups and a frozen bias. `by_deepspeed.npz` in it is what DeepSpeed makes of each: stages 1 and
2 by ``ds_to_universal``, stage 3 by ``safe_get_full_fp32_param`` and ``safe_get_full_optimizer_state``.
"""

from __future__ import annotations

import enum
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bridge import convert, diff, verify
from bridge.core.formats import Box, CheckpointError, open_checkpoint

STAGES = (1, 2, 3)
SHAPES = [{"embed.weight": (11, 6), "up.weight": (6, 6)}, {"up.bias": (5,), "scale": (1,)}]
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Stage(enum.Enum):
    """A value that only a class of the program could read, as in DeepSpeed's own files."""

    GRADIENTS = 2


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    with zipfile.ZipFile(Path(__file__).with_name("zero_0_19_8.zip")) as archive:
        archive.extractall(folder)
    return folder


def state(seed: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    """The weight, moments and step count of each weight."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {
            **{key: torch.randn(shape, generator=generator) for key in ("", "exp_avg", "exp_avg_sq")},
            "step": torch.tensor(3.0),
        }
        for group in SHAPES
        for name, shape in group.items()
    }


def flats(values: dict[str, torch.Tensor], stage: int, world: int, paddings: list[int]) -> list[torch.Tensor]:
    """The flat part of each rank of one group's values."""
    if stage == 3:
        parts: list[list[torch.Tensor]] = [[] for _ in range(world)]
        for value in values.values():
            part = -(-value.numel() // world)
            padded = torch.cat([value.reshape(-1), torch.full((part * world - value.numel(),), 9.0)])
            for rank, piece in enumerate(padded.split(part)):
                parts[rank].append(piece)
        return [torch.cat(part) for part in parts]
    pairs = zip(values.values(), paddings, strict=True)
    rows = [torch.cat([value.reshape(-1), torch.full((padding,), 9.0)]) for value, padding in pairs]
    flat = torch.cat(rows)
    flat = torch.cat([flat, torch.full((-flat.numel() % (2 * world),), 9.0)])
    return [part.clone() for part in flat.chunk(world)]


def saved(folder: Path, stage: int, world: int, **changes: Any) -> Path:
    """A checkpoint of ZeRO as DeepSpeed 0.19.8 lays it out. changes: of the model's file."""
    folder.mkdir()
    values, paddings = state(), [[2, 0], [0, 1]] if stage < 3 else [[0, 0], [0, 0]]
    keys = ("", "exp_avg", "exp_avg_sq")
    cut = [
        {
            key: flats({name: values[name][key] for name in group}, stage, world, paddings[number])
            for key in keys
        }
        for number, group in enumerate(SHAPES)
    ]
    bf16 = {name: values[name][""].bfloat16() for name in values} if stage < 3 else {}
    model = {
        "module": {**bf16, "table": torch.arange(3.0)},
        "optimizer": None,
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in SHAPES],
        "frozen_param_shapes": None,
        "shared_params": {"head.weight": "embed.weight"},
        "global_steps": 3,
        "dp_world_size": world,
        **changes,
    }
    for rank in range(world):
        moments = {"exp_avg", "exp_avg_sq"}
        of_rank = {
            group: {**{key: parts[key][rank] for key in moments}, "step": torch.tensor(3.0)}
            for group, parts in enumerate(cut)
        }
        groups = [{**OPTIONS, "params": [0]}, {**OPTIONS, "weight_decay": 0.0, "params": [1]}]
        inner = {"state": of_rank, "param_groups": groups}
        main = [parts[""][rank] for parts in cut]
        if stage < 3:
            outer = {"base_optimizer_state": inner, "single_partition_of_fp32_groups": main}
        else:
            outer = {"optimizer_state_dict": inner, "fp32_flat_groups": main}
        outer |= {"zero_stage": Stage.GRADIENTS, "param_alignment_paddings": paddings}
        optim = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": outer}, optim)
        if stage == 3:
            torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage < 3:
        torch.save(model, folder / "mp_rank_00_model_states.pt")
    return folder


def named(path: Path) -> Path:
    """The same state in one file, with names."""
    values = state()
    groups = [
        {**OPTIONS, "params": list(SHAPES[0])},
        {**OPTIONS, "weight_decay": 0.0, "params": list(SHAPES[1])},
    ]
    moments = {name: {key: t for key, t in v.items() if key} for name, v in values.items()}
    module = {
        **{name: v[""] for name, v in values.items()},
        "table": torch.arange(3.0),
        "head.weight": values["embed.weight"][""],
    }
    tree = {"module": module, "optimizer": {"state": moments, "param_groups": groups}}
    torch.save({**tree, "global_steps": 3}, path)
    return path


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeeds_own_files_are_read_as_deepspeed_reads_them(written: Path, stage: int) -> None:
    folder = written / f"zero{stage}"
    with open_checkpoint(folder) as reader, np.load(folder / "by_deepspeed.npz") as expected:
        assert len(expected.files) >= 15
        for name in expected.files:
            assert np.array_equal(reader.read(name).astype(np.float32), expected[name]), name
        assert {name for name in reader.tensors if not name.endswith(".step")} >= set(expected.files)
        assert np.array_equal(reader.read("module.scale"), [1.5, 2.0])
        assert str(reader.tensors["module.layers.0.bias"].dtype) == "bfloat16"
        assert reader.read("optimizer.state.emb.weight.step") == 3
        assert reader.objects["optimizer.param_groups.1.params"] == ["layers.1.bias"]
        assert reader.objects["optimizer.param_groups.0.weight_decay"] == 0.1
    assert verify(folder).good


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_is_that_of_one_process(tmp_path: Path, stage: int, world: int) -> None:
    folder = saved(tmp_path / "zero", stage, world)
    convert(folder, tmp_path / "dcp", to="dcp")
    report = diff(named(tmp_path / "named.pt"), tmp_path / "dcp")
    assert report.same, report.summary()


@pytest.mark.parametrize("stage", [2, 3])
def test_each_region_is_that_of_the_whole(tmp_path: Path, stage: int) -> None:
    with open_checkpoint(saved(tmp_path / "zero", stage, 3)) as reader:
        whole = reader.read("optimizer.state.embed.weight.exp_avg")
        assert np.array_equal(whole, state()["embed.weight"]["exp_avg"])
        for row in range(11):
            for column in range(6):
                box = Box((row, column), (min(2, 11 - row), 6 - column))
                part = reader.read("optimizer.state.embed.weight.exp_avg", box)
                assert np.array_equal(part, whole[box.slices()])


def test_every_byte_of_the_shards_has_a_checksum_that_is_compared(tmp_path: Path) -> None:
    folder = saved(tmp_path / "zero", 2, 2)
    file = folder / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(file.read_bytes())
    at = data.find(state()["up.weight"]["exp_avg"].reshape(-1)[-4:].numpy().tobytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert at > 0
    damaged = {name for problem in verify(folder).problems for name in [str(problem)]}
    assert any("exp_avg" in text for text in damaged), damaged


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("bf16_zero_pp_rank_0_*", "expected optim files of ranks 0 to 1 .*, found none of rank 0"),
        ("bf16_zero_*", r"expected optim files of ranks 0 to 0 \(\*_optim_states.pt\), found none of rank 0"),
        (
            "mp_rank_00_*",
            r"expected model files of ranks 0 to 0 \(\*_model_states.pt\), found none of rank 0",
        ),
        ("bf16_zero_pp_rank_1_*", r"expected optimizer files of 2 ranks \(dp_world_size\), found 1"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, removed: str, message: str) -> None:
    folder = saved(tmp_path / "zero", 2, 2)
    for file in folder.glob(removed):
        file.unlink()
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_a_model_that_was_trained_without_zero_is_one_file(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    (tmp_path / "plain").mkdir()
    tree = {"module": {"weight": weight}, "optimizer": {"state": {}}, "param_shapes": None}
    torch.save(tree, tmp_path / "plain" / "mp_rank_00_model_states.pt")
    with open_checkpoint(tmp_path / "plain") as reader:
        assert np.array_equal(reader.read("module.weight"), weight.numpy())
    alone = tmp_path / "plain" / "mp_rank_00_model_states.pt"
    assert not convert(alone, tmp_path / "dcp", to="dcp").left_alone


@pytest.mark.parametrize("stage", [1, 2])
def test_the_models_file_alone_names_the_float32_weights_next_to_it(
    written: Path, tmp_path: Path, stage: int
) -> None:
    """Its weights are bfloat16: a conversion that says nothing would lose bits of all weights."""
    folder = written / f"zero{stage}"
    conversion = convert(folder / "mp_rank_00_model_states.pt", tmp_path / "dcp", to="dcp")
    ranks = {child.name for child in folder.iterdir() if "optim" in child.name}
    assert len(ranks) >= 2
    assert set(conversion.left_alone) == ranks
    assert not conversion.complete
    assert all("read the folder" in why for why in conversion.left_alone.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"param_shapes": []}, "expected param_shapes, which names the weights, found none"),
        ({"param_shapes": [{"a": "x"}]}, "expected a shape, found 'x'"),
        (
            {"param_shapes": [{"a": torch.Size((1 << 40,))}]},
            r"tensor 'module.a': expected \d+ elements .* found",
        ),
        (
            {"param_shapes": {"x": {"a": torch.Size((3,))}}},
            r"tensor 'module.a': expected 3 elements .*, found 0",
        ),
        ({"shared_params": {"b": "nothing"}}, "shared_params names 'nothing'"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(saved(tmp_path / "zero", 2, 2, **changes))


def test_tensor_parallel_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "zero", 2, 2)
    file = folder / "mp_rank_00_model_states.pt"
    (folder / "mp_rank_01_model_states.pt").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="expected no tensor parallelism, found its rank 01"):
        open_checkpoint(folder)


def test_a_step_is_chosen_in_the_folder_of_steps(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step5")
    saved(tmp_path / "global_step5", 3, 2)
    saved(tmp_path / "global_step12", 3, 2)
    with open_checkpoint(tmp_path, step="latest") as reader:
        assert Path(str(reader.path)).name == "global_step12"


def test_what_the_shapes_leave_over_is_an_error(tmp_path: Path) -> None:
    shapes = [OrderedDict([("up.weight", torch.Size((6, 6)))]), OrderedDict([("up.bias", torch.Size((5,)))])]
    for stage in (2, 3):
        folder = saved(tmp_path / f"zero{stage}", stage, 2, param_shapes=shapes)
        with pytest.raises(
            CheckpointError, match=r"group \d: expected \d+ elements and padding for param_shapes"
        ):
            open_checkpoint(folder)


def changed(folder: Path, change: Any) -> Path:
    """The checkpoint with its optimizer files changed, each by its rank and its state."""
    for rank, file in enumerate(sorted(folder.glob("*optim_states.pt"))):
        tree = torch.load(file, weights_only=False)
        change(rank, tree["optimizer_state_dict"])
        torch.save(tree, file)
    return folder


@pytest.mark.parametrize("stage", [2, 3])
def test_groups_have_their_own_state(tmp_path: Path, stage: int) -> None:
    """SGD with momentum in one group; a count that is a number, and another scalar."""

    def change(rank: int, state: dict[str, Any]) -> None:
        groups = state["base_optimizer_state" if stage == 2 else "optimizer_state_dict"]["state"]
        groups[0] = {"step": 4}
        groups[1] = {"exp_avg": groups[1]["exp_avg"], "rate": torch.tensor(0.5)}

    with open_checkpoint(changed(saved(tmp_path / "zero", stage, 2), change)) as reader:
        state_names = {name for name in reader.tensors if name.startswith("optimizer")}
        assert state_names == {
            f"optimizer.state.{weight}.{key}" for weight in SHAPES[1] for key in ("exp_avg", "rate")
        }
        expected = state()["up.bias"]["exp_avg"]
        assert np.array_equal(reader.read("optimizer.state.up.bias.exp_avg"), expected)
        assert reader.read("optimizer.state.scale.rate") == 0.5
        steps = {name: value for name, value in reader.objects.items() if name.endswith(".step")}
        assert steps == {f"optimizer.state.{weight}.step": 4 for weight in SHAPES[0]}


def of_one_rank(rank: int, state: dict[str, Any]) -> None:
    if rank == 0:
        state["base_optimizer_state"]["state"] = {}


def elastic(rank: int, state: dict[str, Any]) -> None:
    state["base_optimizer_state"] = [*state["base_optimizer_state"]["state"].values()]


def nothing(rank: int, state: dict[str, Any]) -> None:
    state["base_optimizer_state"] = None


def more(rank: int, state: dict[str, Any]) -> None:
    state["other_partition"] = torch.ones(3)


@pytest.mark.parametrize("change", [of_one_rank, elastic, nothing, more])
def test_state_without_a_place_is_an_error(tmp_path: Path, change: Any) -> None:
    with pytest.raises(CheckpointError, match=r"found|expected \d+ elements"):
        open_checkpoint(changed(saved(tmp_path / "zero", 2, 2), change))


def test_values_of_the_program_are_carried(tmp_path: Path) -> None:
    folder = saved(tmp_path / "zero", 2, 2, epoch=3, rng_state=torch.arange(4), nested={"ema": torch.ones(2)})
    with open_checkpoint(folder) as reader:
        assert reader.objects["epoch"] == 3
        assert np.array_equal(reader.read("rng_state"), np.arange(4))
        assert np.array_equal(reader.read("nested.ema"), np.ones(2))
