"""LoRA and DoRA adapters are merged as their formulas say, in float32, whatever region is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from bridge import convert, diff
from bridge.checkpoints.convert.plan import ConvertOptions, conversion_key, planned
from bridge.checkpoints.jobs.array_jobs import convert_part
from bridge.core.formats import Box, CheckpointError, Format, create_checkpoint, open_checkpoint
from bridge.core.formats.whole.adapters import MergedReader

ROWS, COLUMNS, RANK = 600, 40, 4  # three blocks of rows, the last of them short
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6}


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def adapter_at(path: Path, tensors: Mapping[str, np.ndarray], **config: object) -> Path:
    path.mkdir()
    save_file(
        {f"base_model.model.{name}": t for name, t in tensors.items()}, path / "adapter_model.safetensors"
    )
    (path / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return path


def base_at(path: Path, **tensors: np.ndarray) -> Path:
    path.mkdir()
    save_file({name.replace("__", "."): t for name, t in tensors.items()}, path / "model.safetensors")
    return path


def merged(base: Path, adapter: Path, name: str = "q.weight", box: Box | None = None) -> np.ndarray:
    with MergedReader(open_checkpoint(base), open_checkpoint(adapter)) as reader:
        return reader.read(name, box)


def lora(
    module: str = "q", rank: int = RANK, rows: int = ROWS, columns: int = COLUMNS
) -> dict[str, np.ndarray]:
    return {
        f"{module}.lora_A.weight": numbers(rank, columns, seed=1),
        f"{module}.lora_B.weight": numbers(rows, rank, seed=2),
    }


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 1.5),
        ({"use_rslora": True}, 3.0),
        ({"alpha_pattern": {"q": 2}}, 0.5),
        ({"alpha_pattern": {"other.q": 2, "k": 2}}, 1.5),
        ({"alpha_pattern": {"q": 2}, "use_rslora": True}, 1.0),
        ({"alpha_pattern": {"x.q": 2, ".": 4}}, 1.0),
    ],
)
def test_a_weight_is_the_base_and_the_scaled_product(
    tmp_path: Path, config: dict[str, object], scale: float
) -> None:
    weight, tensors = numbers(ROWS, COLUMNS), lora()
    base, adapter = (
        base_at(tmp_path / "base", q__weight=weight),
        adapter_at(tmp_path / "a", tensors, **config),
    )
    a, b = tensors["q.lora_A.weight"], tensors["q.lora_B.weight"]
    assert np.array_equal(merged(base, adapter), weight + (b @ a) * np.float32(scale))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_a_sum_is_rounded_once_to_the_weights_dtype(tmp_path: Path, dtype: Any) -> None:
    weight, tensors = numbers(ROWS, COLUMNS, dtype=dtype), lora()
    base, adapter = base_at(tmp_path / "base", q__weight=weight), adapter_at(tmp_path / "a", tensors)
    a, b = (tensors[f"q.lora_{letter}.weight"] for letter in "AB")
    wide = np.float64 if dtype is np.float64 else np.float32
    expected = (weight.astype(wide) + (b.astype(wide) @ a.astype(wide)) * wide(1.5)).astype(dtype)
    result = merged(base, adapter)
    assert result.dtype == np.dtype(dtype)
    assert np.array_equal(result.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("box", [Box((0, 0), (1, 1)), Box((255, 3), (3, 30)), Box((290, 0), (10, 1000))])
def test_a_region_has_the_bits_of_the_whole(tmp_path: Path, box: Box, dora: bool) -> None:
    # Some BLAS adds in another order for the last ten rows of these sizes than for all rows.
    rows, columns, rank = 300, 1000, 64
    tensors = lora(rank=rank, rows=rows, columns=columns)
    if dora:
        tensors["q.lora_magnitude_vector"] = numbers(rows, seed=3)
    base = base_at(tmp_path / "base", q__weight=numbers(rows, columns))
    adapter = adapter_at(tmp_path / "a", tensors, use_dora=dora)
    assert np.array_equal(merged(base, adapter, box=box), merged(base, adapter)[box.slices()])


def test_a_pattern_names_whole_words_at_the_end_of_a_module(tmp_path: Path) -> None:
    base = base_at(tmp_path / "base", k_q__weight=numbers(ROWS, COLUMNS), k__q__weight=numbers(ROWS, COLUMNS))
    tensors = {**lora("k_q"), **lora("k.q")}
    adapter = adapter_at(tmp_path / "a", tensors, alpha_pattern={"q": 2})
    product = lora()["q.lora_B.weight"] @ lora()["q.lora_A.weight"]
    assert np.array_equal(
        merged(base, adapter, "k_q.weight"), numbers(ROWS, COLUMNS) + product * np.float32(1.5)
    )
    assert np.array_equal(
        merged(base, adapter, "k.q.weight"), numbers(ROWS, COLUMNS) + product * np.float32(0.5)
    )


def test_dora_gives_each_row_its_magnitude(tmp_path: Path) -> None:
    weight, tensors, magnitude = numbers(ROWS, COLUMNS), lora(), numbers(ROWS, seed=3)
    tensors["q.lora_magnitude_vector"] = magnitude
    base, adapter = (
        base_at(tmp_path / "base", q__weight=weight),
        adapter_at(tmp_path / "a", tensors, use_dora=True),
    )
    a, b = (tensors[f"q.lora_{letter}.weight"].astype(np.float64) for letter in "AB")
    changed = weight + 1.5 * b @ a
    expected = magnitude[:, None] * changed / np.linalg.norm(changed, axis=1, keepdims=True)
    # Some roundings of float32: of the product, the norm and the factor.
    np.testing.assert_allclose(merged(base, adapter), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["embedding", "transposed", "convolution"])
def test_weights_that_are_stored_otherwise(tmp_path: Path, kind: str) -> None:
    if kind == "convolution":
        weight, tensors, config = numbers(ROWS, 5, 2, 4), lora(), {}
        tensors["q.lora_A.weight"] = tensors["q.lora_A.weight"].reshape(RANK, 5, 2, 4)
        tensors["q.lora_B.weight"] = tensors["q.lora_B.weight"].reshape(ROWS, RANK, 1, 1)
        product = (lora()["q.lora_B.weight"] @ lora()["q.lora_A.weight"]).reshape(weight.shape)
    else:
        weight, tensors = numbers(ROWS, COLUMNS), lora(rows=COLUMNS, columns=ROWS)
        product = (tensors["q.lora_B.weight"] @ tensors["q.lora_A.weight"]).T
        config = {"fan_in_fan_out": True} if kind == "transposed" else {}
        if kind == "embedding":
            tensors = {f"q.lora_embedding_{letter}": tensors[f"q.lora_{letter}.weight"] for letter in "AB"}
    base, adapter = (
        base_at(tmp_path / "base", q__weight=weight),
        adapter_at(tmp_path / "a", tensors, **config),
    )
    assert np.array_equal(merged(base, adapter), weight + product * np.float32(1.5))


def test_tensors_of_the_adapters_own_replace_the_bases(tmp_path: Path) -> None:
    weight, tensors = numbers(ROWS, COLUMNS, dtype=np.float16), lora()
    own = {
        "q.bias": numbers(3, seed=4),
        "head.modules_to_save.weight": numbers(2, 2, seed=5),
        "q.base_layer.weight": numbers(ROWS, COLUMNS, seed=6),
    }
    base = base_at(
        tmp_path / "base",
        q__weight=weight,
        q__bias=np.zeros(3, np.float16),
        head__weight=np.zeros((2, 2), np.float32),
        other=np.arange(4.0),
    )
    adapter = adapter_at(tmp_path / "a", {**tensors, **own})
    assert np.array_equal(merged(base, adapter, "q.bias"), own["q.bias"].astype(np.float16))
    assert np.array_equal(merged(base, adapter, "head.weight"), own["head.modules_to_save.weight"])
    assert np.array_equal(merged(base, adapter, "other"), np.arange(4.0))
    product = (tensors["q.lora_B.weight"] @ tensors["q.lora_A.weight"]) * np.float32(1.5)
    assert np.array_equal(merged(base, adapter), (own["q.base_layer.weight"] + product).astype(np.float16))


@pytest.mark.parametrize(
    ("in_base", "in_adapter"), [("h.0.q", "transformer.h.0.q"), ("model.h.0.q", "h.0.q")]
)
def test_one_of_both_may_have_a_prefix(tmp_path: Path, in_base: str, in_adapter: str) -> None:
    weight = numbers(ROWS, COLUMNS)
    base = base_at(tmp_path / "base", **{f"{in_base}.weight": weight})
    adapter = adapter_at(tmp_path / "a", lora(in_adapter))
    product = (lora()["q.lora_B.weight"] @ lora()["q.lora_A.weight"]) * np.float32(1.5)
    assert np.array_equal(merged(base, adapter, f"{in_base}.weight"), weight + product)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"peft_type": "IA3"}, lora(), "expected peft_type LORA, found 'IA3'"),
        ({"use_qalora": True}, lora(), "expected plain LoRA or DoRA, found use_qalora"),
        ({"init_lora_weights": "PiSSA_niter_4"}, lora(), "also changes the weights of the base model"),
        ({"lora_alpha": None}, lora(), "expected numbers in lora_alpha and alpha_pattern"),
        ({"lora_alpha": math.nan}, lora(), "expected numbers in lora_alpha and alpha_pattern"),
        (
            {"alpha_pattern": {"(a+)+": 3}},
            lora(),
            r"expected names of modules in alpha_pattern, found \(a\+\)\+",
        ),
        (
            {},
            lora("k"),
            "found 1 tensor of the adapter that the model lacks: k.weight; did you mean q.weight",
        ),
        ({}, lora(rank=RANK, rows=7), r"expected A \[r, 40\] and B \[600, r\] for 'q.weight' \(600, 40\)"),
        ({}, {"q.lora_A.weight": lora()["q.lora_A.weight"]}, "expected lora_A and lora_B"),
        ({}, {**lora(), "q.lora_A.weight": np.float32(1)}, r"found \(\) in base_model.model.q.lora_A.weight"),
        (
            {"use_dora": True},
            {**lora(), "q.lora_magnitude_vector": numbers(3)},
            r"found .*\(3,\) in base_model",
        ),
        ({}, {**lora(), "q.lora_magnitude_vector": numbers(ROWS)}, "expected magnitudes if use_dora is true"),
        ({"use_dora": True}, lora(), "expected magnitudes if use_dora is true"),
        ({"use_rslora": "false"}, lora(), "expected true or false in use_rslora, found 'false'"),
        ({"lora_alpha": 10**400}, lora(), "expected numbers in lora_alpha"),
        (
            {},
            {**lora(), "q.lora_A.default.weight": numbers(RANK, COLUMNS)},
            "expected one tensor .* for each part",
        ),
        (
            {},
            {**lora(), "q.lora_A.weight": np.ones((RANK, COLUMNS), np.int32)},
            "found base_model.model.q.lora_A.weight of int32",
        ),
        ({}, {}, "expected lora_A and lora_B of some module, found none"),
        (
            {"fan_in_fan_out": True, "use_dora": True},
            {**lora(rows=COLUMNS, columns=ROWS), "q.lora_magnitude_vector": numbers(COLUMNS)},
            "expected no DoRA of a transposed matrix",
        ),
        (
            {},
            {**lora(), "q.weight": numbers(3, 3)},
            r"'base_model.model.q.weight': expected shape \(600, 40\)",
        ),
        ({}, {**lora(), "q.lora_C.weight": numbers(3)}, "lacks: q.lora_C.weight"),
    ],
)
def test_what_does_not_merge_is_refused_by_name(
    tmp_path: Path, config: dict[str, object], tensors: dict[str, np.ndarray], message: str
) -> None:
    base = base_at(tmp_path / "base", q__weight=numbers(ROWS, COLUMNS))
    adapter = adapter_at(tmp_path / "a", {name: np.asarray(t) for name, t in tensors.items()}, **config)
    with pytest.raises(CheckpointError, match=message):
        convert(base, tmp_path / "out", merge_adapter=adapter)
    assert not (tmp_path / "out").exists()


def test_sizes_tell_the_order_of_axes_where_the_flag_does_not(tmp_path: Path) -> None:
    tensors = {**lora("q"), **lora("k", rows=COLUMNS, columns=ROWS)}
    base = base_at(tmp_path / "base", q__weight=numbers(ROWS, COLUMNS), k__weight=numbers(ROWS, COLUMNS))
    adapter = adapter_at(tmp_path / "a", tensors, fan_in_fan_out=True)
    products = {m: tensors[f"{m}.lora_B.weight"] @ tensors[f"{m}.lora_A.weight"] for m in "qk"}
    for module, product in (("q", products["q"]), ("k", products["k"].T)):
        expected = numbers(ROWS, COLUMNS) + product * np.float32(1.5)
        assert np.array_equal(merged(base, adapter, f"{module}.weight"), expected)


def test_square_weights_are_refused_where_the_flag_is_wrong_for_others(tmp_path: Path) -> None:
    base = base_at(tmp_path / "base", q__weight=numbers(ROWS, COLUMNS), k__weight=numbers(8, 8))
    tensors = {**lora("q"), **lora("k", rows=8, columns=8)}
    with pytest.raises(CheckpointError, match=r"so the order of axes in k.weight is not known"):
        merged(base, adapter_at(tmp_path / "a", tensors, fan_in_fan_out=True))
    assert merged(base, adapter_at(tmp_path / "b", tensors), "k.weight").shape == (8, 8)


def test_a_tied_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    table = numbers(ROWS, COLUMNS)
    base = base_at(tmp_path / "base", embed_tokens__weight=table, lm_head__weight=table)
    other = base_at(tmp_path / "other", embed_tokens__weight=table, lm_head__weight=table + 1)
    adapter = adapter_at(tmp_path / "a", lora("lm_head"))
    with pytest.raises(
        CheckpointError, match=r"found 'lm_head.weight' and 'embed_tokens.weight' with the same"
    ):
        merged(base, adapter, "lm_head.weight")
    assert not np.array_equal(merged(other, adapter, "lm_head.weight"), table + 1)


def test_a_changed_configuration_is_another_adapter(tmp_path: Path) -> None:
    base = base_at(tmp_path / "base", q__weight=numbers(ROWS, COLUMNS))
    adapter, keys = adapter_at(tmp_path / "a", lora()), []
    for alpha in (4, 100):
        (adapter / "adapter_config.json").write_text(json.dumps({**CONFIG, "lora_alpha": alpha}))
        with planned(base, ConvertOptions(merge_adapter=adapter)) as (conversion, _):
            keys.append(conversion_key(conversion))
    assert keys[0] != keys[1]


@pytest.mark.parametrize("root", ["model.", "model/"])
def test_the_base_may_lie_below_a_key_in_any_format(tmp_path: Path, root: str) -> None:
    base_at(tmp_path / "flat", **{"model.q.weight": numbers(ROWS, COLUMNS)})
    with create_checkpoint(tmp_path / "base", "orbax" if root == "model/" else "dcp") as target:
        info = target.add_tensor(("model", "q.weight"), (ROWS, COLUMNS), np.dtype(np.float32))
        for box in target.chunks(info.name):
            target.write(info.name, box, numbers(ROWS, COLUMNS)[box.slices()])
    adapter = adapter_at(tmp_path / "a", lora())
    product = lora()["q.lora_B.weight"] @ lora()["q.lora_A.weight"]
    expected = numbers(ROWS, COLUMNS) + product * np.float32(1.5)
    assert np.array_equal(merged(tmp_path / "base", adapter, f"{root}q.weight"), expected)


def test_quantized_weights_and_folders_without_an_adapter_are_refused(tmp_path: Path) -> None:
    base = base_at(tmp_path / "base", q__weight=np.ones((ROWS, COLUMNS), np.int8))
    with pytest.raises(CheckpointError, match=r"found int8 \(600, 40\) in 'q.weight' .*--dequantize"):
        merged(base, adapter_at(tmp_path / "a", lora()))
    with pytest.raises(CheckpointError, match=r"expected a folder that peft saved, with adapter_config.json"):
        merged(base, base)


def test_convert_merges_and_diff_compares_with_the_merged_weights(tmp_path: Path) -> None:
    weight = numbers(ROWS, COLUMNS, dtype=ml_dtypes.bfloat16)
    base, adapter = base_at(tmp_path / "base", q__weight=weight), adapter_at(tmp_path / "a", lora())
    report = convert(base, tmp_path / "out", to="safetensors", merge_adapter=adapter)
    assert any(
        "is merged into 1 weight: calculated in float32 or the weight's own float64, rounded once" in remark
        for remark in report.remarks
    )
    with open_checkpoint(tmp_path / "out") as reader:
        assert np.array_equal(reader.read("q.weight"), merged(base, adapter))
    assert diff(base, tmp_path / "out", merge_adapter=adapter).same
    assert not diff(base, tmp_path / "out").same


@pytest.mark.parametrize("changed", ["base", "out", "noise", "a"])
def test_a_file_that_changes_while_it_is_compared_is_an_error(tmp_path: Path, changed: str) -> None:
    """Another writer may replace any of the four checkpoints meanwhile: the report would mix two states."""
    base, adapter = (
        base_at(tmp_path / "base", q__weight=numbers(ROWS, COLUMNS)),
        adapter_at(tmp_path / "a", lora()),
    )
    for copy in ("out", "noise"):
        convert(base, tmp_path / copy, to="safetensors", merge_adapter=adapter)

    def change(*_: object) -> None:
        file = next((tmp_path / changed).glob("*.safetensors"))
        file.write_bytes(file.read_bytes())

    whole = {"merge_adapter": adapter, "noise": tmp_path / "noise"}
    assert diff(base, tmp_path / "out", **whole).same
    with pytest.raises(CheckpointError, match=rf"{changed}/.*\.safetensors"):
        diff(base, tmp_path / "out", progress=change, **whole)


def test_another_adapter_is_another_conversion(tmp_path: Path) -> None:
    base = base_at(tmp_path / "base", q__weight=numbers(ROWS, COLUMNS))
    keys = []
    for name in ("a", "b"):
        options = ConvertOptions(merge_adapter=adapter_at(tmp_path / name, lora()))
        with planned(base, options) as (conversion, _):
            keys.append(conversion_key(conversion))
    assert {name for name in keys[0] if keys[0][name] != keys[1][name]} == {"adapter"}


@pytest.mark.parametrize("to", ["dcp", "orbax", "safetensors"])
def test_parts_have_the_bits_of_the_whole(tmp_path: Path, to: Format) -> None:
    base = base_at(tmp_path / "base", q__weight=numbers(ROWS, COLUMNS))
    options = ConvertOptions(to, merge_adapter=adapter_at(tmp_path / "a", lora(rank=64)))
    for part in (1, 2):
        convert_part(base, tmp_path / "out", options, part, 2)
    assert diff(base, tmp_path / "out", merge_adapter=tmp_path / "a").same


def test_an_adapter_beside_its_base_counts_as_read_if_it_is_merged(tmp_path: Path) -> None:
    base = base_at(tmp_path / "base", q__weight=numbers(ROWS, COLUMNS))
    for file in adapter_at(tmp_path / "a", lora()).iterdir():
        file.rename(base / file.name)
    left = convert(base, tmp_path / "without").left_alone
    assert left == {"adapter_model.safetensors": "an adapter (merge it: --merge-adapter)"}
    report = convert(base, tmp_path / "with", merge_adapter=base / "adapter_model.safetensors")
    assert report.complete


def test_the_adapter_is_not_written_over(tmp_path: Path) -> None:
    base = base_at(tmp_path / "base", q__weight=numbers(ROWS, COLUMNS))
    adapter = adapter_at(tmp_path / "a", lora())
    with pytest.raises(CheckpointError, match=r"is or contains .*, a file of the adapter"):
        convert(base, adapter, to="safetensors", replace=True, merge_adapter=adapter)
    assert (adapter / "adapter_model.safetensors").exists()


def test_a_mapping_says_how_an_adapter_is_converted(tmp_path: Path) -> None:
    adapter = adapter_at(tmp_path / "a", lora("model.layers.0.self_attn.q_proj"))
    with pytest.raises(CheckpointError, match=r"belongs to a LoRA adapter.*--merge-adapter"):
        convert(adapter, tmp_path / "out", mapping="llama", into="flax")
