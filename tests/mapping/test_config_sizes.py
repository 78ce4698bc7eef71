"""Sizes of axes from a config.json beside the source."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import create_checkpoint, open_checkpoint
from bridge.core.formats.tensors.base import CheckpointError
from bridge.core.mapping.language.errors import MappingError
from bridge.core.mapping.language.rules import parse_mapping
from bridge.core.mapping.language.table import MappingTable, Told
from bridge.core.mapping.one_rule.sizes import with_config, with_config_fields
from bridge.core.mapping.plan.translation import make_plan
from tests.support.bridge.memory_reader import MemoryReader

TABLE = """
[config]
d = ["head", "width / heads"]
[[rule]]
torch = "a.w : (h d) m"
jax = "x/w : m h d"
"""


def source(folder: Path, config: object) -> Path:
    folder.mkdir()
    with create_checkpoint(folder / "model.safetensors", "safetensors") as writer:
        writer.write(writer.add_tensor(("a.w",), (12, 5), np.dtype(np.float32)).name, *one_chunk(writer))
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text)
    return folder


def one_chunk(writer):
    (box,) = writer.chunks("a.w")
    return box, np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)


def table(extra: str = "") -> MappingTable:
    return parse_mapping(extra + TABLE, "test")


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"head": 6}, (5, 2, 6)),
        ({"head": None, "width": 12, "heads": 4}, (5, 4, 3)),
        ({"head": 4, "width": 12, "heads": 4}, (5, 3, 4)),
    ],
)
def test_the_first_fields_that_are_there_give_the_size(tmp_path: Path, config: object, shape: tuple) -> None:
    for path in (source(tmp_path / "a", config), tmp_path / "a" / "model.safetensors"):
        convert(path, tmp_path / "out" / path.stem, mapping=table())
        with open_checkpoint(tmp_path / "out" / path.stem) as reader:
            assert reader.tensors["params/x/w"].shape == shape


@pytest.mark.parametrize(
    ("texts", "config", "heads"),
    [
        (["inner.heads"], {"inner": {"heads": 2}, "heads": 3}, 2),
        (["inner.heads", "heads"], {"inner": 4, "heads": 3}, 3),
        (["inner.width / inner.size"], {"inner": {"width": 12, "size": 3}}, 4),
        (["heads", "6"], {}, 6),
        (
            ["heads / groups if grouped", "1 if not shared", "heads"],
            {"heads": 6, "groups": 3, "grouped": True},
            2,
        ),
        (
            ["heads / groups if grouped", "1 if not shared", "heads"],
            {"heads": 6, "groups": 3, "grouped": False},
            6,
        ),
        (["heads / groups if grouped", "1 if not shared", "heads"], {"heads": 6, "shared": False}, 1),
        (["heads / groups if grouped", "1 if not shared", "heads"], {"heads": 6, "shared": None}, 6),
        (["heads if inner.grouped", "4"], {"heads": 6, "inner": {"grouped": 1}}, 4),
    ],
)
def test_fields_inside_of_tables_conditions_and_numbers(texts: list[str], config: dict, heads: int) -> None:
    """A condition wants true or false themselves; "if not" a field that is there."""
    mapping = parse_mapping(
        TABLE.replace('d = ["head", "width / heads"]', f"h = {json.dumps(texts)}"), "test"
    )
    assert with_config_fields(mapping, config, "config.json").axes == {"h": heads}


@pytest.mark.parametrize(
    "text", ["heads if", "if grouped", "a / b / c", "a if b if c", "2 / a", "a.b if not"]
)
def test_a_text_of_another_kind_is_refused(text: str) -> None:
    mapping = parse_mapping(TABLE.replace('"head", ', f'"{text}", '), "test")
    with pytest.raises(MappingError, match=r"expected a field of config\.json, a quotient"):
        with_config_fields(mapping, {"heads": 1}, "config.json")


def test_the_table_goes_first_and_the_caller_must_agree_or_insist(tmp_path: Path) -> None:
    """One of two numbers is wrong: a caller who knows that the file is says so."""
    path = source(tmp_path / "a", {"head": 6, "model": 5})
    both = parse_mapping(TABLE.replace("[config]", '[config]\nm = ["model"]'), "test")
    with pytest.raises(
        MappingError, match=r"config\.json says that d is 6 \(head\): .* got d=4.*--any-model"
    ):
        convert(path, tmp_path / "b", mapping=both, axes={"d": 4})
    convert(path, tmp_path / "same", mapping=both, axes={"d": 6})
    convert(path, tmp_path / "b", mapping=both, axes={"d": 4}, any_model=True)
    convert(path, tmp_path / "c", mapping=table("[axes]\nd = 2\n"))
    for name, shape in (("b", (5, 3, 4)), ("c", (5, 6, 2))):
        with open_checkpoint(tmp_path / name) as reader:
            assert reader.tensors["params/x/w"].shape == shape


def test_without_fields_or_file_the_size_is_asked_for(tmp_path: Path) -> None:
    for number, config in enumerate(({}, [], {"width": 12})):
        path = source(tmp_path / f"a{number}", config)
        with pytest.raises(MappingError, match=r"--axis d=SIZE"):
            convert(path, tmp_path / "b", mapping=table())
    (path / "config.json").unlink()
    with pytest.raises(MappingError, match=r"--axis d=SIZE"):
        convert(path, tmp_path / "b", mapping=table())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", r"config\.json: expected JSON"),
        ("[" * 100_000, r"config\.json: expected JSON"),
        ('{"head": 6}' + " " * (1 << 20), r"expected at most 1048576 bytes, got 1048587"),
        ({"head": "6"}, r"config\.json: expected positive integers for 'head', got \['6'\]"),
        ({"head": True}, r"expected positive integers"),
        ({"head": -6}, r"expected positive integers"),
        ({"width": 12, "heads": 0}, r"expected positive integers for 'width / heads', got \[12, 0\]"),
        ({"width": 12, "heads": 5}, r"expected 'width / heads' to be an integer, got 12 / 5"),
        ({"head": 5}, r"12"),
    ],
)
def test_numbers_that_are_no_sizes_are_refused(tmp_path: Path, config: object, message: str) -> None:
    path = source(tmp_path / "a", config)
    with pytest.raises((CheckpointError, MappingError), match=message):
        convert(path, tmp_path / "b", mapping=table())
    assert not (tmp_path / "b").exists()


def test_the_config_of_a_mapping_without_sizes_is_read_for_its_models(tmp_path: Path) -> None:
    mapping = parse_mapping('[models.mine]\n[[rule]]\ntorch = "a.w"\njax = "x/w"\n', "test")
    with open_checkpoint(source(tmp_path / "a", {"num_hidden_layers": 3})) as reader:
        assert with_config(mapping, reader).told == Told(str(tmp_path / "a" / "config.json"), {}, 3)


def test_a_stored_size_is_0_or_more() -> None:
    mapping = parse_mapping(
        '[axes]\nn = "train/n"\n[[rule]]\ntorch = "w : (a + n)"\njax = ["x : a", "y : n"]\n', "test"
    )
    arrays = {"model.w": np.arange(3.0), "train.n": np.asarray(0)}
    plan = make_plan(MemoryReader("dcp", arrays), "orbax", mapping)
    assert plan.tensors["params/y"].shape == (0,)
    with pytest.raises(MappingError) as refused:
        make_plan(MemoryReader("dcp", arrays | {"train.n": np.asarray(-1)}), "orbax", mapping)
    assert str(refused.value) == "expected a size of 0 or more in train.n for axis n, got -1"


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    path = source(tmp_path / "a", {"head": 6})
    (path / "config.json").rename(tmp_path / "elsewhere.json")
    (path / "config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"config\.json, a link to"):
        convert(path, tmp_path / "b", mapping=table())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("d = 'head'", "lists of fields"),
        ("d = [1]", "lists of fields"),
        ("x = ['head']", r"expected sizes for axes of mapping test .*, got x"),
    ],
)
def test_a_malformed_table_is_refused(config: str, message: str) -> None:
    with pytest.raises(MappingError, match=message):
        parse_mapping(TABLE.replace('d = ["head", "width / heads"]', config), "test")


def test_a_field_that_is_no_name_is_refused(tmp_path: Path) -> None:
    path = source(tmp_path / "a", {"head": 6})
    wrong = parse_mapping(TABLE.replace('"head", ', '"__import__(1)", '), "test")
    with (
        open_checkpoint(path) as reader,
        pytest.raises(MappingError, match=r"expected a field of config\.json"),
    ):
        with_config(wrong, reader)
