"""Quantized files of the Hub: decoded as transformers decodes them, or named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from typer.testing import CliRunner

from bridge.checkpoints.convert.conversion import convert
from bridge.commands.main import app
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import Box, CheckpointError
from bridge.core.formats.whole.quantized import DequantizedReader
from bridge.core.mapping import MappingError
from tests.mapping.test_families_gpt_oss import gpt_oss, jax_weights
from tests.support.bridge.family_checkpoints import flat, orbax_tree, same_bits
from tests.support.bridge.family_models import hf_model
from tests.support.bridge.memory_reader import MemoryReader

BF16 = ml_dtypes.bfloat16
Arrays = Mapping[str, np.ndarray]


def mxfp4(shape: tuple[int, int, int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks and scales for weights ``[experts, in, out]``."""
    experts, size, out = shape
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (experts, out, size // 32, 16)).astype(np.uint8)
    return blocks, random.integers(110, 140, (experts, out, size // 32)).astype(np.uint8)


def as_transformers_does(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    dequantized = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    return dequantized.contiguous().view(torch.uint16).numpy().view(BF16)


@pytest.mark.parametrize(
    "box",
    [None, Box((0, 0, 0), (3, 96, 10)), Box((1, 33, 2), (2, 30, 7)), Box((2, 5, 9), (1, 60, 1))],
)
def test_mxfp4_is_decoded_as_transformers_does_it(box: Box | None) -> None:
    blocks, scales = mxfp4((3, 96, 10))
    reader = DequantizedReader(MemoryReader("safetensors", {"w_blocks": blocks, "w_scales": scales}))
    assert {name: (info.shape, info.dtype) for name, info in reader.tensors.items()} == {
        "w": ((3, 96, 10), np.dtype(BF16))
    }
    expected = as_transformers_does(blocks, scales)
    whole = Box.whole((3, 96, 10))
    same_bits({"w": reader.read("w", box)}, {"w": expected[(box or whole).slices()]})


def float8(
    shape: tuple[int, int], block: tuple[int, int] = (128, 128), seed: int = 0
) -> tuple[np.ndarray, ...]:
    """Random float8 weights, a scale for each block, and what they stand for, block by block."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    scales = random.uniform(0.001, 2, grid).astype(np.float32)
    plain = np.empty(shape, BF16)
    for row in range(grid[0]):
        for column in range(grid[1]):
            at = np.s_[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            plain[at] = (weight[at].astype(np.float32) * scales[row, column]).astype(BF16)
    return weight, scales, plain


@pytest.mark.parametrize(
    ("shape", "block"),
    [((256, 128), (128, 128)), ((200, 300), (128, 128)), ((24, 96), (8, 32)), ((20, 30), (128, 128))],
)
@pytest.mark.parametrize("part", [False, True])
def test_float8_in_blocks_is_decoded_block_by_block(
    shape: tuple[int, int], block: tuple[int, int], part: bool
) -> None:
    weight, scales, plain = float8(shape, block)
    reader = DequantizedReader(
        MemoryReader("safetensors", {"a.weight": weight, "a.weight_scale_inv": scales})
    )
    box = Box((shape[0] // 2 - 3, 5), (shape[0] // 2, shape[1] - 7)) if part else Box.whole(shape)
    same_bits({"w": reader.read("a.weight", box)}, {"w": np.ascontiguousarray(plain[box.slices()])})
    assert [*reader.tensors] == ["a.weight"]


def test_blocks_have_the_size_that_the_configuration_says(tmp_path: Path) -> None:
    # Two blocks of 64 and 36 rows, not of 50 and 50, and of 96, not of 128 and 64.
    for number, (shape, block) in enumerate([((100, 128), (64, 128)), ((192, 40), (96, 20))]):
        weight, scales, plain = float8(shape, block)
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({"a.weight": weight, "a.weight_scale_inv": scales}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": block}}))
        with open_checkpoint(folder) as reader:
            same_bits({"w": DequantizedReader(reader).read("a.weight")}, {"w": plain})
    for sizes, message in (
        ([32, 20], r"for each block of 32 x 20 \(weight_block_size in config.json\), found .*\(2, 2\)"),
        ("x", r"weight_block_size: expected sizes of at least 1 such as \[128, 128\], found 'x'"),
    ):
        (folder / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": sizes}}))
        with open_checkpoint(folder) as reader, pytest.raises(CheckpointError, match=message):
            DequantizedReader(reader)


@pytest.mark.parametrize(
    ("shape", "block"), [((200, 128), (128, 128)), ((60, 24), (6, 8)), ((5, 128), (1, 128))]
)
def test_without_a_configuration_a_block_is_of_128_or_the_only_size_that_fits(
    shape: tuple[int, int], block: tuple[int, int]
) -> None:
    weight, scales, plain = float8(shape, block)
    reader = MemoryReader("safetensors", {"a.weight": weight, "a.weight_scale_inv": scales})
    same_bits({"w": DequantizedReader(reader).read("a.weight")}, {"w": plain})


def test_blocks_of_several_possible_sizes_are_refused_without_a_configuration() -> None:
    weight, scales, _ = float8((100, 128), (64, 128))
    reader = MemoryReader("safetensors", {"a.weight": weight, "a.weight_scale_inv": scales})
    with pytest.raises(
        CheckpointError, match=r"one size that follows from the shapes \(weight_block_size in config.json"
    ):
        DequantizedReader(reader)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"w": np.zeros((2, 2), np.float32)}, "expected quantized weights to decode"),
        (
            {"w_blocks": np.zeros((1, 2, 3, 16), np.uint8), "w_scales": np.zeros((1, 2, 4), np.uint8)},
            r"expected MXFP4 weights.*uint8 \(1, 2, 4\) in w_scales",
        ),
        (
            {
                "a.weight": np.zeros((300, 4), ml_dtypes.float8_e4m3fn),
                "a.weight_scale_inv": np.zeros((7, 1), np.float32),
            },
            r"expected float8 weights with a scale for each block.*\(7, 1\) in a.weight_scale_inv",
        ),
        (
            {
                "a.weight": np.zeros((4, 4), np.float32),
                "a.weight_scale_inv": np.zeros((1, 1), np.float32),
            },
            r"expected float8 weights.*found float32",
        ),
    ],
)
def test_what_cannot_be_decoded_is_named(arrays: Arrays, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        DequantizedReader(MemoryReader("safetensors", dict(arrays)))


@pytest.fixture
def openai(tmp_path: Path) -> dict[str, np.ndarray]:
    """A folder `hub` as OpenAI's: experts in MXFP4, all else in bfloat16. Returns the plain weights."""
    model = gpt_oss().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hub")
    plain = load_file(tmp_path / "hub" / "model.safetensors")
    stored = dict(plain)
    for seed, name in enumerate([n for n in plain if n.endswith(("gate_up_proj", "down_proj"))]):
        shape = plain[name].shape
        blocks, scales = mxfp4((shape[0], shape[1], shape[2]), seed)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = as_transformers_does(blocks, scales)
    save_file(stored, tmp_path / "hub" / "model.safetensors", {"format": "pt"})
    return plain


def test_a_model_in_mxfp4_is_named_and_decoded_if_asked(tmp_path: Path, openai: Arrays) -> None:
    with pytest.raises(
        MappingError, match=r"_blocks of .* belongs to quantized weights \(MXFP4\).*--dequantize"
    ):
        convert(tmp_path / "hub", tmp_path / "orbax", mapping="gpt_oss")
    arguments = ["convert", str(tmp_path / "hub"), str(tmp_path / "orbax"), "--mapping", "gpt_oss"]
    result = CliRunner().invoke(app, [*arguments, "--dequantize"])
    assert result.exit_code == 0, result.output
    same_bits(dict(flat(orbax_tree(tmp_path / "orbax")["params"])), jax_weights(dict(openai)))
    # Without a mapping names stay, and without --dequantize bytes too.
    convert(tmp_path / "hub", tmp_path / "plain", to="safetensors", dequantize=True)
    same_bits(load_file(tmp_path / "plain" / "model.safetensors"), openai)
    convert(tmp_path / "hub", tmp_path / "same", to="safetensors")
    same_bits(
        load_file(tmp_path / "same" / "model.safetensors"), load_file(tmp_path / "hub" / "model.safetensors")
    )


def test_deepseeks_float8_is_named_and_decoded_if_asked(tmp_path: Path) -> None:
    hf_model("deepseek_v3", tie_word_embeddings=False).to(torch.bfloat16).save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    plain, stored = load_file(file), {}
    for seed, (name, array) in enumerate(plain.items()):
        stored[name] = array
        # As DeepSeek: projections, but not embeddings, norms, routers and the head.
        if array.ndim == 2 and "_proj" in name:
            weight, scales, plain[name] = float8((array.shape[0], array.shape[1]), seed=seed)
            stored |= {name: weight, f"{name}_scale_inv": scales}
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(
        MappingError, match=r"weight_scale_inv of .*float8 with scales of blocks.*--dequantize"
    ):
        convert(tmp_path / "hub", tmp_path / "orbax", mapping="deepseek_v3")
    convert(tmp_path / "hub", tmp_path / "orbax", mapping="deepseek_v3", dequantize=True)
    convert(tmp_path / "orbax", tmp_path / "back", to="safetensors", mapping="deepseek_v3", into="hf")
    same_bits(load_file(tmp_path / "back" / "model.safetensors"), plain)


@pytest.mark.parametrize(
    ("end", "remedy"), [("_scale_inv", "convert --dequantize"), ("_scale", "with the program that made them")]
)
def test_a_cast_of_weights_without_their_scales_is_refused(tmp_path: Path, end: str, remedy: str) -> None:
    weight, scales, _ = float8((128, 128))
    other = np.ones(3, np.float32)
    save_file({"a.weight": weight, f"a.weight{end}": scales, "b": other}, tmp_path / "a.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"cast of a.weight, which has scales in a.weight{end}: .*{remedy}"
    ):
        convert(tmp_path / "a.safetensors", tmp_path / "o", casts=["*=bfloat16"])
    convert(tmp_path / "a.safetensors", tmp_path / "b", casts=["b=bfloat16"])
    if end == "_scale_inv":
        convert(tmp_path / "a.safetensors", tmp_path / "c", casts=["*=float32"], dequantize=True)


def test_weights_that_other_programs_quantized_are_named(tmp_path: Path) -> None:
    hf_model("qwen2").save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "model.safetensors"
    stored = load_file(file)
    array = stored.pop("model.layers.1.mlp.up_proj.weight")
    save_file(stored | {"model.layers.1.mlp.up_proj.qweight": array.astype(np.int32)}, file)
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["model_type"] == "qwen2"
    with pytest.raises(MappingError, match=r"qweight of .* \(GPTQ or AWQ\).*decode them first"):
        convert(tmp_path / "hub", tmp_path / "orbax", mapping="qwen2")
    with open_checkpoint(tmp_path / "hub") as reader, pytest.raises(CheckpointError, match="none: leave out"):
        DequantizedReader(reader)
