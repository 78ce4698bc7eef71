"""Rows with which one convention pads a vocabulary: zeros there, left out here, and refused if they are not zeros."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bridge.checkpoints.convert.conversion import convert
from bridge.core.formats import open_checkpoint
from bridge.core.formats.tensors.base import Box, CheckpointError
from bridge.core.mapping import MappingError, MappingTable, Plan, make_plan, parse_mapping
from bridge.core.mapping.one_rule.sizes import with_config_fields
from bridge.core.mapping.plan.running import LoadedAs, RunState, SavedAs
from tests.checkpoints.test_convert import write
from tests.support.bridge.bits import same_bits
from tests.support.bridge.memory_reader import MemoryReader

TABLE = """
[convention.torch]
[convention.jax]
[convention.like]
like = "jax"
format = ""
[config]
vocab = ["vocab_size"]
[[rule]]
torch = "embed.weight : vocab m"
jax = "embed/embedding : (vocab + zeros(padding)) m | times(2)"
[[rule]]
torch = "head.weight : vocab m"
jax = "head/kernel : m (vocab + zeros(padding))"
[[rule]]
torch = "norm.weight : m"
jax = "norm/scale : m"
like = "norm/weight : m"
"""
ROWS, PADDED, WIDTH = 7, 10, 3
NAMES = {"embed.weight": "embed/embedding", "head.weight": "head/kernel", "norm.weight": "norm/scale"}


def table(**axes: int) -> MappingTable:
    return parse_mapping(TABLE, "padded.toml").with_axes(axes)


def of_a_model(vocab_size: int = ROWS) -> MappingTable:
    return with_config_fields(table(), {"vocab_size": vocab_size}, "config.json")


def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for name in NAMES:
        for text in (
            f"model.{name}",
            f"optimizer.state.{name}.exp_avg",
            f"optimizer.state.{name}.exp_avg_sq",
        ):
            shape = (WIDTH,) if name == "norm.weight" else (ROWS, WIDTH)
            tensors[text] = random.standard_normal(shape).astype(np.float32)
        tensors[f"optimizer.state.{name}.step"] = np.asarray(4, np.float32)
    return tensors


def padded(rows: int = PADDED) -> dict[str, np.ndarray]:
    """The tree that they become, by NumPy."""
    tree: dict[str, np.ndarray] = {"opt_state/count": np.asarray(4, np.int32)}
    factors = {"params": 2, "opt_state/mu": 0.5, "opt_state/nu": 0.25}
    for name, there in NAMES.items():
        for suffix, beginning in (
            ("", "params"),
            (".exp_avg", "opt_state/mu"),
            (".exp_avg_sq", "opt_state/nu"),
        ):
            array = arrays()[f"optimizer.state.{name}{suffix}" if suffix else f"model.{name}"]
            if name != "norm.weight":
                array = np.concatenate([array, np.zeros((rows - ROWS, WIDTH), np.float32)])
            if name == "embed.weight":
                array = array * np.float32(factors[beginning])
            tree[f"{beginning}/{there}"] = array.T.copy() if name == "head.weight" else array
    return tree


def contents(plan: Plan, reader: MemoryReader) -> dict[str, np.ndarray]:
    return {name: t.read(reader, Box.whole(t.shape)) for name, t in plan.tensors.items()}


def equal(converted: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return converted.keys() == expected.keys() and all(
        same_bits(converted[n], expected[n]) for n in converted
    )


def test_rows_are_added_as_zeros_of_weights_and_moments() -> None:
    reader = MemoryReader("dcp", arrays())
    plan = make_plan(reader, "orbax", table(padding=PADDED - ROWS), into="jax")
    assert equal(contents(plan, reader), padded())
    assert plan.inexact == ()
    for name, expected in padded().items():
        for k in range(len(expected) if expected.ndim == 2 else 0):
            box = Box((k, 1), (min(2, len(expected) - k), expected.shape[1] - 1))
            assert np.array_equal(plan.tensors[name].read(reader, box), expected[box.slices()])


def test_no_row_is_added_where_nobody_says_how_many() -> None:
    reader = MemoryReader("dcp", arrays())
    assert equal(contents(make_plan(reader, "orbax", of_a_model(), into="jax"), reader), padded(ROWS))


def test_rows_beyond_the_vocabulary_are_left_out() -> None:
    reader = MemoryReader("orbax", padded())
    for mapping in (of_a_model(), table(vocab=ROWS), table(padding=PADDED - ROWS)):
        assert equal(contents(make_plan(reader, "dcp", mapping), reader), arrays())
    kept = make_plan(reader, "dcp", table())
    assert kept.tensors["model.head.weight"].shape == (PADDED, WIDTH)


@pytest.mark.parametrize("name", ["params/embed/embedding", "opt_state/nu/head/kernel"])
@pytest.mark.parametrize("place", [(PADDED - 1, 0), (ROWS, WIDTH - 1)])
def test_rows_that_are_not_zeros_are_refused_unless_the_caller_says_how_many(
    name: str, place: tuple[int, int]
) -> None:
    tree = padded()
    tree[name][place if "embed" in name else place[::-1]] = np.nan
    reader = MemoryReader("orbax", tree)
    for mapping in (of_a_model(), table(vocab=ROWS)):
        with pytest.raises(MappingError) as refused:
            make_plan(reader, "dcp", mapping)
        axis = 0 if "embed" in name else 1
        assert f"{name} of" in str(refused.value)
        assert f"has 10 elements along axis {axis}, but the model has 7: expected zeros" in str(refused.value)
        assert "(--axis padding=3;" in str(refused.value)
    converted = contents(make_plan(reader, "dcp", table(padding=PADDED - ROWS)), reader)
    assert equal(converted, arrays())
    assert make_plan(reader, "dcp", table(padding=0)).tensors["model.embed.weight"].shape == (PADDED, WIDTH)


def test_fewer_rows_than_the_vocabulary_are_refused() -> None:
    reader = MemoryReader("orbax", padded(8))
    with pytest.raises(
        MappingError, match="expected 9 or more for the size of an axis with padding in it, got 8"
    ):
        make_plan(reader, "dcp", of_a_model(9))


def test_a_convention_with_padding_of_its_own_gets_the_rows_as_they_are() -> None:
    tree = padded()
    tree["params/head/kernel"][:, -1] = 5
    reader = MemoryReader("orbax", tree)
    converted = contents(make_plan(reader, "orbax", of_a_model(), into="like"), reader)
    assert equal(
        converted, {name.replace("norm/scale", "norm/weight"): array for name, array in tree.items()}
    )


def test_moments_with_scales_are_not_padded() -> None:
    few = arrays()
    for name in ("embed.weight", "head.weight"):
        key = f"optimizer.state.{name}.exp_avg"
        few |= {
            key: few[key].astype(np.float16),
            f"{key}_scale": np.ones((ROWS, 1), np.float32),
        }
    reader = MemoryReader("dcp", few)
    with pytest.raises(MappingError, match="expected moments without scales to add padding to"):
        make_plan(reader, "orbax", table(padding=1), into="jax")
    there = MemoryReader("orbax", contents(make_plan(reader, "orbax", table(), into="jax"), reader))
    assert equal(contents(make_plan(there, "dcp", table()), there), few)


@pytest.mark.parametrize(
    "entry",
    ["w : (zeros(p) + v) m", "w : (v zeros(p)) m", "w : (2 (v + zeros(p))) m", "w : (a + (v + zeros(p))) m"],
)
def test_padding_elsewhere_than_at_the_end_of_an_axis_is_refused(entry: str) -> None:
    with pytest.raises(MappingError, match=r"expected zeros\(\.\.\.\) as the last part|unexpected"):
        parse_mapping(f'[[rule]]\ntorch = "w : v m"\njax = "a/{entry}"', "a.toml")


def run_state(reader: MemoryReader) -> RunState:
    def whole(name: str) -> np.ndarray | None:
        return reader.arrays[name] if reader.arrays[name].ndim == 0 else None

    return RunState(reader.format, "the run", reader.tensors, {}, {}, whole)


def test_a_run_is_not_saved_with_padding_and_not_without_what_may_be_more_than_that() -> None:
    run = run_state(MemoryReader("dcp", arrays()))
    pair = table(padding=3).between("torch", "jax")
    with pytest.raises(CheckpointError, match=r"params\.embed\.embedding would have padding"):
        list(SavedAs(run, pair).moves("model.embed.weight", Box((0, 0), (ROWS, WIDTH))))
    run = run_state(MemoryReader("orbax", padded()))
    with pytest.raises(CheckpointError, match=r"compares its values \(.*padding\)"):
        SavedAs(run, of_a_model().between("torch", "jax"))


def test_a_run_takes_as_many_rows_as_it_has() -> None:
    there, here = MemoryReader("orbax", padded()), MemoryReader("dcp", arrays())
    loaded = LoadedAs(there, run_state(here), table().between("torch", "jax"))
    assert equal({name: loaded.read(name) for name in loaded.tensors}, arrays())
    back = LoadedAs(here, run_state(there), table().between("torch", "jax"))
    assert equal({name: back.read(name) for name in back.tensors}, padded())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_whole_checkpoint_goes_there_and_back(tmp_path: Path, workers: int) -> None:
    write(tmp_path / "torch", "dcp", arrays(), {})
    convert(
        tmp_path / "torch",
        tmp_path / "jax",
        to="orbax",
        mapping=table(padding=3),
        into="jax",
        workers=workers,
    )
    with open_checkpoint(tmp_path / "jax") as reader:
        assert equal({n: reader.read(n) for n in reader.tensors}, padded())
    (tmp_path / "jax" / "config.json").write_text('{"vocab_size": 7}')
    convert(tmp_path / "jax", tmp_path / "back", to="dcp", mapping=table(), workers=workers)
    with open_checkpoint(tmp_path / "back") as reader:
        assert equal({n: reader.read(n) for n in reader.tensors}, arrays())
