"""A run's state under the other side of a mapping, box by box: each element once, as a conversion of all has it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bridge.core.formats.tensors.base import Box, CheckpointError
from bridge.core.mapping import MappingError, MappingTable, load_mapping, make_plan, parse_mapping
from bridge.core.mapping.plan.running import LoadedAs, RunState, SavedAs
from tests.mapping.test_scales import in_few_bits
from tests.support.bridge.decoder_trees import dcp_arrays, expected_orbax
from tests.support.bridge.memory_reader import MemoryReader

FUSED = """
[axes]
g = 2
r = 3
d = 4
k = "d"
up = "gate"
z = 2
a3 = 2
kk = 2
dd = 2
[[rule]]
torch = "qkv : (g (r interleaved(d) + interleaved(k) + v)) m | times(4)"
jax = ["q/w : m (g r) d", "k/w : m g k", "v/w : m g v"]
[[rule]]
torch = ["one.{i} : gate m", "two.{i} : up m"]
jax = "experts/w : {i} m (gate + up)"
[[rule]]
torch = "whole : a"
jax = "rows/w : (a)"
[[rule]]
torch = "parts : m (s + z)"
jax = ["parts/s : m s", "parts/z : z m"]
[[rule]]
torch = ["x : kk (a3 dd)", "y : 1 (a3 zz)"]
jax = "joined/w : (a3 (kk dd + zz))"
[[rule]]
torch = "scalar"
jax = "rows/scalar"
[[rule]]
torch = "hollow : a2 b2"
jax = "rows/hollow : b2 a2"
"""


def fused_arrays() -> dict[str, np.ndarray]:
    shapes = {
        "qkv": (2 * (3 * 4 + 4 + 5), 7),
        "whole": (11,),
        "parts": (6, 8),
        "scalar": (),
        "hollow": (0, 3),
        "x": (2, 4),
        "y": (1, 6),
    }
    shapes |= {f"{name}.{i}": (5, 3) for name in ("one", "two") for i in range(3)}
    random = np.random.default_rng(0)
    arrays = {}
    for name, shape in shapes.items():
        arrays[f"model.{name}"] = random.standard_normal(shape).astype(np.float32)
        for moment in ("exp_avg", "exp_avg_sq"):
            arrays[f"optimizer.state.{name}.{moment}"] = random.standard_normal(shape).astype(np.float32)
        arrays[f"optimizer.state.{name}.step"] = np.asarray(4, np.float32)
    return arrays


def run_state(reader: MemoryReader) -> RunState:
    """A run of which every process has 0-d tensors alone."""

    def whole(name: str) -> np.ndarray | None:
        return reader.arrays[name] if reader.arrays[name].ndim == 0 else None

    return RunState(reader.format, "the run", reader.tensors, reader.objects, reader.object_paths, whole)


def pieces_of(box: Box, random: np.random.Generator) -> Iterator[Box]:
    """A partition of a box by random cuts, with empty boxes among them."""
    axes = [axis for axis, size in enumerate(box.sizes) if size > 0]
    if not axes or random.random() < 0.3:
        yield box
        return
    axis = int(random.choice(axes))
    at = int(random.integers(0, box.sizes[axis] + 1))
    for start, size in ((0, at), (at, box.sizes[axis] - at)):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += start
        sizes[axis] = size
        inner = Box(tuple(offsets), tuple(sizes))
        yield from pieces_of(inner, random) if size < box.sizes[axis] else [inner]


CASES: dict[str, tuple[MappingTable, MemoryReader]] = {
    "decoder": (load_mapping("decoder"), MemoryReader("dcp", dcp_arrays())),
    "decoder in float8": (
        load_mapping("decoder"),
        MemoryReader("dcp", in_few_bits(dcp_arrays(), "float8_e4m3fn")),
    ),
    "stacked": (load_mapping("decoder_stacked"), MemoryReader("dcp", dcp_arrays())),
    "from jax": (
        load_mapping("decoder_stacked"),
        MemoryReader("orbax", expected_orbax(dcp_arrays(), stacked=True)),
    ),
    "fused": (parse_mapping(FUSED, "fused.toml"), MemoryReader("dcp", fused_arrays())),
    "fused in float16": (
        parse_mapping(FUSED, "fused.toml"),
        MemoryReader("dcp", in_few_bits(fused_arrays(), "float16")),
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_boxes_of_a_run_fill_the_checkpoint_that_a_conversion_makes(case: str, seed: int) -> None:
    table, reader = CASES[case]
    saved = SavedAs(run_state(reader), table)
    expected = make_plan(reader, reader.format, table, into="jax" if reader.format == "dcp" else "torch")
    assert saved.tensors.keys() == expected.tensors.keys()
    filled = {name: np.zeros(t.shape, t.dtype) for name, t in saved.tensors.items()}
    times = {name: np.zeros(t.shape, int) for name, t in saved.tensors.items()}
    random = np.random.default_rng(seed)
    for source, array in reader.arrays.items():
        for box in pieces_of(Box.whole(array.shape), random):
            for move in saved.moves(source, box):
                filled[move.name][move.box.slices()] = move.values(array[box.slices()])
                times[move.name][move.box.slices()] += 1
    for name, tensor in expected.tensors.items():
        if isinstance(tensor.content, np.ndarray):
            assert tensor.content == saved.tensors[name].content
            continue
        assert (times[name] == 1).all(), name
        assert filled[name].tobytes() == tensor.read(reader, Box.whole(tensor.shape)).tobytes(), name
        assert filled[name].dtype == tensor.dtype


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_read_under_the_names_of_the_run(case: str) -> None:
    table, reader = CASES[case]
    target = make_plan(reader, "orbax" if reader.format == "dcp" else "dcp", table)
    there = {name: t.read(reader, Box.whole(t.shape)) for name, t in target.tensors.items()}
    stored = MemoryReader("orbax" if reader.format == "dcp" else "dcp", there)
    for checkpoint in (stored, reader):
        loaded = LoadedAs(checkpoint, run_state(reader), table)
        assert loaded.tensors.keys() == reader.tensors.keys()
        for name, array in reader.arrays.items():
            assert loaded.tensors[name].path == reader.tensors[name].path
            whole = Box.whole(array.shape)
            for box in pieces_of(whole, np.random.default_rng(1)):
                values = loaded.read(name, box)
                assert values.tobytes() == np.ascontiguousarray(array[box.slices()]).tobytes(), name


def test_of_several_conventions_two_can_be_chosen() -> None:
    table = load_mapping("llama").between("hf", "torchtitan")
    assert list(table.conventions) == ["hf", "torchtitan"]
    assert all(list(rule.sides) == ["hf", "torchtitan"] for rule in table.rules)
    # A weight is tied to what the other conventions call it.
    tied = [rule.tied_to for rule in load_mapping("llama").between("flax", "maxtext").rules if rule.tied_to]
    assert tied == ["embed/embedding"]
    for names in (("hf",), ("hf", "hf"), ("hf", "megatron")):
        with pytest.raises(
            MappingError, match=r"expected two conventions or more of mapping llama \(hf, torchtitan, "
        ):
            load_mapping("llama").between(*names)


def test_a_comparison_of_values_that_no_process_has_is_refused() -> None:
    arrays = dcp_arrays()
    arrays["model.lm_head.weight"] = arrays["model.embed.weight"]
    for key in ("exp_avg", "exp_avg_sq", "step"):
        del arrays[f"optimizer.state.lm_head.weight.{key}"]
    with pytest.raises(
        CheckpointError, match=r"of the run is sharded over processes.*save without the mapping"
    ):
        SavedAs(run_state(MemoryReader("dcp", arrays)), load_mapping("decoder").with_tied("once"))
    joined = parse_mapping('[[rule]]\ntorch = ["s : m s", "z : m z"]\njax = "w/x : m (s + z)"\n', "x.toml")
    own = {f"model.{name}": np.ones((4, 6), np.float32) for name in "sz"}
    own |= {
        f"optimizer.state.{name}.{moment}": a
        for name, a in zip("sz", own.values(), strict=True)
        for moment in ("exp_avg", "exp_avg_sq")
    }
    own |= {f"optimizer.state.{name}.step": np.asarray(1, np.float32) for name in "sz"}
    with pytest.raises(CheckpointError, match=r"scales of rows that the mapping joins"):
        SavedAs(run_state(MemoryReader("dcp", in_few_bits(own, "float16"))), joined)


def test_a_box_of_a_value_that_every_process_has_is_read() -> None:
    array = np.arange(12.0).reshape(3, 4)
    run = RunState("dcp", "the run", MemoryReader("dcp", {"w": array}).tensors, {}, {}, lambda _: array)
    assert np.array_equal(run.read("w"), array)
    part = run.read("w", Box((1, 2), (2, 1)))
    assert (part.tolist(), part.flags.c_contiguous) == ([[6.0], [10.0]], True)


def test_a_model_that_the_mapping_does_not_know_is_refused() -> None:
    other, known = (
        MemoryReader("dcp", {"model.other": np.ones(3, np.float32)}),
        MemoryReader("dcp", dcp_arrays()),
    )
    with pytest.raises(MappingError, match=r"does not fit the run; is this another model"):
        SavedAs(run_state(other), "decoder")
    with pytest.raises(MappingError, match=r"does not fit memory; is this another model"):
        LoadedAs(other, run_state(known), "decoder")


@pytest.mark.parametrize("mapping", ["decoder", "decoder_stacked"])
def test_sizes_of_axes_follow_from_the_shapes_of_the_run(mapping: str) -> None:
    arrays = {name: a for name, a in dcp_arrays().items() if not name.startswith("train.model.")}
    reader = MemoryReader("dcp", arrays)
    run = MemoryReader("orbax", expected_orbax(arrays, stacked=mapping == "decoder_stacked"))
    with pytest.raises(
        MappingError,
        match=r"the size of axis d \(the mapping takes it from train\.model\.head_dim, .* does not follow from",
    ):
        make_plan(reader, "orbax", load_mapping(mapping))
    loaded = LoadedAs(reader, run_state(run), mapping)
    assert loaded.tensors.keys() == run.arrays.keys()
    for name, array in run.arrays.items():
        assert loaded.read(name).tobytes() == np.ascontiguousarray(array).tobytes(), name


def test_a_run_of_another_size_is_named_where_its_shapes_are_needed() -> None:
    arrays = {name: a for name, a in dcp_arrays().items() if not name.startswith("train.model.")}
    other = expected_orbax(arrays)
    other = {name: a[:, :, :-1] if name.endswith("query/kernel") else a for name, a in other.items()}
    with pytest.raises(
        MappingError, match=r"layers.0.attention.wq.weight: expected size 16 on axis 0 .* got 20"
    ):
        LoadedAs(MemoryReader("dcp", arrays), run_state(MemoryReader("orbax", other)), "decoder")
