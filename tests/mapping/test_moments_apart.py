"""Rules whose moments have entries of their own: other names and another layout than the weights."""

from __future__ import annotations

import numpy as np
import pytest

from bridge.core.formats.tensors.base import Box
from bridge.core.mapping import MappingError, MappingTable, make_plan, parse_mapping
from bridge.core.mapping.plan.running import SavedAs
from tests.mapping.test_running import run_state
from tests.mapping.test_scales import in_few_bits
from tests.support.bridge.bits import random_bits, same_bits
from tests.support.bridge.memory_reader import MemoryReader

F32 = np.dtype(np.float32)
G, R, D, M, LAYERS = 2, 3, 4, 5, 3
TABLE = """
[axes]
d = 4
k = "d"
[convention.apart]
[convention.stacked]
[[rule]]
apart.weights = ["layers.{i}.q : (g r d) m", "layers.{i}.k : (g k) m"]
apart.moments = "layers.{i}.both : (g (r d + k)) m"
stacked = ["q/w : m {i} (g r) d", "k/w : m {i} g k"]
[[rule]]
apart = "norm"
stacked = "norm/w"
"""


def table() -> MappingTable:
    return parse_mapping(TABLE, "test")


def arrays() -> dict[str, np.ndarray]:
    shapes = {"norm": (M,)}
    shapes |= {f"layers.{i}.{n}": (h * D, M) for i in range(LAYERS) for n, h in (("q", G * R), ("k", G))}
    tensors = {f"model.{name}": random_bits(shape, F32, k) for k, (name, shape) in enumerate(shapes.items())}
    kept = {"norm": (M,)} | {f"layers.{i}.both": (G * (R + 1) * D, M) for i in range(LAYERS)}
    for number, (name, shape) in enumerate(kept.items()):
        state = f"optimizer.state.{name}."
        tensors[state + "exp_avg"] = random_bits(shape, F32, 100 + number)
        tensors[state + "exp_avg_sq"] = random_bits(shape, F32, 200 + number)
        tensors[state + "step"] = np.asarray(7, np.float32)
    return tensors


def translated(source: MemoryReader, to: str, into: str | None = None) -> MemoryReader:
    plan = make_plan(source, to, table(), into=into)
    tensors = {name: tensor.read(source, Box.whole(tensor.shape)) for name, tensor in plan.tensors.items()}
    return MemoryReader(to, tensors, dict(plan.notes.values()))


def test_moments_are_taken_apart_and_put_together_again() -> None:
    source = MemoryReader("dcp", arrays())
    there = translated(source, "orbax")
    both = [source.arrays[f"optimizer.state.layers.{i}.both.exp_avg"] for i in range(LAYERS)]
    heads = np.stack(both).reshape(LAYERS, G, R + 1, D, M)
    q, k = heads[:, :, :R].reshape(LAYERS, G * R, D, M), heads[:, :, R]
    for name, expected in (("q", q), ("k", k)):
        moment = there.arrays[f"opt_state/mu/{name}/w"]
        assert same_bits(moment, np.ascontiguousarray(expected.transpose(3, 0, 1, 2)))
    assert there.arrays["opt_state/count"] == 7
    back = translated(there, "dcp")
    assert back.arrays.keys() == source.arrays.keys()
    assert [name for name, a in source.arrays.items() if not same_bits(back.arrays[name], a)] == []


def test_their_scales_go_with_them() -> None:
    source = MemoryReader("dcp", in_few_bits(arrays(), "float8_e4m3fn"))
    assert "optimizer.state.layers.0.both.exp_avg_scale" in source.arrays
    there = translated(source, "orbax")
    assert {"opt_state/mu_scale/q/w", "opt_state/mu_scale/k/w"} <= there.arrays.keys()
    back = translated(there, "dcp")
    for name, array in source.arrays.items():
        assert same_bits(back.arrays[name], array), name


def test_a_run_saves_them_box_by_box() -> None:
    source = MemoryReader("dcp", arrays())
    saved = SavedAs(run_state(source), table())
    expected = translated(source, "dcp", "stacked")
    filled = {name: np.zeros(t.shape, t.dtype) for name, t in saved.tensors.items()}
    for name, array in source.arrays.items():
        for start in range(array.shape[0] if array.ndim else 0):
            box = Box((start, *(0,) * (array.ndim - 1)), (1, *array.shape[1:]))
            for move in saved.moves(name, box):
                filled[move.name][move.box.slices()] = move.values(array[box.slices()])
    moments = [name for name in filled if name.startswith(("opt_state.mu", "opt_state.nu"))]
    assert len(moments) == 6
    assert [name for name in moments if not same_bits(filled[name], expected.arrays[name])] == []


def test_hyperparameters_follow_what_the_optimizer_has() -> None:
    text = TABLE.replace(
        "[convention.stacked]", '[convention.stacked]\n[convention.flat]\nformat = ""'
    ).replace('stacked = "norm/w"', 'stacked = "norm/w"\nflat = "n"')
    text = text.replace("stacked = [", 'flat = ["{i}.query : (g r d) m", "{i}.key : (g k) m"]\nstacked = [')
    values = {f"optimizer.param_groups.layers.{i}.both.lr": 0.1 * i for i in range(LAYERS)}
    values["optimizer.param_groups.norm.lr"] = 9.0
    objects = {("optimizer", name.removeprefix("optimizer.")): value for name, value in values.items()}
    source = MemoryReader("dcp", arrays(), objects)
    plan = make_plan(source, "dcp", parse_mapping(text, "test"), into="flat")
    hyperparameters = {path[-1]: value for path, value in plan.notes.values() if path[0] == "optimizer"}
    expected = {f"param_groups.{i}.{n}.lr": 0.1 * i for i in range(LAYERS) for n in ("query", "key")}
    assert hyperparameters == expected | {"param_groups.n.lr": 9.0}
    flat = {name: t.read(source, Box.whole(t.shape)) for name, t in plan.tensors.items()}
    again = MemoryReader("dcp", flat, {("optimizer", name): value for name, value in hyperparameters.items()})
    back = make_plan(again, "dcp", parse_mapping(text, "test"), into="apart")
    assert {p[-1]: v for p, v in back.notes.values() if p[0] == "optimizer"} == {
        path[-1]: value for path, value in objects.items()
    }
    hyperparameters["param_groups.1.key.lr"] = 5.0
    again = MemoryReader("dcp", flat, {("optimizer", name): value for name, value in hyperparameters.items()})
    with pytest.raises(MappingError, match=r"equal hyperparameters of weights that become layers\.1\.both"):
        make_plan(again, "dcp", parse_mapping(text, "test"), into="apart")


def test_weights_of_one_rule_may_have_different_hyperparameters() -> None:
    source = MemoryReader("dcp", {n: a for n, a in arrays().items() if n.startswith("model.")})
    names = [name.removeprefix("model.") for name in source.arrays]
    values = {f"param_groups.{name}.lr": float(number) for number, name in enumerate(names)}
    objects = {("optimizer", name): value for name, value in values.items()}
    text = TABLE.replace('apart.moments = "layers.{i}.both : (g (r d + k)) m"\n', "").replace(
        "apart.weights", "apart"
    )
    text = text.replace('stacked = "', 'stacked = "flat.').replace("norm/w", "n")
    text = text.replace(
        '["q/w : m {i} (g r) d", "k/w : m {i} g k"]', '["{i}.query : (g r d) m", "{i}.key : (g k) m"]'
    )
    plan = make_plan(
        MemoryReader("dcp", source.arrays, objects), "dcp", parse_mapping(text, "test"), into="stacked"
    )
    hyperparameters = {path[-1]: value for path, value in plan.notes.values() if path[0] == "optimizer"}
    new = {"q": "query", "k": "key"}
    expected = {}
    for name, value in values.items():
        _, *path, entry = name.split(".")
        renamed = "flat.n" if path == ["norm"] else f"{path[1]}.{new[path[2]]}"
        expected[f"param_groups.{renamed}.{entry}"] = value
    assert hyperparameters == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(g (r d + k)) m", "(g (r d)) m", "expected the same axes on both sides of rule .* apart's moments"),
        ("layers.{i}.both", "both", "expected the same path indices in all entries of a side"),
        (
            'apart.moments = "layers.{i}.both : (g (r d + k)) m"',
            "apart.moments = 3",
            "for moments of apart in rule 1",
        ),
        ('apart.moments = "', 'apart.others = "', "expected only moments, weights in apart in rule 1"),
        ("apart.weights = [", "apart.moment = [", "expected only moments, weights in apart in rule 1"),
    ],
)
def test_a_rule_that_does_not_fit_together_is_refused(old: str, new: str, message: str) -> None:
    assert old in TABLE
    with pytest.raises(MappingError, match=message):
        parse_mapping(TABLE.replace(old, new), "test")


def test_parts_of_a_table_keep_them() -> None:
    source = MemoryReader("dcp", arrays())
    whole = make_plan(source, "orbax", table())
    for part in (table().between("apart", "stacked"), table().part()):
        assert make_plan(source, "orbax", part).tensors.keys() == whole.tensors.keys()
